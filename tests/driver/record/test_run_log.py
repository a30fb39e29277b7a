"""What a run hands to its trackers: the same to each, in order, whatever one of them does."""

import csv
import inspect
import json
from dataclasses import replace

import pytest

from launcher.config.compose import load
from launcher.driver import Callback
from launcher.driver.folder.folder import RunFolder
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.record.run_log import RunLog
from launcher.plan import local_shape
from launcher.report import TRACKERS, Tracker, register
from launcher.report.console import make_console
from launcher.report.trackers.tracker import TrackedRun, open_trackers
from launcher.train.program import build_program
from launcher.train.step_result import StepResult

WORDS = ["model=mlp", "dataset=synthetic", "parallel=data", "cluster=emulated", "run.id=mine"]


@pytest.fixture(scope="module")
def plan():
    config = load(WORDS)
    return plan_of(config.parallel, build_program(config).train, local_shape(2, 1, "cpu"))


@pytest.fixture
def home(tmp_path):
    path = tmp_path / "outputs" / "mine"
    path.mkdir(parents=True)
    return RunFolder(path)


def result(step, **more):
    metrics = {"train/loss": 4.0 / step, "train/grad_norm": 1.0, "perf/step_seconds": 0.5, **more}
    return StepResult(step, metrics, completed_at=1000.0 + step)


def run_through(home, plan, *words, reason="done"):
    """A run of five steps, of which a failure has the third and fourth done again."""
    config = load([*WORDS, "train.steps=5", "train.log_every=1", *words])
    log = RunLog(home, config, plan, 0.25, make_console(), None)
    for finished, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        if finished:
            log.close(finished, "worker 0 died")
            log.resume(finished)
        log.open(finished)
        log.show(finished)
        for step in steps:
            log.step_log.record(result(step))
    log.sum_up(reason, 1, home.path)
    return json.loads((home.path / "summary.json").read_text())


class Noting(Tracker):
    """Notes in `events` what it is given."""

    def __init__(self, events):
        self.events = events

    def table(self, name, columns, rows):
        self.events.append(("table", name))

    def rewind(self, first_step):
        self.events.append(("rewind", first_step))

    def log(self, step, metrics):
        self.events.append(("log", step))

    def alert(self, title, text):
        self.events.append(("alert", title))

    def image(self, name, path):
        self.events.append(("image", name))

    def artifact(self, name, path):
        self.events.append(("artifact", name))

    def finish(self, summary):
        self.events.append(("finish", summary["exit_reason"]))


def test_a_tracker_gets_all_in_order_and_the_end_is_shown_before_it_finishes_and_after(
    home, plan, monkeypatch
):
    """Trackers may take long to finish, and whatever they change is shown over."""
    events = []

    class Shown(Callback):
        def tell(self, **fields):
            pass

        def restart(self, step):
            events.append(("status", "restart"))

        def on_end(self, step, reason):
            events.append(("status", reason))

    monkeypatch.setitem(TRACKERS, "noting", lambda run: Noting(events))
    home = replace(home, status=Shown())
    run_through(home, plan, "wandb.mode=disabled")
    ends = [event for event in events if event[0] in ("status", "finish")]
    shown = ("status", "done")
    assert ends == [("status", "restart"), shown, ("finish", "done"), shown]
    assert [event for event in events if event[0] != "status"] == [
        ("table", "plan/stages"),
        ("table", "plan/shardings"),
        *(("log", step) for step in (1, 2, 3, 4)),
        ("alert", "mine: restart"),
        ("rewind", 3),
        *(("log", step) for step in (3, 4, 5)),
        ("table", "plan/beside_measured"),
        ("image", "plots/timeline"),
        ("image", "plots/memory"),
        ("image", "plots/loss"),
        ("artifact", "accounting"),
        ("artifact", "report"),
        ("finish", "done"),
    ]


