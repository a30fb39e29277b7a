"""Schedules: every dependency before its use, bounds on what is in flight, known lengths."""

import itertools

import numpy as np
import pytest

from launcher.schedule import (
    SCHEDULES,
    Kind,
    Route,
    ScheduleError,
    Task,
    backward_follows,
    bubble_fraction,
    dependencies,
    make_tasks,
    max_in_flight,
    simulate,
    step_seconds,
    training_schedules,
)

MESHES, MICRO_BATCHES = range(1, 7), range(1, 10)
SIZES = list(itertools.product(MESHES, MICRO_BATCHES))


def every_schedule():
    """`(name, meshes, stages a mesh, microbatches)` of every size."""
    for name, (meshes, micro_batches) in itertools.product(SCHEDULES, SIZES):
        for each in (1, 2, 3) if SCHEDULES[name].interleaves else (1,):
            yield name, meshes, each, micro_batches


def seconds(task):
    """Forward, input and weight parts take as long as one another."""
    return 2.0 if task.kind is Kind.BACKWARD else 1.0


def late(stages):
    """Half a second from each stage to its neighbours, over links of their own."""
    pairs = itertools.pairwise(range(stages))
    return {way: Route((), 0.0, latency=0.5) for a, b in pairs for way in ((a, b), (b, a))}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_task_runs_once_on_its_mesh_after_what_it_needs(name):
    for _, meshes, each, micro_batches in (x for x in every_schedule() if x[0] == name):
        stages = meshes * each
        schedule = make_tasks(name, stages, meshes, micro_batches)
        kinds = SCHEDULES[name].kinds
        want = {Task(s, m, k) for s in range(stages) for m in range(micro_batches) for k in kinds}
        assert len(want) == sum(map(len, schedule))
        assert {task for tasks in schedule for task in tasks} == want
        assert all(t.stage % meshes == i for i, tasks in enumerate(schedule) for t in tasks)
        ends = {timed.task: timed.end for timed in simulate(schedule, seconds)}
        for task, end in ends.items():
            needed = (ends[other] for other in dependencies(task, stages))
            assert max(needed, default=0.0) <= end - seconds(task)


def test_the_bound_on_what_is_in_flight_is_met_exactly():
    for name, meshes, each, micro_batches in every_schedule():
        schedule = make_tasks(name, meshes * each, meshes, micro_batches)
        for mesh, tasks in enumerate(schedule):
            bound = SCHEDULES[name].in_flight_bound(mesh, meshes, micro_batches, each)
            assert max_in_flight(tasks) == bound, (name, meshes, each, micro_batches)


