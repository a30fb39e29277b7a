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


def of_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("launcher", "mine")
    return [one["step"] for one in logs if "train/loss" in one]


READERS = {
    "wandb": of_wandb,
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    METRICS: lambda folder: [record["step"] for record in read_metrics(folder / METRICS)],
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("mlflow", "trackio")))
    for name in (*OURS, METRICS)
]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CONFIG", "CACHE"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))


def record(name, folder, first, *steps, rewinds=0, kill=False, reason="done"):
    """Record a start at the step `first`, beside the run's own record; `rewinds` is done again."""
    own = JsonlTracker(folder / METRICS, first)
    run = TrackedRun("mine", folder, {"wandb": vars(Wandb(mode="offline"))}, own.records())
    trackers = [own, *(() if name == METRICS else open_trackers(run, openers([name])))]
    for step in steps:
        for each in trackers:
            if step == rewinds:
                each.rewind(step)
            each.log(step, {"train/loss": 1.0 / step})
    for service in psutil.Process().children(recursive=True) if kill else ():
        if "wandb" in service.name():
            service.kill()
            service.wait()
    for each in trackers:
        each.finish({"exit_reason": reason})


@pytest.mark.parametrize("name", NAMES)
def test_each_step_is_held_once(name, tmp_path, monkeypatch):
    """A start that is killed, one that fails and goes back, and one that ends."""
    if name == "trackio":
        storage = pytest.importorskip("trackio.sqlite_storage")
        monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path)
    record(name, tmp_path, 1, *(1, 2, 3), kill=True)
    record(name, tmp_path, 3, *(3, 4, 5, 4, 5, 6), rewinds=4, reason="worker_1 died")
    record(name, tmp_path, 5, *(5, 6, 7))
    assert READERS[name](tmp_path) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow  # MLflow takes seconds to import
def test_a_server_that_is_dead_holds_up_no_end(tmp_path, monkeypatch, said):
    monkeypatch.setattr(queued, "FINISH_SECONDS", 1.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    record("mlflow", tmp_path, 1, 1)
    [line] = said
    assert line.startswith("mlflow: ")