class CsvTracker(Tracker):
    """A user's own: tables and metrics as CSV files below the run's folder."""

    def __init__(self, run):
        self.folder, self.steps = run.folder / "csv", {}
        self.folder.mkdir()

    def table(self, name, columns, rows):
        with open(self.folder / f"{name.replace('/', '.')}.csv", "w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])

    def rewind(self, first_step):
        self.steps = {step: line for step, line in self.steps.items() if step < first_step}

    def log(self, step, metrics):
        self.steps[step] = {"step": step, **metrics}

    def image(self, name, path):
        (self.folder / path.name).write_bytes(path.read_bytes())

    def finish(self, summary):
        names = dict.fromkeys(key for line in self.steps.values() for key in line)
        rows = [[line.get(name) for name in names] for line in self.steps.values()]
        self.table("metrics", [*names], rows)
        self.table("summary", [*summary], [[*summary.values()]])


def read_csv(path):
    with open(path, newline="") as file:
        return [*csv.DictReader(file)]


def test_pictures_and_an_accounting_that_cannot_be_written_end_no_record(home, plan, said):
    """As on a disk that is full by then: each is said in a line, and the summary is there."""
    (home.path / "plots" / "loss.png").mkdir(parents=True)
    (home.path / "accounting.json").mkdir()
    assert run_through(home, plan, "wandb.mode=disabled")["exit_reason"] == "done"
    assert [line for line in said if "cannot be written" in line] == [
        f"the accounting cannot be written: [Errno 21] Is a directory: "
        f"'{home.path / 'accounting.json'}'",
        "plots/loss.png cannot be written: Is a directory",
    ]
    assert sorted(path.name for path in (home.path / "plots").glob("*.png")) == [
        "loss.png",
        "memory.png",
        "timeline.png",
    ]


def test_a_tracker_of_ones_own_is_a_class_and_a_line(home, plan, monkeypatch):
    assert len(inspect.getsource(CsvTracker).splitlines()) <= 40
    monkeypatch.setattr("launcher.report.trackers.tracker.TRACKERS", {**TRACKERS})
    register("csv")(CsvTracker)
    summary = run_through(home, plan, "wandb.mode=disabled")
    folder = home.path / "csv"
    assert sorted(path.name for path in folder.iterdir()) == [
        "loss.png",
        "memory.png",
        "metrics.csv",
        "plan.beside_measured.csv",
        "plan.shardings.csv",
        "plan.stages.csv",
        "summary.csv",
        "timeline.png",
    ]
    lines = read_csv(folder / "metrics.csv")
    assert [(line["step"], float(line["train/loss"])) for line in lines] == [
        (str(step), 4.0 / step) for step in (1, 2, 3, 4, 5)
    ]
    assert read_csv(folder / "plan.stages.csv")[0]["layers"] == "0-3"
    assert read_csv(folder / "summary.csv")[0]["final_loss"] == str(summary["final_loss"])
    assert (folder / "loss.png").read_bytes() == (home.path / "plots" / "loss.png").read_bytes()


def test_fields_that_no_summary_has_are_left_out(home, plan, monkeypatch):
    class Linked(Tracker):
        def summary_fields(self):
            return {"wandb_url": "https://mine", "other": 1, "exit_reason": "mine"}

    monkeypatch.setitem(TRACKERS, "linked", lambda run: Linked())
    summary = run_through(home, plan, "wandb.mode=disabled")
    assert summary["wandb_url"] == "https://mine"
    assert "other" not in summary
    assert summary["exit_reason"] != "mine"


def test_fields_that_are_none_of_the_kind_end_no_run(home, plan, monkeypatch):
    class Empty(Tracker):
        def summary_fields(self):
            return None

    monkeypatch.setitem(TRACKERS, "empty", lambda run: Empty())
    assert run_through(home, plan, "wandb.mode=disabled")["wandb_url"] is None


def test_the_mode_of_wandb_may_come_from_the_environment(home, plan, monkeypatch, said):
    monkeypatch.setenv("RECORDING", "disabled")
    run_through(home, plan, "wandb.mode=${oc.env:RECORDING}")
    assert said == []


MODULE = """
import launcher.report
from launcher.recipes.models.mlp.model import build

@launcher.report.register("mine")
class Mine(launcher.report.Tracker):
    def __init__(self, run):
        self.id = run.id
"""


def test_the_module_of_a_users_model_may_register_one(tmp_path, monkeypatch):
    (tmp_path / "net_with_tracker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("launcher.report.trackers.tracker.TRACKERS", {})
    fields = "{input_size: 4, widths: [4], output_size: 2, output_relu: false}"
    words = ["model=custom", "model.module=net_with_tracker", f"model.options={fields}"]
    build_program(load([*words, "dataset=synthetic", "allow_modules=[net_with_tracker]"]))
    run = TrackedRun("r", tmp_path, {"wandb": {"mode": "disabled"}})
    assert [type(tracker).__name__ for tracker in open_trackers(run, {})] == ["QueuedTracker"]
