"""Steps of a real training are watched, and what slows it is logged, shown and summed up."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base.output import lines_to
from launcher.base.spans import Clock
from launcher.driver.callback import Callbacks
from launcher.driver.record import slowness as module
from launcher.driver.record.slow import EVERY, Monitor
from launcher.driver.record.slowness import Slowness
from launcher.driver.record.step_log import StepLog, warm_up
from launcher.train.step_result import StepResult

sys.path.insert(0, str(Path(__file__).parents[1]))
from trained_here import Training

TWO_STAGES = SimpleNamespace(
    mesh_of=(0, 1), stages=[SimpleNamespace(hosts=(0,)), SimpleNamespace(hosts=(1,))]
)
ONE_STAGE = SimpleNamespace(mesh_of=(0,), stages=TWO_STAGES.stages[:1])


class Watched(Training):
    """A training whose steps are watched."""

    def step_log_of(self, plan):
        self.slowness = Slowness(plan, warm_up(0))
        self.slowness.begin([Clock()])
        return StepLog(self._log, 1, lambda seconds: {}, callbacks=Callbacks(self.slowness))


@pytest.fixture
def taken(monkeypatch):
    """The samples that were taken."""
    samples = []
    monkeypatch.setattr(module, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SHARE", 0)
    monkeypatch.setattr(Monitor, "add", lambda self, sample: samples.append(sample))
    return samples


def test_watched_steps_tell_the_time_of_each_stage_and_change_no_loss(tmp_path, taken):
    words = ("train.steps=32", "train.eval_every=16")
    watched = Watched(tmp_path / "watched", *words).run()
    assert watched.losses() == Training(tmp_path / "plain", *words).run().losses()
    assert [sample.step for sample in taken][:2] == [2 * EVERY, 3 * EVERY]
    for sample in taken:
        seconds = {f"{kind} {name}".strip(): each for (kind, name), each in sample.seconds.items()}
        assert {"stage 0", "stage 1"} <= {*seconds}
        assert {f"{kind} worker 0" for kind in ("dispatch", "data", "garbage")} <= {*seconds}
        assert seconds["stage 0"] + seconds["stage 1"] > 0
        assert all(each >= 0 for each in seconds.values())
        assert sample.step_seconds > 0


def test_steps_of_a_single_mesh_and_unusual_ones_are_not_watched():
    one, two = Slowness(ONE_STAGE, {5}), Slowness(TWO_STAGES, {5})
    one.begin([Clock()])
    assert not two.is_watched(10)  # no attempt has begun
    two.begin([Clock(), Clock()])
    assert [step for step in range(1, 21) if two.is_watched(step)] == [10, 15, 20]
    assert not any(map(one.is_watched, range(1, 21)))


def test_what_slows_the_run_is_logged_once_shown_and_summed_up():
    said, fields = [], {}
    slowness = Slowness(ONE_STAGE, (), lambda **given: fields.update(given))
    slowness.begin([Clock()])

    def steps(first, last, late):
        for step in range(first, last + 1):
            metrics = {"perf/step_seconds": 1.0 + late}
            spent = ({"data": late, "garbage": 0.001},)
            slowness.add(StepResult(step, metrics, 0.0, spent=spent), [])

    with lines_to(said.append):
        steps(1, 100, 0.0)
        assert not slowness.worst
        assert not fields
        steps(101, 120, 0.25)
        assert fields == {"slow": said[0]}
        steps(121, 200, 0.25)
        ((cost, _),) = slowness._costs.values()
        steps(131, 200, 0.25)  # again, after a restart
        assert slowness._costs["the data of worker 0"][0] > cost
        steps(201, 240, 0.0)
    assert said == [
        "the data of worker 0 has slowed the run since step 105 by 250 ms a step; "
        "without that: 25.0% faster",
        "the data of worker 0 no longer slows the run, by step 225",
    ]
    assert fields == {"slow": None}
    assert slowness.worst == said[0]
