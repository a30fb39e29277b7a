"""The interval of saves that loses the least, and the share of the time that is left."""

import math

import numpy as np
import pytest

from launcher.driver.record.faults import Faults, expected_faults

HOUR = 3600.0
CASES = [
    (5712 * HOUR, 0.05),
    (5712 * HOUR / 64, 2.0),
    (6 * HOUR, 30.0),
    (300.0, 20.0),
    (60.0, 30.0),
]


@pytest.mark.parametrize(("between", "save"), CASES)
def test_no_other_interval_loses_less(between, save):
    faults = Faults(between, save)
    best = max(map(faults.goodput, np.geomspace(1.0, 20 * between, 20_000)))
    assert faults.goodput(faults.save_interval) == pytest.approx(best, rel=2e-3)
    assert 0 < best < 1


def test_the_goodput_is_that_of_a_simulated_run():
    """Faults at random moments: what was trained since the newest save is lost."""
    random = np.random.default_rng(0)
    faults = Faults(between_seconds=900.0, save_seconds=5.0, restart_seconds=20.0)
    interval, wall, trained = faults.save_interval, 0.0, 0.0
    left = random.exponential(900.0)
    while trained < 3e6:
        if left >= interval + 5.0:
            left -= interval + 5.0
            wall, trained = wall + interval + 5.0, trained + interval
            continue
        wall, left = wall + left, random.exponential(900.0)
        while left < 20.0:  # the restart fails, too
            wall, left = wall + left, random.exponential(900.0)
        wall, left = wall + 20.0, left - 20.0
    assert faults.goodput(interval) == pytest.approx(trained / wall, rel=0.01)


def test_without_faults_only_saves_cost():
    assert Faults().save_interval == math.inf
    assert Faults(save_seconds=1.0).goodput(99.0) == 0.99


def test_more_hosts_fail_more_often_and_copy_faster():
    one, many = (expected_faults(None, hosts, 10**9) for hosts in (1, 400))
    assert one.between_seconds == 238 * 24 * HOUR == 400 * many.between_seconds
    assert one.save_seconds == 12.0 == 400 * many.save_seconds
    assert expected_faults(2.5, 400, 10**9).between_seconds == 2.5 * HOUR


def test_faults_more_frequent_than_steps_leave_nothing():
    assert Faults(1e-3, 1.0).goodput(1e6) == pytest.approx(0.0)
