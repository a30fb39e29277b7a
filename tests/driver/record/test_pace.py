"""A step counts as hung by the pace of the newest steps."""

import pytest

from launcher.base.object_store import PATIENCE
from launcher.driver.record.step_log import Pace
from launcher.recipes.datasets.tokens import Tokens

UNUSUAL = {1, 2, 3, 40, 41}


def paced(seconds, first=4, least=0.0):
    pace = Pace(UNUSUAL, least)
    for step, each in enumerate(seconds, first):
        pace.on_step(step, {"perf/step_seconds": each})
    return pace


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ([2.0, 3.0], None),  # too few
        ([0.1, 0.2, 0.1], 10.0),  # at least
        ([2.0, 7.0, 3.0], 70.0),
        ([9.0, *[2.0] * 102], 20.0),  # the newest hundred
        ([90.0] * 3, 900.0),  # a slow run is not judged by a constant
    ],
)
def test_a_step_may_take_ten_times_the_slowest_of_the_newest_hundred(seconds, limit):
    assert paced(seconds).limit(500) == limit


def test_a_batch_of_an_object_store_may_be_waited_for():
    stored = Tokens(path="s3://bucket/a", objects=["s3://bucket/a/x.bin 9 v 0"])
    assert [
        paced([0.1] * 3, least=it.patience).limit(500) for it in (stored, Tokens(path="a"))
    ] == [
        1.5 * PATIENCE,
        10.0,
    ]


def test_unusual_steps_neither_count_nor_are_judged():
    pace = paced([50.0, 80.0, 60.0, *[2.0] * 36, 90.0, 80.0, 2.0], first=1)
    assert pace.limit(43) == 20.0
    assert [step for step in range(1, 50) if pace.limit(step) is None] == sorted(UNUSUAL)


def test_a_step_at_which_the_run_failed_gets_more_time_and_later_ones_do_not():
    pace = paced([2.0] * 20)  # to step 23
    pace.on_restart(10, "no answer")
    assert [pace.limit(step) for step in (11, 24, 26, 27, 100)] == [200.0, 200.0, 200.0, 20.0, 20.0]
