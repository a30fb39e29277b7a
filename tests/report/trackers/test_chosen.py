"""`report.trackers`: TensorBoard and MLflow hold what they are given; a class of the user's too."""

import struct

import pytest

from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.report.pages.plots import plot_loss
from launcher.report.trackers.tracker import TrackedRun, open_trackers, openers

CONFIG = {"model": {"hidden_size": 98765}}


def record(name, folder, starts=((1, 2, 3),)):
    """Record a run of several starts; the second goes on at the step where it says."""
    path = plot_loss([{"step": 1, "train/loss": 2.0}], folder / "loss.png")
    (folder / "plan.json").write_text("{}")
    (folder / "profile").mkdir()
    (folder / "profile" / "worker_0.pb").write_bytes(b"trace")
    for steps in starts:
        [tracker] = open_trackers(TrackedRun("mine", folder, CONFIG), openers([name]))
        tracker.table("plan/stages", ["stage", "layers"], [[0, "0-3"], [1, None]])
        for step in steps:
            tracker.log(
                step, {"train/loss": 4.0 / step, "perf/tokens": 512 * step, "perf/mfu": None}
            )
        tracker.alert("mine: restart", "worker 1 died")
        tracker.image("plots/loss", path)
        tracker.artifact("plan", folder / "plan.json")
        tracker.artifact("profile", folder / "profile")
        tracker.finish({"final_loss": 1.0, "exit_reason": "done"})


def events(folder):
    """Yield the events of all of TensorBoard's files, the oldest first: TFRecords of protobufs."""
    from tensorboardX.proto import event_pb2

    for path in sorted((folder / "tensorboard").glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = event_pb2.Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            yield event


@pytest.mark.devices
def test_tensorboard_holds_steps_tables_pictures_alerts_and_the_summary(tmp_path, said):
    record("tensorboard", tmp_path)
    scalars, texts, pictures = {}, {}, []
    for event in events(tmp_path):
        for value in event.summary.value:
            if value.HasField("image"):
                pictures.append(value.tag)
            elif value.HasField("tensor"):
                texts[value.tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode()
            else:
                scalars[event.step, value.tag] = value.simple_value
    assert scalars == {
        **{(step, "train/loss"): pytest.approx(4.0 / step) for step in (1, 2, 3)},
        **{(step, "perf/tokens"): 512.0 * step for step in (1, 2, 3)},
    }
    assert "| stage | layers |\n| --- | --- |\n| 0 | 0-3 |\n| 1 |  |" in texts["plan/stages"]
    assert texts["alerts/1"] == "**mine: restart**\n\nworker 1 died"
    assert "98765" in texts["config"]
    assert '"final_loss": 1.0' in texts["summary"]
    assert pictures == ["plots/loss"]
    assert said == []


@pytest.mark.devices
def test_tensorboard_drops_what_a_resumed_run_does_again(tmp_path):
    record("tensorboard", tmp_path, starts=((1, 2, 3), (3, 4)))
    started = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert started[0] == 3  # TensorBoard's sign to forget that step and later ones


@pytest.mark.slow  # MLflow makes its database in ten seconds
@pytest.mark.devices
def test_mlflow_holds_one_run_with_all_of_it(tmp_path, monkeypatch, said):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record("mlflow", tmp_path, starts=((1, 2, 3), (3, 4)))
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("launcher")
    [run] = client.search_runs([experiment.experiment_id])
    number = run.info.run_id
    losses = client.get_metric_history(number, "train/loss")
    assert [(one.step, one.value) for one in losses] == [(s, 4.0 / s) for s in (1, 2, 3, 4)]
    tokens = client.get_metric_history(number, "perf/tokens")
    assert [one.value for one in tokens] == [512.0 * s for s in (1, 2, 3, 4)]
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"model.hidden_size": "98765"}
    assert run.data.tags["alert.1"] == "mine: restart: worker 1 died"
    assert run.data.tags["exit_reason"] == "done"
    assert "plan/stages.json" in run.data.tags["mlflow.loggedArtifacts"]
    files = {path.name for path in (tmp_path / "mlflow").rglob("*") if path.is_file()}
    assert files == {"stages.json", "loss.png", "plan.json", "worker_0.pb", "summary.json"}
    assert said == []


OWN = """
from launcher.report import Tracker

class Mine(Tracker):
    def __init__(self, run):
        self.path = run.folder / "mine.txt"

    def log(self, step, metrics):
        with open(self.path, "a") as file:
            file.write(f"{step} {metrics['train/loss']}\\n")
"""


def test_a_class_of_the_users_is_named(tmp_path, monkeypatch):
    (tmp_path / "tracks_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    record("tracks_mine.Mine", tmp_path)
    assert (tmp_path / "mine.txt").read_text().splitlines()[0] == "1 4.0"


def test_a_class_of_the_users_may_need_a_library(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text(f"{OWN}\n    needs = ('not_there_ml',)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"Install it with: .* 'not_there_ml'"):
        openers(["needs_more.Mine"])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tracks_none.Mine", "cannot be loaded: No module named 'tracks_none'"),
        ("launcher.report.Nobody", "has no attribute 'Nobody'"),
    ],
)
def test_a_class_that_is_not_there_is_said(name, problem):
    with pytest.raises(ConfigError) as caught:
        openers([name])
    assert problem in str(caught.value)
    assert "report.trackers" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "library"), [("tensorboard", "tensorboardX"), ("mlflow", "mlflow")]
)
def test_a_library_that_is_missing_is_named(name, library, monkeypatch):
    monkeypatch.setattr("launcher.base.libraries.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=rf"Install it with: pip install .*'{library}"):
        openers(["wandb", name])
    assert [*openers(["wandb", "my_pkg.Mine"], users=False)] == ["wandb"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("report.trackers=[tensorbord]", "Did you mean tensorboard?"),
        ("report.trackers=[my_pkg.Mine]", "add allow_modules=[my_pkg] on the command line"),
        ("report.trackers=[wandb,wandb]", "names a tracker twice"),
        ("report=none wandb.project=p", "wandb.project has no effect"),
    ],
)
def test_names_that_are_none_are_refused(words, problem):
    with pytest.raises(ConfigError) as caught:
        load(words.split())
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("words", "trackers"),
    [
        ("", ["wandb"]),
        ("report=none", []),
        ("report=mlflow", ["mlflow"]),
        ("report.trackers=[wandb,tensorboard]", ["wandb", "tensorboard"]),
        ("report.trackers=[my_pkg.sub.Mine] allow_modules=[my_pkg]", ["my_pkg.sub.Mine"]),
    ],
)
def test_a_group_chooses_them(words, trackers):
    assert load(words.split()).report.trackers == trackers
