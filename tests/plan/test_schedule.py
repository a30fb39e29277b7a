"""Schedules: every dependency before its use, bounds on what is in flight, known lengths."""

import itertools

import pytest

from launcher.plan.errors import ScheduleError
from launcher.plan.schedule import (
    SCHEDULES,
    Kind,
    Task,
    clock_table,
    dependencies,
    gpipe,
    max_in_flight,
    one_f_one_b,
)
from launcher.plan.simulate import bubble_fraction, simulate, step_seconds

SIZES = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 8, 9)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_task_runs_once_after_what_it_needs(name, stages, micro_batches):
    schedule = SCHEDULES[name](stages, micro_batches)
    kinds = [Kind.FORWARD] if name == "forward" else list(Kind)
    want = {Task(s, m, k) for s in range(stages) for m in range(micro_batches) for k in kinds}
    done = set()
    for row in clock_table(schedule):
        tasks = [task for task in row if task]
        for task in tasks:
            assert done.issuperset(dependencies(task, stages))
        assert not done.intersection(tasks)
        done.update(tasks)
    assert done == want


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_in_flight_bounds(stages, micro_batches):
    for s, tasks in enumerate(one_f_one_b(stages, micro_batches)):
        assert max_in_flight(tasks) == min(stages - s, micro_batches)
    for tasks in gpipe(stages, micro_batches):
        assert max_in_flight(tasks) == micro_batches


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_length_and_bubble_are_the_papers(schedule, stages, micro_batches):
    timeline = simulate(
        schedule(stages, micro_batches), lambda t: 1.0 if t.kind is Kind.FORWARD else 2.0
    )
    rounds = micro_batches + stages - 1
    assert step_seconds(timeline) == pytest.approx(3.0 * rounds)
    assert bubble_fraction(timeline, stages) == pytest.approx((stages - 1) / rounds)


def test_transfers_lengthen_the_step():
    timeline = simulate(gpipe(3, 1), lambda t: 1.0, lambda src, dst: 0.5)
    assert step_seconds(timeline) == pytest.approx(6 + 4 * 0.5)


def test_an_impossible_order_is_refused():
    backward_first = tuple(tuple(reversed(tasks)) for tasks in gpipe(2, 2))
    for walk in (clock_table, lambda s: simulate(s, lambda t: 1.0)):
        with pytest.raises(ScheduleError):
            walk(backward_first)