def test_the_bounds_are_the_papers():
    assert [SCHEDULES["gpipe"].in_flight_bound(s, 4, 8) for s in range(4)] == [8] * 4
    assert [SCHEDULES["1f1b"].in_flight_bound(s, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [SCHEDULES["eager_1f1b"].in_flight_bound(s, 4, 8) for s in range(4)] == [7, 5, 3, 1]
    assert [SCHEDULES["zero_bubble"].in_flight_bound(s, 4, 8) for s in range(4)] == [4] * 4
    # Of half the size: 1 + (p - 1) / (p v) times what 1f1b holds at most.
    assert [SCHEDULES["interleaved_1f1b"].in_flight_bound(s, 4, 8, 2) for s in range(4)] == [
        11,
        9,
        7,
        5,
    ]
    assert SCHEDULES["forward"].in_flight_bound(0, 4, 8) == 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_length_and_bubble_are_the_papers(name):
    for meshes, micro_batches in SIZES:
        timeline = simulate(SCHEDULES[name].tasks(meshes, micro_batches), seconds)
        rounds = micro_batches + meshes - 1
        assert step_seconds(timeline) == pytest.approx(3.0 * rounds)
        assert bubble_fraction(timeline, meshes) == pytest.approx((meshes - 1) / rounds)


def test_running_further_ahead_hides_transfers():
    """Each round trip costs 1F1B two transfers; the eager one only those that fill and drain."""
    length = {
        name: step_seconds(simulate(make_tasks(name, 2, 2, 8), seconds, late(2)))
        for name in ("1f1b", "eager_1f1b")
    }
    assert length["eager_1f1b"] == 3.0 * (8 + 1) + 2 * 0.5
    assert length["1f1b"] > length["eager_1f1b"] + 1.0


@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_stages_a_mesh(each):
    """For any number of microbatches that is at least that of the meshes."""
    for meshes, micro_batches in SIZES:
        timeline = simulate(
            SCHEDULES["interleaved_1f1b"].tasks(meshes, micro_batches, each), seconds
        )
        work = 3.0 * micro_batches * each
        idle = step_seconds(timeline) - work
        if micro_batches >= meshes:
            assert idle == pytest.approx(3.0 * (meshes - 1))  # in time of a short stage
        else:
            assert 3.0 * (meshes - 1) <= idle <= 3.0 * (meshes - 1) * each


def test_the_weight_parts_fill_the_bubble():
    """(p - 1) (F + B - W) of waiting, a third of 1F1B's at equal times, and never more than it."""
    for meshes, micro_batches in SIZES:
        schedule = SCHEDULES["zero_bubble"].tasks(meshes, micro_batches)
        length = step_seconds(simulate(schedule, seconds))
        usual = step_seconds(simulate(SCHEDULES["1f1b"].tasks(meshes, micro_batches), seconds))
        if micro_batches >= meshes:
            assert length == pytest.approx(3.0 * micro_batches + meshes - 1)
        assert length < usual or meshes == 1


def test_transfers_lengthen_the_step():
    timeline = simulate(SCHEDULES["gpipe"].tasks(3, 1), lambda t: 1.0, late(3))
    assert step_seconds(timeline) == pytest.approx(6 + 4 * 0.5)


def test_where_both_passes_can_be_one_program():
    def last(name, each=1):
        return backward_follows(make_tasks(name, 4 * each, 4, 8)[3], 4 * each - 1)

    assert last("1f1b")
    assert last("zero_bubble")
    assert last("interleaved_1f1b", 2)
    assert not last("gpipe")
    assert not backward_follows(SCHEDULES["1f1b"].tasks(4, 8)[2], 2)


def test_an_impossible_order_is_refused():
    backward_first = tuple(tuple(reversed(tasks)) for tasks in SCHEDULES["gpipe"].tasks(2, 2))
    with pytest.raises(ScheduleError):
        simulate(backward_first, seconds)
    with pytest.raises(ScheduleError, match="1f1b cannot run 4 stages on 2 meshes"):
        make_tasks("1f1b", 4, 2, 8)
    with pytest.raises(ScheduleError, match="cannot run 3 stages on 2 meshes"):
        make_tasks("interleaved_1f1b", 3, 2, 8)


@pytest.mark.parametrize("name", training_schedules(interleaves=False))
def test_the_first_round_trip_hides_the_forward_passes_that_its_tasks_say(name):
    schedule = SCHEDULES[name]
    for behind, count in itertools.product(range(5), MICRO_BATCHES):
        counted = schedule.hidden_forwards(behind, count)
        for earlier in range(3):
            tasks = schedule.tasks(earlier + behind + 1, count)[earlier]
            first = next(t for t in tasks if t.kind is not Kind.FORWARD)
            at = tasks.index(first), tasks.index(Task(earlier, first.microbatch, Kind.FORWARD))
            assert at[0] - at[1] - 1 == counted


@pytest.mark.parametrize("name", training_schedules(interleaves=False))
def test_round_trips_follow_one_another(name):
    """From the last microbatch's forward pass to the backward pass before it, and so on."""
    schedule = SCHEDULES[name]
    for earlier, behind, count in itertools.product(range(2), range(5), MICRO_BATCHES):
        tasks = schedule.tasks(earlier + behind + 1, count)[earlier]
        backs = {
            task.microbatch: at
            for at, task in reversed(list(enumerate(tasks)))
            if task.kind is not Kind.FORWARD
        }
        microbatch, trips = count - 1, 0
        while True:
            at = tasks.index(Task(earlier, microbatch, Kind.FORWARD))
            done = [m for m, back in backs.items() if back < at]
            if not done:
                break
            microbatch, trips = max(done), trips + 1
        assert schedule.round_trips(behind, count) <= trips, (earlier, behind, count)
        if name in ("1f1b", "eager_1f1b"):
            assert schedule.round_trips(behind, count) == trips


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 16), (8, 64), (16, 96)])
@pytest.mark.parametrize("last", [1.0, 1.5])
def test_a_pipeline_is_as_long_as_its_slowest_stage_and_a_fill_by_the_others(
    stages, micro_batches, last
):
    """The closed form of published models of pipelines, for equal stages and uneven ones."""
    forward = np.random.default_rng(0).uniform(0.8, 1.2, stages)
    forward[-1] *= last  # with the loss
    each = {Kind.FORWARD: forward, Kind.BACKWARD: 2 * forward}
    schedule = make_tasks("1f1b", stages, stages, micro_batches)
    timed = simulate(schedule, lambda task: each[task.kind][task.stage])
    closed = 3 * (micro_batches * forward.max() + (stages - 1) * forward.mean())
    assert 0.94 * closed < step_seconds(timed) < 1.02 * closed
