"""`python -m launcher` as a user meets it: trained, stopped, resumed, refused, nothing left behind.

Launcher processes are few, because each brings up Ray and compiles.
"""

import contextlib
import io
import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml
from launched import MARK, Launcher, lines, losses, summary, train, typed

from launcher.__main__ import main
from launcher.config.compose import to_dict
from launcher.config.reader import from_dict
from launcher.report.trackers.tracker import METRIC_KEYS

TINY_GPT = typed(
    f"dataset=text dataset.path=${{oc.env:{MARK}_SECRET}} model.num_layers=2 model.num_heads=2 "
    "model.hidden_size=32 model.sequence_length=16 train.global_batch_size=8 train.eval_every=20 "
    "train.eval_batches=1 optimizer.learning_rate=0.01 optimizer.decay=constant parallel=manual "
    "parallel.num_micro_batches=2 cluster=emulated cluster.gpus=2"
)
SMOKE = ("recipe=smoke", "wandb.mode=disabled")
FOREVER = "train.steps=1000000"
SECRET = "s3cret-value-of-a-variable"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the user stands, with a text in it and nothing else."""
    folder = tmp_path_factory.mktemp("user")
    os.environ[f"{MARK}_SECRET"] = SECRET
    (folder / SECRET).write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


@pytest.fixture(scope="module")
def resumed(folder: Path) -> tuple[Path, str]:
    """A run that Ctrl-C ended and a second command took up again, after a dry step; and what that
    said. While it ran nobody else might have its folder."""
    run = folder / "outputs" / "fox"
    launcher = Launcher(folder, *TINY_GPT, "run.id=fox", FOREVER, "wandb.mode=disabled")
    launcher.wait_for(lambda: len(lines(run)) >= 25)
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as told:
        patch.chdir(folder)
        with contextlib.redirect_stderr(told):
            assert main([*TINY_GPT, "run.id=fox"]) == 2
        assert "run.id=fox is running right now" in told.getvalue()
    os.killpg(launcher.process.pid, signal.SIGINT)
    code, out, err = launcher.end()
    assert (code, err) == (130, "")
    finished = len(lines(run))
    assert summary(run)["exit_reason"] == "interrupted"
    assert summary(run)["steps"] == finished
    assert [path.name for path in (run / "checkpoints").iterdir()] == [str(finished)]
    assert f"interrupted: {finished} steps" in out
    assert "run.id=fox" in out.splitlines()[-1]  # the command that resumes it

    more = f"train.steps={finished + 5}"
    out = train(folder, *TINY_GPT, "run.id=fox", "train.dry_steps=1", more)
    assert "warming up" in out
    assert len(lines(run)) == finished + 5
    return run, out


@pytest.fixture(scope="module")
def run(resumed: tuple[Path, str]) -> Path:
    return resumed[0]


def test_the_loss_falls(run: Path) -> None:
    found = losses(run)
    assert 5 < found[0] < 6
    assert found[-1] < found[0] - 1


def test_what_a_run_leaves_is_for_its_user_alone(run: Path, folder: Path) -> None:
    """Whichever process or library wrote it; the folder above may hold shared runs."""
    left = [run, *run.rglob("*")]
    assert len(left) > 30
    assert {path for path in left if path.stat().st_mode & 0o077} == set()
    assert (folder / "outputs").stat().st_mode & 0o077


def test_the_value_of_a_variable_is_nowhere_in_what_a_run_leaves(run: Path) -> None:
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["dataset"]["path"] == f"${{oc.env:{MARK}_SECRET}}"


def test_every_step_is_logged_once_with_every_metric(resumed: tuple[Path, str]) -> None:
    run, out = resumed
    found = lines(run)
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    (stopped_at,) = map(int, re.findall(r"resuming run fox at step (\d+)", out))
    for line in found:
        assert set(METRIC_KEYS) <= line.keys()
        # A snapshot right after the first step of a start asks for it before stages are timed.
        is_early = line["step"] in (1, stopped_at + 1)
        assert is_early or {"pipeline/stage_0_seconds", "pipeline/stage_1_seconds"} <= line.keys()
        unknown = {key for key, value in line.items() if value is None}
        untimed = {"pipeline/bubble_fraction"} if is_early else set()
        assert unknown <= {"perf/mfu"} | untimed  # a CPU has no peak to hold it against
        assert line["perf/tokens_per_second"] == pytest.approx(8 * 16 / line["perf/step_seconds"])
        assert ("eval/loss" in line) == (line["step"] % 20 == 0 or line is found[-1])


def test_the_run_folder_holds_what_it_should(resumed: tuple[Path, str]) -> None:
    run, out = resumed
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["run"]["id"] == run.name
    assert to_dict(from_dict(config)) == config
    plan = json.loads((run / "plan.json").read_text())
    assert [stage["layers"] for stage in plan["stages"]] == [[0], [1]]
    (worker,) = plan["workers"]
    assert (worker["host"], worker["address"], worker["devices"]) == (0, "127.0.0.1", [0, 1])
    for plot in ("loss", "timeline"):
        assert (run / "plots" / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "logs" / "worker_0.log").exists()
    # Like with like: what its programs need of a device beside what the plan says of one.
    measured, predicted = (summary(run)[f"{p}peak_memory_bytes"] for p in ("", "predicted_"))
    assert predicted == max(stage["memory_bytes"] for stage in plan["stages"])
    assert measured == pytest.approx(predicted, rel=0.25)
    assert list((run / "wandb").glob("offline-run-*"))
    assert not list(run.rglob("*.pkl"))

    found = summary(run)
    assert found["run_id"] == run.name
    assert found["exit_reason"] == "done"
    assert found["final_loss"] == losses(run)[-1]
    assert found["restarts"] == 0
    assert found["predicted_step_seconds"] == plan["predicted_step_seconds"]
    for key in ("step_seconds_median", "compile_seconds", "plan_seconds"):
        assert 0 < found[key] < found["total_seconds"]
    assert found["compile_seconds"] < found["time_to_first_step_seconds"] < found["total_seconds"]
    assert "2 emulated CPU devices" in out
    assert f"outputs/{run.name}" in out


def test_a_complete_run_has_nothing_left_to_do(
    run: Path, folder: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(folder)
    steps = len(lines(run))
    before = summary(run)
    assert main([*TINY_GPT, "run.id=fox", f"train.steps={steps}"]) == 0
    assert f"run fox is complete, {steps} of {steps} steps" in capsys.readouterr().out
    assert summary(run) == before


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("more", "code", "told"),
    [
        (["run.id=fox", "run.resume=never"], 2, "run.id=fox is taken"),
        (["run.id=new", "run.resume=must"], 2, "run.resume=must finds nothing to resume from"),
        (["run.id=fox", "model.num_layers=4"], 2, "model.num_layers=4 does not fit run.id=fox"),
        (["dataset.path=/nowhere/x.txt"], 2, "dataset.path=/nowhere/x.txt"),
        (["dataset.path=/dev/null"], 2, "dataset.path=/dev/null"),
        (["model.sequence_length=9999"], 2, "less than one sequence of 9999 + 1 bytes"),
        (["cluster.gpus=3", "parallel.num_stages=2"], 2, "cluster.gpus"),
        (["cluster=local", "cluster.gpus=999"], 2, "Set cluster.gpus=64 or less"),
        (["train.global_batch_size=9"], 2, "train.global_batch_size=9"),
        (["cluster=local", "cluster.hosts=2"], 2, "cluster.hosts=2"),
        (["run.dir=/dev/null/outputs"], 2, "Set run.dir to a folder that you can write"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing_behind(
    request, folder: Path, more: list[str], code: int, told: str, capsys, monkeypatch
) -> None:
    if "run.id=fox" in more:
        request.getfixturevalue("run")
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert main([*TINY_GPT, *more]) == code
    err = capsys.readouterr().err
    assert err.startswith("launcher: ")
    assert err.count("\n") == 1
    assert told in err
    assert sorted(folder.rglob("*")) == before


def test_planning_starts_nothing_and_writes_the_plan(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    """Under an id that the launcher chooses."""
    assert main([*TINY_GPT, "task=plan", "cluster.hosts=2"]) == 0
    (run,) = (folder / "outputs").glob("gpt-*")
    assert sorted(path.name for path in run.iterdir()) == [
        *(".lock", "config.yaml", "plan.json", "plots", "report.html", "summary.json")
    ]
    plan = json.loads((run / "plan.json").read_text())
    assert [stage["hosts"] for stage in plan["stages"]] == [[0], [1]]
    assert plan["workers"] == []
    assert "plan: manual, 2 stages" in capsys.readouterr().out


@pytest.mark.slow
def test_two_hosts_train_as_one_and_go_on_from_its_checkpoint(folder: Path) -> None:
    """By both transports; the other way round: tests/checkpoint/test_checkpoint_plans.py."""

    own = (*TINY_GPT, "train.eval_every=2", "wandb.mode=disabled")
    train(folder, *own, "run.id=one", "train.steps=3")
    train(folder, *own, "run.id=one", "train.steps=6", "cluster.hosts=2")
    collective = "cluster.hosts=2", "cluster.transport=collective"
    train(folder, *own, "run.id=two", "train.steps=6", *collective)
    one, two = folder / "outputs" / "one", folder / "outputs" / "two"
    assert losses(one) == pytest.approx(losses(two), rel=1e-5)
    evaluations = [
        {line["step"]: line["eval/loss"] for line in lines(run)[3:] if "eval/loss" in line}
        for run in (one, two)
    ]
    assert list(evaluations[0]) == [4, 6]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    assert all(lines(two)[-1][f"pipeline/stage_{s}_seconds"] > 0 for s in range(2))
    for run, way in ((one, "pull"), (two, "collective")):
        logs = [(run / "logs" / f"worker_{host}.log").read_text() for host in range(2)]
        assert all(f"by cluster.transport={way}\n" in log for log in logs)
