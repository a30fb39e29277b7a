"""What the wall time of a run went into: shares of a whole, and what it cost."""

import pytest

from launcher.report.breakdown import PHASES, Goodput


def test_the_phases_add_up_to_the_wall_time_and_training_is_what_was_good():
    good = Goodput(training_seconds=60.0, compiling_seconds=20.0, starting_seconds=20.0)
    assert good.wall_seconds == 100.0
    assert good.goodput == 0.6
    assert Goodput().goodput is None
    assert sum(map(good.seconds, PHASES)) == good.wall_seconds


def test_what_was_lost_moves_and_never_more_than_there_is():
    good = Goodput(training_seconds=60.0).moved(25.0, "training", "redone")
    assert (good.training_seconds, good.redone_seconds) == (35.0, 25.0)
    good = good.moved(50.0, "training", "data").moved(-3.0, "training", "data")
    assert (good.training_seconds, good.data_seconds, good.wall_seconds) == (0.0, 35.0, 60.0)
    assert good.with_seconds("redone", -99.0).redone_seconds == 0.0


def test_devices_cost_what_they_were_held_for_where_their_price_is_known():
    good = Goodput(training_seconds=1800.0, starting_seconds=1800.0, devices=8)
    assert good.cost is None
    priced = Goodput(1800.0, devices=8, price_per_device_hour=2.5)
    assert priced.cost == pytest.approx(0.5 * 8 * 2.5)
