"""Several trackers behave as one."""

import subprocess
import sys

import pytest

from launcher.report.tracker import CompositeTracker


class Recording:
    def __init__(self, calls, name, fails=False):
        self.calls, self.name, self.fails = calls, name, fails

    def log(self, metrics):
        self.calls.append((self.name, "log", metrics["step"]))

    def message(self, text):
        self.calls.append((self.name, "message", text))

    def finish(self, summary):
        self.calls.append((self.name, "finish", summary["steps"]))
        if self.fails:
            raise OSError("disk full")


def test_everything_reaches_every_tracker_in_order():
    calls = []
    tracker = CompositeTracker((Recording(calls, "a"), Recording(calls, "b")))
    tracker.log({"step": 1})
    tracker.message("hello")
    tracker.finish({"steps": 1})
    done = [("log", 1), ("message", "hello"), ("finish", 1)]
    assert calls == [(name, *what) for what in done for name in "ab"]


def test_a_failing_finish_stops_no_other():
    calls = []
    tracker = CompositeTracker((Recording(calls, "a", fails=True), Recording(calls, "b")))
    with pytest.raises(OSError, match="disk full"):
        tracker.finish({"steps": 0})
    assert [name for name, *_ in calls] == ["a", "b"]


@pytest.mark.devices
def test_reports_load_neither_jax_nor_ray_nor_what_is_slow():
    code = """
import importlib, pkgutil, sys
import launcher.report
for module in pkgutil.iter_modules(launcher.report.__path__):
    importlib.import_module("launcher.report." + module.name)
from pathlib import Path
from launcher.config.schema import Wandb
from launcher.report.wandb_tracker import open_wandb
disabled = Wandb(mode="disabled")
assert open_wandb(disabled, run_id="r", config={}, run_dir=Path("."), warn=print) is None
print(sorted({"jax", "ray", "wandb", "matplotlib"} & set(sys.modules)))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("[]\n", "")
