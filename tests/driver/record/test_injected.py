"""Data that come late and saves that are slow are named by the accounting of the training.

Stages and links are in `tests/runtime/test_accounted.py`.
"""

import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base.spans import Clock
from launcher.checkpoint import Background
from launcher.checkpoint.snapshot import Snapshots
from launcher.driver.callback import Callbacks
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.record.accounting import Accounting
from launcher.driver.record.step_log import StepLog, Timelines
from launcher.plan import local_shape
from launcher.report.breakdown import read_breakdown
from launcher.train import worker as worker_module

sys.path.insert(0, str(Path(__file__).parents[1]))
from trained_here import Training

RECORDED = 3


class Accounted(Training):
    """A training with the accounting of one of its steps."""

    background = True

    def __init__(self, folder, *words):
        super().__init__(folder / "checkpoints", "train.eval_every=100", *words)
        self.home = folder

    def step_log_of(self, plan):
        home = SimpleNamespace(path=self.home, finished_steps=0)
        self.accounting = Accounting(home, self.config, plan, 0.0)
        self.accounting.started(0.0)
        timelines = Timelines(self.home, [RECORDED], take=self.accounting.record)
        timelines.begin([Clock()])
        return StepLog(
            self._log, 1, lambda seconds: {}, callbacks=Callbacks(timelines, self.accounting.wall)
        )

    def plan_of(self, step):
        shape = local_shape(self.config.cluster.gpus, 1, "cpu")
        return plan_of(self.config.parallel, step, shape)

    def run(self):
        super().run()
        steady = [line["perf/step_seconds"] for line in self.lines[RECORDED + 1 :]]
        measured = {"step_seconds_median": statistics.median(steady)} if steady else {}
        self.accounting.finish(self.home, self.step_log.finished_steps, measured)
        return read_breakdown(self.home)

    def run_and_add_up(self):
        found = self.run()
        assert found.step == RECORDED
        step, predicted = found.measured_step_seconds, found.predicted_step_seconds
        assert sum(part.measured_seconds for part in found.parts) == pytest.approx(step)
        assert found.samples_per_second == pytest.approx(self.config.train.global_batch_size / step)
        for stage in found.stages:
            assert stage.measured.step_seconds == pytest.approx(step, rel=0.05)
        residue = found.part("residue")
        more = residue.measured_seconds - residue.predicted_seconds
        assert abs(more) <= 0.1 * (step - predicted)
        return found


def pipeline(stages, micro_batches, schedule="1f1b"):
    return (
        *(f"parallel.num_stages={stages}", f"parallel.num_micro_batches={micro_batches}"),
        *(f"parallel.schedule={schedule}", f"cluster.gpus={stages}"),
    )


def late(function, seconds):
    """The function, which does nothing at first for so long."""

    def after(*given):
        time.sleep(seconds)
        return function(*given)

    return after


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


DATA = [
    pipeline(1, 1),
    pipeline(2, 4, "gpipe"),
    pipeline(4, 4, "eager_1f1b"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", DATA)
def test_data_that_come_late_are_named(words, tmp_path, monkeypatch):
    own_rows = worker_module.own_rows
    monkeypatch.setattr(worker_module, "own_rows", lambda *given: late(own_rows(*given), 0.5))
    training = Accounted(tmp_path, "train.steps=4", *words)
    found = training.run_and_add_up()
    assert found.culprit == "data"
    assert "devices wait for their batch" in found.sentence
    assert found.part("data").measured_seconds > 0.5 * found.measured_step_seconds
    # What no step hides is counted in every step, also in those that are not recorded.
    newest = training.lines[-1]
    assert 0.2 < newest["data/stall_seconds"] <= newest["data/wait_seconds"]


SAVES = [
    (Snapshots, "take", 0.4, pipeline(1, 2)),  # memory
    (Background, "save", 0.8, pipeline(2, 2, "gpipe")),  # disk
    (Background, "save", 0.8, pipeline(4, 4)),
]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "what", "seconds", "words"), SAVES)
def test_saves_that_are_slow_are_named(kind, what, seconds, words, tmp_path, monkeypatch):
    monkeypatch.setattr(kind, what, late(getattr(kind, what), seconds))
    training = Accounted(tmp_path, "train.steps=5", "train.checkpoint.every_steps=1", *words)
    found = training.run_and_add_up()
    assert found.culprit == "saves"
    assert "saves, which hold training up for" in found.sentence
    assert found.part("saves").measured_seconds > 0.5 * found.measured_step_seconds
