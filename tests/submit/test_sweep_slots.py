"""Runs of a sweep that go on side by side: emulated devices for each, GPUs divided or refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cluster.devices import Gpus
from launcher.config.compose import Asked, load, load_points
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.config.sections import TASKS
from launcher.submit import sweep


def config(*words: str, jobs: int) -> Config:
    one = load(["recipe=smoke", "parallel=data", *words])
    return replace(one, sweep=replace(one.sweep, jobs=jobs))


def places(gpus: int, *configs: Config, visible: str | None = None) -> list[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "find_gpus", lambda environ: Gpus(("H100",) * gpus))
        return sweep.find_slots(configs, {"CUDA_VISIBLE_DEVICES": visible} if visible else {})


def test_no_two_have_the_same_gpu() -> None:
    two = config("cluster=local", "cluster.gpus=2", jobs=2)
    one = config("cluster=local", "cluster.gpus=1", jobs=2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(5, two, one)] == ["0,1", "2,3"]
    shown = places(4, one, visible="GPU-a, GPU-b,GPU-c,GPU-d")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in shown] == ["GPU-a", "GPU-b"]


def test_emulated_devices_and_plans_are_there_for_all() -> None:
    assert places(1, config("cluster=emulated", "cluster.gpus=8", jobs=3)) == [{}, {}, {}]
    assert places(1, config("cluster=h100_8", "task=plan", jobs=2)) == [{}, {}]
    assert places(0, config("cluster=local", jobs=2)) == [{}, {}]  # CPU devices stand in
    assert places(1, config("cluster=local", jobs=1)) == [{}]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("cluster=local", "cluster.gpus=3", "train.global_batch_size=9"),
            "sweep.jobs=2 runs with cluster.gpus=3 need 6 GPUs, but this machine has 4. "
            "Set sweep.jobs=1 or less, or fewer cluster.gpus.",
        ),
        (
            ("cluster=local", "cluster.gpus=null"),
            "sweep.jobs=2, but each run takes all 4 GPUs of this machine. "
            "Say how many each run is to have: cluster.gpus=2.",
        ),
        (
            ("cluster=ray", "cluster.gpus=2"),
            "sweep.jobs=2, but cluster=ray has one set of devices. "
            "Leave sweep.jobs out: the runs then go one after another.",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        places(4, config(*words, jobs=2))
    assert str(caught.value) == error


WITH_GROUP = ((), ("wandb.group=null",), ("report.trackers=[wandb,mlflow]",))
WITHOUT = (
    *(("report=none",), ("report=tensorboard",), ("report=mlflow",), ("report.trackers=[]",)),
    *(("report.trackers=null",), ("report.trackers=[mlflow]",), ("wandb.mode=disabled",)),
)


def in_sweep(*words: str) -> tuple[Config, Config]:
    """The settings of a point, and those of the run that the sweep starts for it."""
    [point], _ = load_points([Asked((), words)])
    return point.config, load(sweep._command(point, (), Path("a home=1"), "s-0", "s")[3:])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", [*WITH_GROUP, *WITHOUT])
def test_a_run_gets_the_sweeps_group_where_it_can_have_one(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("recipe=smoke", "sweep={jobs: 2}", "+sweep.jobs=3", *words)
    found = in_sweep(*given)[1]
    assert found.wandb.group == ("s" if words in WITH_GROUP else None)
    assert found.sweep.jobs == 1
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert in_sweep(*given)[1].wandb.group is None  # the variable counts


@pytest.mark.sampled(6)
@pytest.mark.parametrize("task", TASKS)
def test_what_a_sweep_adds_to_a_task_is_what_it_reads(task: str) -> None:
    needed = {"sweep_status": ["sweep.dir=a"], "submit": ["cluster=slurm", "cluster.gpus=2"]}
    words = [
        *needed.get(task, []),
        *(["run.id=of_mine"] if "run.id" in (TASKS[task] or ()) else []),
    ]
    asked, found = in_sweep(f"task={task}", *words)
    is_run = TASKS[task] is None
    assert found.run == (replace(asked.run, dir="a home=1", id="s-0") if is_run else asked.run)
