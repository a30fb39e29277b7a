"""Several trackers behave as one; a registered one is opened for a run and never ends it."""

import subprocess
import sys

import pytest

from launcher.report import TrackedRun, Tracker, register
from launcher.report.trackers.tracker import CompositeTracker, open_trackers


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
