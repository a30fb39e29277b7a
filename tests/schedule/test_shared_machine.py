"""The timeline of devices that share a machine."""

from __future__ import annotations

import itertools

import pytest

from launcher.schedule import (
    Kind,
    Route,
    Shared,
    make_tasks,
    simulate,
    simulate_shared,
    step_seconds,
)
from launcher.schedule.simulate import Traffic


def seconds(task):
    return 0.5 if task.kind is Kind.FORWARD else 1.0


LATE = {
    (src, dst): Route((), 0.0, latency=0.01 * (1 + src + dst))
    for src in range(4)
    for dst in (src - 1, src + 1)
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_with_a_machine_for_all_it_is_the_plain_timeline(schedule):
    tasks = make_tasks(schedule, 4, 4, 6)
    plain = simulate(tasks, seconds, LATE)
    shared = simulate_shared(tasks, seconds, LATE, [1] * 4, Shared(4, [4.0] * 4))
    assert {t.task for t in shared} == {t.task for t in plain}
    assert step_seconds(shared) == pytest.approx(step_seconds(plain))


def test_with_a_machine_for_one_the_work_adds_up_whoever_waits():
    """Seconds are those with all four at work; one alone is four times as fast."""
    tasks = make_tasks("1f1b", 4, 4, 6)
    found = simulate_shared(tasks, seconds, {}, [1] * 4, Shared(4, [1.0] * 4))
    total = sum(seconds(task) for mesh in tasks for task in mesh)
    assert step_seconds(found) == pytest.approx(total / 4)


def test_each_stage_is_slowed_as_its_own_work_is():
    """Alone the first stage has the machine as all together have it, the second a half of that; two
    of four devices at work are a third of the way from one to all."""
    machine = Shared(4, [1.0, 2.0])
    assert [1 / machine.speed(0, busy) for busy in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])
    assert [1 / machine.speed(1, busy) for busy in (1, 2, 4)] == pytest.approx([0.5, 2 / 3, 1.0])
    tasks = make_tasks("1f1b", 2, 2, 1)  # one after another: both passes of each
    found = simulate_shared(tasks, seconds, {}, [2, 2], machine)
    assert step_seconds(found) == pytest.approx(1.5 * (1 / 2 + 2 / 3))


def test_short_tasks_beside_ones_of_many_minutes_come_to_their_end():
    """What rounding leaves of a short one is little only beside the time that has passed."""
    tasks = make_tasks("1f1b", 4, 4, 64)

    def lengths(task):
        return 2e-4 if task.stage == 3 else 400.0 + task.stage * 133.7

    found = simulate_shared(tasks, lengths, LATE, [1] * 4, Shared(4, [1.3] * 4))
    assert len(found) == sum(map(len, tasks))


def test_a_machine_for_two_lies_between():
    tasks = make_tasks("1f1b", 4, 4, 6)
    steps = [
        step_seconds(simulate_shared(tasks, seconds, LATE, [1] * 4, Shared(4, [parallelism] * 4)))
        for parallelism in (1.0, 2.0, 4.0)
    ]
    assert steps == sorted(steps)
    assert steps[0] < steps[1] < steps[2]


def test_a_mesh_never_does_two_things_and_keeps_its_order():
    tasks = make_tasks("1f1b", 3, 3, 5)
    found = simulate_shared(tasks, seconds, LATE, [2, 1, 1], Shared(4, [2.0] * 3))
    for mesh, own in enumerate(tasks):
        timed = [t for t in found if t.mesh == mesh]
        assert [t.task for t in timed] == list(own)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(timed))


def test_a_mesh_asks_for_its_inputs_only_when_one_of_them_has_come(monkeypatch):
    """So that the time of a simulation grows with its tasks, not with its meshes as well."""
    asked = []
    arrival = Traffic.arrival
    monkeypatch.setattr(
        Traffic, "arrival", lambda self, task: asked.append(task) or arrival(self, task)
    )
    tasks = make_tasks("1f1b", 16, 16, 32)
    ways = {(a, b): Route((f"{a}",), 0.1) for a in range(16) for b in (a - 1, a + 1) if 0 <= b < 16}
    simulate_shared(
        tasks, lambda task: 1.0 + task.stage % 3, ways, [1] * 16, Shared(16, [2.0] * 16)
    )
    assert len(asked) <= 2 * sum(map(len, tasks))
