"""All that a run hands to wandb is found in its offline recording, which holds no secret."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.base.spans import Clock, Span
from launcher.config.compose import load
from launcher.driver.folder.folder import RunFolder, write_plan
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.record.run_log import RunLog
from launcher.driver.record.step_log import DivergedError
from launcher.plan import local_shape
from launcher.report.console import make_console
from launcher.report.pages.timeline import ProcessSpans, Timeline
from launcher.train.program import build_program
from launcher.train.step_result import StepResult

sys.path.insert(0, str(Path(__file__).parents[2] / "report"))

pytestmark = pytest.mark.devices
SECRETS = {"WANDB_API_KEY": "0123456789" * 4, "HF_TOKEN": "hf_sesame", "MY_PASSWORD": "opensesame"}
WORDS = [
    *("recipe=smoke", "parallel=manual", "parallel.num_stages=2", "cluster=emulated"),
    *("cluster.gpus=2", "run.id=mine", "train.steps=4", "train.log_every=1", "wandb.mode=offline"),
    *("wandb.group=sweep-7", "train.non_finite=rollback"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a run that was restarted and resumed, and what wandb has of it."""
    from offline_run import read_offline

    folder = tmp_path_factory.mktemp("outputs") / "mine"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        patch.setattr(
            sys, "argv", ["launcher", *WORDS, f"cluster.slurm.env.T={SECRETS['HF_TOKEN']}"]
        )
        config = load(WORDS)
        plan = plan_of(config.parallel, build_program(config).train, local_shape(2, 1, "cpu"))
        home = RunFolder(folder)
        write_plan(home, config, plan)
        # The second is another start; the first one failed.
        for reason, attempts in (
            ("worker 1 died", [(0, (1, 2)), (1, (2, 3))]),
            ("done", [(3, (4,))]),
        ):
            log = RunLog(home, config, plan, 0.25, make_console(), None)
            for finished, steps in attempts:
                if finished == 1:
                    log.close(finished, "worker 1 died")
                log.open(finished)
                log.show(finished)
                for step in steps:
                    loss = float("nan") if (finished, step) == (0, 2) else 4.0 / step
                    metrics = {
                        "train/loss": loss,
                        "train/grad_norm": 1.0,
                        "train/learning_rate": 0.1,
                        "perf/step_seconds": 0.5,
                        "perf/peak_memory_bytes": 2**20,
                        "data/wait_seconds": 0.01,
                        "pipeline/bubble_fraction": 0.2,
                        "pipeline/stage_0_seconds": 0.2,
                    }
                    if step == 3:
                        metrics["eval/loss"] = 1.25
                    with suppress(DivergedError):
                        log.step_log.record(StepResult(step, metrics, completed_at=1000.0))
            about = {"stage": 0, "mesh": 0, "microbatch": 0, "program": 0}
            spans = [Span("device 0", "stage.0.forward", 0, 10**8, "forward", about)]
            parts = [ProcessSpans("worker 0", spans, Clock())]
            Timeline().with_step(3, parts).save(folder / "timeline.json")
            (folder / "profile").mkdir(exist_ok=True)
            (folder / "profile" / "worker_0.xplane.pb").write_bytes(b"trace")
            log.sum_up(reason, 1, folder)
    return folder, config, plan, read_offline(folder)


def test_every_scalar_by_its_key_against_steps_and_tokens(recorded):
    _, config, _, run = recorded
    lines = [line for line in run.history if "train/loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # each once
    steps = {line["step"]: line for line in lines}
    tokens = config.train.global_batch_size * config.model.sequence_length
    assert [line["perf/tokens"] for _, line in sorted(steps.items())] == [
        tokens * step for step in (1, 2, 3, 4)
    ]
    samples = config.train.global_batch_size / 0.5
    assert (
        steps[3].items()
        >= {
            "train/loss": 4.0 / 3,
            "train/grad_norm": 1.0,
            "train/learning_rate": 0.1,
            "perf/step_seconds": 0.5,
            "perf/samples_per_second": samples,
            "perf/tokens_per_second": tokens / 0.5,
            "perf/peak_memory_bytes": 2**20,
            "data/wait_seconds": 0.01,
            "pipeline/bubble_fraction": 0.2,
            "pipeline/stage_0_seconds": 0.2,
            "eval/loss": 1.25,
        }.items()
    )
    axes = {metric.name or metric.glob_name: metric.step_metric for metric in run.metrics}
    assert axes == {"step": "", "perf/tokens": "", "*": "step"}


def test_tables_and_pictures(recorded):
    folder, _, plan, run = recorded
    kept = {}
    for path in sorted(folder.glob("wandb/offline-run-*/files/media/table/**/*.json")):
        kept[path.name.split("_")[0]] = json.loads(path.read_text())
    assert kept.keys() >= {"stages", "beside", "accounting", "measured"}
    rows = [
        dict(zip(kept["stages"]["columns"], row, strict=True)) for row in kept["stages"]["data"]
    ]
    assert [row["memory_bytes"] for row in rows] == [stage.memory_bytes for stage in plan.stages]
    names = {name.removesuffix("._type") for name in run.summary if name.endswith("._type")}
    assert names >= {"plan/stages", "plan/beside_measured"}
    assert names >= {"plots/timeline", "plots/loss", "plots/memory"}
    pictures = folder.glob("wandb/offline-run-*/files/media/images/plots/*.png")
    assert len([*pictures]) == 6  # three a start


def test_files_of_the_run_are_artifacts_and_lie_where_they_were(recorded):
    _, _, _, run = recorded
    own = {kind: files for name, (kind, files) in run.artifacts.items() if kind != "run_table"}
    assert own == {
        "plan": ["plan.json"],
        "config": ["config.yaml"],
        "timeline": ["timeline.json"],
        "accounting": ["accounting.json"],
        "report": ["report.html"],
        "profile": ["worker_0.xplane.pb"],
    }
    assert {name for name, (kind, _) in run.artifacts.items() if kind in own} == {
        f"mine-{kind}" for kind in own
    }


def test_restarts_and_losses_that_are_not_finite_are_alerts(recorded):
    _, _, _, run = recorded
    assert run.alerts == [
        ("mine: train/loss is not finite at step 2", "train.non_finite=rollback"),
        ("mine: restart", "worker 1 died"),
    ]


def test_a_resumed_run_is_the_same_run_with_its_settings_and_summary(recorded):
    folder, config, _, run = recorded
    assert run.ids == ["mine", "mine"]
    assert run.config["train"]["steps"] == config.train.steps
    summary = json.loads((folder / "summary.json").read_text())
    assert run.summary["final_loss"] == summary["final_loss"] == 1.0
    assert summary["wandb_sync_command"] == f"wandb sync {folder}/wandb/offline-run-*"
    assert run.exits == [1, 0]


def test_no_secret_is_in_any_file(recorded):
    folder, *_ = recorded
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        data = path.read_bytes()
        assert [name for name, value in SECRETS.items() if value.encode() in data] == [], path
