"""Several trackers behave as one; a registered one is opened for a run and never ends it."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.report import TrackedRun, Tracker, register
from launcher.report.pages.plots import plot_loss
from launcher.report.trackers import tracker as queued
from launcher.report.trackers.tracker import (
    CompositeTracker,
    QueuedTracker,
    open_trackers,
    openers,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from offline_run import events


class Recording(Tracker):
    def __init__(self, calls, name, fails=""):
        self.calls, self.name, self.fails = calls, name, fails

    def _add(self, *call):
        self.calls.append((self.name, *call))
        if call[0] == self.fails:
            raise OSError("disk full\nand more")

    def table(self, name, columns, rows):
        self._add("table", name, columns, rows)

    def rewind(self, first_step):
        self._add("rewind", first_step)

    def log(self, step, metrics):
        self._add("log", step, metrics)

    def image(self, name, path):
        self._add("image", name, path)

    def artifact(self, name, path):
        self._add("artifact", name, path)

    def alert(self, title, text):
        self._add("alert", title, text)

    def summary_fields(self):
        self._add("summary_fields")
        return {f"{self.name}_url": "u"}

    def finish(self, summary):
        self._add("finish", summary)


CALLS = [
    ("summary_fields",),
    ("table", "t", ["a"], [[1]]),
    ("rewind", 3),
    ("log", 3, {"train/loss": 1.0}),
    ("image", "i", "i.png"),
    ("artifact", "plan", "plan.json"),
    ("alert", "a restart", "worker 0 died"),
    ("finish", {"steps": 3}),
]


def call_all(tracker):
    return [getattr(tracker, name)(*arguments) for name, *arguments in CALLS]


def test_everything_reaches_every_tracker_in_order():
    calls = []
    tracker = CompositeTracker((Recording(calls, "a"), Recording(calls, "b")))
    assert call_all(tracker)[0] == {"a_url": "u", "b_url": "u"}
    assert calls == [(name, *call) for call in CALLS for name in "ab"]


def test_a_call_may_name_its_arguments():
    calls = []
    CompositeTracker((Recording(calls, "a"),)).log(step=3, metrics={})
    assert calls == [("a", "log", 3, {})]


def test_a_tracker_need_not_hold_anything():
    assert call_all(Tracker()) == [{}, *[None] * 7]


def test_a_failing_finish_stops_no_other():
    calls = []
    tracker = CompositeTracker((Recording(calls, "a", fails="finish"), Recording(calls, "b")))
    with pytest.raises(OSError, match="disk full"):
        tracker.finish({"steps": 0})
    assert [name for name, *_ in calls] == ["a", "b"]


@pytest.fixture
def registry(monkeypatch):
    """The registry with nothing in it."""
    monkeypatch.setattr("launcher.report.trackers.tracker.TRACKERS", {})


@pytest.fixture
def run(tmp_path):
    return TrackedRun("mine", tmp_path, {})


def test_registered_trackers_are_opened_in_order_and_may_decline(registry, run, caplog):
    calls = []
    register("a")(lambda run: Recording(calls, run.id))
    register("b")(lambda run: None)

    @register("c")
    class Mine(Recording):
        def __init__(self, run):
            super().__init__(calls, run.folder.name)

    for tracker in open_trackers(run, {}):
        call_all(tracker)
    names = ("mine", run.folder.name)
    assert (
        calls
        == [
            *((name, *CALLS[0]) for name in names),  # as they are opened
            *((name, *call) for name in names for call in CALLS[1:]),
        ]
    )
    assert caplog.messages == []


def test_one_that_cannot_be_opened_is_reported_and_the_others_are_opened(registry, run, caplog):
    def cannot(run):
        raise ValueError

    register("a")(cannot)
    register("b")(lambda run: Tracker())
    assert len(open_trackers(run, {})) == 1
    assert caplog.messages == ["a: ValueError; the run is not recorded there"]


@pytest.mark.parametrize("fails", range(len(CALLS)))
def test_one_that_fails_is_reported_once_and_left_out(fails, registry, run, caplog):
    calls = []
    register("a")(lambda run: Recording(calls, "a", fails=CALLS[fails][0]))
    (tracker,) = open_trackers(run, {})
    for _ in range(2):
        call_all(tracker)
    reached = [call[1] for call in calls if call[1] != "summary_fields"]
    assert reached == [name for name, *_ in CALLS[: fails + 1] if name != "summary_fields"]
    assert caplog.messages == ["a: disk full; the run is no longer recorded there"]


@pytest.mark.devices
def test_reports_load_neither_jax_nor_ray_nor_what_is_slow():
    code = """
import importlib, pkgutil, sys
import launcher.report
for module in pkgutil.iter_modules(launcher.report.__path__):
    if module.name not in ("breakdown", "measured", "verdict"):  # which read plans
        importlib.import_module("launcher.report." + module.name)
from pathlib import Path
from launcher.report import TrackedRun, open_wandb
disabled = TrackedRun("r", Path("."), {"wandb": {"mode": "disabled"}})
assert open_wandb(disabled) is None
print(sorted({"jax", "ray", "wandb", "matplotlib"} & set(sys.modules)))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("[]\n", "")


class Gate(Tracker):
    """Records nothing before it is let go on."""

    def __init__(self):
        self.steps, self.ended, self.go_on = [], [], threading.Event()
        self.entered = threading.Event()

    def log(self, step, metrics):
        self.entered.set()
        self.go_on.wait(60)
        self.steps.append(step)

    def finish(self, summary):
        self.ended.append(summary)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.go_on.set()


