"""Each moment of a run is counted once, whatever fails, and lost steps are not training."""

import pytest

from launcher.driver.record.accounting import WallClock, with_lost
from launcher.report.breakdown import Goodput


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def passed():
    time = Time()
    wall = WallClock(Goodput(starting_seconds=5.0), 990.0, time)

    def after(seconds, what, *args, **more):
        time.now += seconds
        getattr(wall, what)(*args, **more)
        return wall

    return after


def test_the_phases_are_the_wall_time(passed):
    passed(0, "lap", "starting")
    passed(3, "step", 1, {})
    passed(4, "step", 2, {"data/stall_seconds": 1.5})
    passed(2, "save")
    passed(6, "lap", "evaluating")
    wall = passed(0, "step", 3, {"perf/step_seconds": 2.5}, evaluated=True)
    assert wall.good == Goodput(
        training_seconds=3 + 2.5 + 2.5,
        starting_seconds=5 + 10,
        data_seconds=1.5,
        saving_seconds=2,
        evaluating_seconds=3.5,
    )
    assert wall.good.wall_seconds == 5 + 10 + 3 + 4 + 2 + 6
    assert (wall.held_up, wall.steps) == (2, 3)


def test_what_a_failure_loses_is_redone(passed):
    passed(0, "lap", "starting")
    for step in range(1, 6):
        passed(1, "step", step, {})
    passed(7, "lap", "redone")
    wall = passed(0, "on_restart", 3, "")
    assert (wall.good.training_seconds, wall.good.redone_seconds) == (3, 2 + 7)
    passed(1, "step", 4, {})
    wall = passed(0, "on_restart", 3, "")
    assert (wall.good.training_seconds, wall.good.redone_seconds) == (3, 10)


def test_a_start_that_was_killed_is_known_by_its_metrics():
    records = [{"step": step, "perf/step_seconds": 2.0} for step in (2, 4, 6, 8)]
    before = Goodput(training_seconds=16.0)  # told after four steps
    found = with_lost(before, counted=4, finished=6, records=records)
    assert found.training_seconds == 16 + 4
    assert found.redone_seconds == 4
    assert with_lost(before, 8, 8, records) == before
