"""Every tracker holds each step of a run once, however often the run was started again.

A new tracker fails here until it has its line in `READERS`, which says how its records are read.
"""

import sys
from pathlib import Path

import psutil
import pytest

from launcher.config.sections import Wandb
from launcher.report.jsonl import METRICS, JsonlTracker, read_metrics
from launcher.report.trackers import tracker as queued
from launcher.report.trackers.tracker import OURS, TrackedRun, open_trackers, openers

sys.path.insert(0, str(Path(__file__).parents[1]))
from offline_run import events, read_offline

pytestmark = pytest.mark.devices


def of_tensorboard(folder):
    """The steps that TensorBoard shows: a start drops those from its first step on."""
    steps = []
    for event in events(folder):
        if event.HasField("session_log"):
            steps = [step for step in steps if step < event.step]
        steps += [event.step for value in event.summary.value if value.tag == "train/loss"]
    return steps


def of_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("launcher").experiment_id])
    return [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")]


def of_wandb(folder):
    run = read_offline(folder)
    assert {*run.ids} == {"mine"}
    return [line["step"] for line in run.history if "train/loss" in line]


READERS = {
    "wandb": of_wandb,
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    METRICS: lambda folder: [record["step"] for record in read_metrics(folder / METRICS)],
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "mlflow")) for name in (*OURS, METRICS)
]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CONFIG", "CACHE"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))


def opened(name, folder, first=1):
    """A tracker of a start at step `first`, beside the run's own record."""
    own = JsonlTracker(folder / METRICS, first)
    if name == METRICS:
        return [own]
    config = {"wandb": vars(Wandb(mode="offline"))}
    run = TrackedRun("mine", folder, config, own.records())
    return [own, *open_trackers(run, openers([name]))]


def log(trackers, *steps):
    for step in steps:
        for each in trackers:
            each.log(step, {"train/loss": 1.0 / step})


@pytest.mark.parametrize("name", NAMES)
def test_each_step_is_held_once(name, tmp_path):
    """A start that is killed, one that fails and goes back, and one that ends."""
    killed = opened(name, tmp_path)
    log(killed, 1, 2, 3)
    for service in psutil.Process().children(recursive=True):
        if "wandb" in service.name():
            service.kill()
            service.wait()
    for each in killed:
        each.finish({})
    failed = opened(name, tmp_path, first=3)
    log(failed, 3, 4, 5)
    for each in failed:
        each.rewind(4)
    log(failed, 4, 5, 6)
    for each in failed:
        each.finish({"exit_reason": "worker_1 died"})
    last = opened(name, tmp_path, first=5)
    log(last, 5, 6, 7)
    for each in last:
        each.finish({"exit_reason": "done"})
    assert READERS[name](tmp_path) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow  # MLflow takes seconds to import
def test_a_server_that_is_dead_holds_up_no_end(tmp_path, monkeypatch, said):
    monkeypatch.setattr(queued, "FINISH_SECONDS", 1.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    trackers = opened("mlflow", tmp_path)
    log(trackers, 1)
    for each in trackers:
        each.finish({})
    [line] = said
    assert line.startswith("mlflow: ")