def test_no_call_waits_and_all_arrive_in_order(gate):
    tracker = QueuedTracker("slow", gate)
    for step in range(1, 1001):
        tracker.log(step, {})
    assert gate.steps == []  # and yet all calls have returned
    gate.go_on.set()
    tracker.finish({"steps": 1000})
    assert gate.steps == [*range(1, 1001)]
    assert gate.ended == [{"steps": 1000}]
    tracker.finish({})
    assert len(gate.ended) == 1


def test_a_full_queue_leaves_the_newest_out_and_says_so(gate, monkeypatch, caplog):
    monkeypatch.setattr(queued, "LONGEST", 10)
    tracker = QueuedTracker("slow", gate)
    tracker.log(1, {})
    assert gate.entered.wait(60)  # it is out of the queue
    for step in range(2, 101):
        tracker.log(step, {})
    gate.go_on.set()
    tracker.finish({})
    assert gate.steps == [*range(1, 12)]
    assert caplog.messages == ["slow: 89 records are left out, as it is too slow"]


def test_a_run_does_not_wait_for_one_that_is_stuck(gate, monkeypatch, caplog):
    monkeypatch.setattr(queued, "FINISH_SECONDS", 0.01)
    tracker = QueuedTracker("stuck", gate)
    tracker.log(1, {})
    tracker.finish({})
    assert gate.ended == []
    [line] = caplog.messages
    assert line.startswith("stuck: it takes over 0.01 s to finish")


def test_a_library_that_exits_ends_its_recording_alone(caplog):
    class Exits(Tracker):
        def log(self, step, metrics):
            sys.exit(255)

    tracker = QueuedTracker("gone", Exits())
    for step in (1, 2):
        tracker.log(step, {})
    tracker.finish({})
    assert caplog.messages == ["gone: 255; the run is no longer recorded there"]


CONFIG = {"model": {"hidden_size": 98765}}


def record(name, folder):
    """Record a run of three steps."""
    path = plot_loss([{"step": 1, "train/loss": 2.0}], folder / "loss.png")
    (folder / "plan.json").write_text("{}")
    (folder / "profile").mkdir()
    (folder / "profile" / "worker_0.pb").write_bytes(b"trace")
    [tracker] = open_trackers(TrackedRun("mine", folder, CONFIG), openers([name]))
    tracker.table("plan/stages", ["stage", "layers"], [[0, "0-3"], [1, None]])
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 4.0 / step, "perf/tokens": 512 * step, "perf/mfu": None})
    tracker.alert("mine: restart", "worker 1 died")
    tracker.image("plots/loss", path)
    tracker.artifact("plan", folder / "plan.json")
    tracker.artifact("profile", folder / "profile")
    tracker.finish({"final_loss": 1.0, "exit_reason": "done"})


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


@pytest.mark.slow  # MLflow makes its database in ten seconds
@pytest.mark.devices
def test_mlflow_holds_one_run_with_all_of_it(tmp_path, monkeypatch, said):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("launcher")
    [run] = client.search_runs([experiment.experiment_id])
    number = run.info.run_id
    losses = client.get_metric_history(number, "train/loss")
    assert [(one.step, one.value) for one in losses] == [(s, 4.0 / s) for s in (1, 2, 3)]
    tokens = client.get_metric_history(number, "perf/tokens")
    assert [one.value for one in tokens] == [512.0 * s for s in (1, 2, 3)]
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"model.hidden_size": "98765"}
    assert run.data.tags["alert.1"] == "mine: restart: worker 1 died"
    assert run.data.tags["exit_reason"] == "done"
    assert "plan/stages.json" in run.data.tags["mlflow.loggedArtifacts"]
    files = {path.name for path in (tmp_path / "mlflow").rglob("*") if path.is_file()}
    assert files == {"stages.json", "loss.png", "plan.json", "worker_0.pb", "summary.json"}
    assert said == []


@pytest.mark.slow  # trackio takes seconds to import
@pytest.mark.devices
def test_trackio_holds_one_run_with_all_of_it(tmp_path, monkeypatch, said):
    storage = pytest.importorskip("trackio.sqlite_storage")
    from trackio import Api

    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "home")
    record("trackio", tmp_path)
    [run] = Api().runs("launcher")
    assert run.name == "mine"
    assert run.config["model.hidden_size"] == 98765
    logs = storage.SQLiteStorage.get_logs("launcher", "mine")
    steps = [one for one in logs if "train/loss" in one]
    assert [(one["step"], one["train/loss"]) for one in steps] == [
        (step, 4.0 / step) for step in (1, 2, 3)
    ]
    assert [one["perf/tokens"] for one in steps] == [512 * step for step in (1, 2, 3)]
    assert not any("perf/mfu" in one for one in logs)
    others = {key for one in logs for key in one}
    assert {"plan/stages", "plots/loss", "summary/final_loss", "summary/exit_reason"} <= others
    assert [one["title"] for one in run.alerts()] == ["mine: restart"]
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
    ("name", "library"),
    [("tensorboard", "tensorboardX"), ("mlflow", "mlflow"), ("trackio", "trackio")],
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
        ("report.trackers=[my_pkg.Mine]", "add 'allow_modules=[my_pkg]' on the command line"),
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
