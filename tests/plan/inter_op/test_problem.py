"""The whole search finds what trying everything in its space finds, on small made-up tables."""

import dataclasses
import itertools

import numpy as np
import pytest
from random_problems import random_problem

from launcher.plan.inter_op.layer_table import FEWEST, OPEN
from launcher.plan.inter_op.problem import (
    Constraints,
    Outlines,
    alike_but_replicas,
    best_of,
    hidden_forwards,
    settings,
    ways,
)
from launcher.plan.inter_op.stage_construction import StageTables, best_stages, objective
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.submeshes import Mesh, SearchPoint, spread_divisors
from launcher.schedule import SCHEDULES


def brute_force(problem, wanted):
    cluster, batch = problem.cluster, problem.batch_size
    layers = len(problem.groups)
    counts = [wanted.num_micro_batches] if wanted.num_micro_batches else [1, 2, 3, 4, 6]
    least, remats = np.inf, tuple(of.remat(problem.groups) for of in problem.table.recomputes)
    for count, replicas in itertools.product(counts, range(1, cluster.num_devices + 1)):
        if batch % (count * replicas):
            continue
        setting = SearchPoint(count, batch, replicas, "1f1b", remats, problem.memory_bytes)
        every = [
            (size, way)
            for size in range(1, cluster.num_devices + 1)
            for way in ways(problem, setting, size, [], None)
        ]
        least = min(least, _best_stages(every, layers, cluster.num_devices))
    return least


def _best_stages(every, layers, devices):
    """Stage by stage from the front, everything that may follow."""
    least = np.inf

    def extend(first, left, seconds, rest):
        nonlocal least
        if first == layers:
            behind = range(len(seconds) - 1, -1, -1)
            at = [(of[s], other[s]) for of, other, s in zip(seconds, rest, behind, strict=True)]
            least = min(least, objective(*map(list, zip(*at, strict=True))))
            return
        for end in range(first + 1, layers + 1):
            for size, way in every:
                one = way["seconds"][:, first, end]
                if size <= left and len(seconds) < len(one) and np.isfinite(one).any():
                    other = way["rest"][:, first, end]
                    extend(end, left - size, [*seconds, one], [*rest, other])

    extend(0, devices, [], [])
    return least


def small_enough(problem):
    return len(problem.groups) * problem.cluster.num_devices <= 12


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_the_best_plan_is_that_of_brute_force(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    while not small_enough(problem):
        problem = random_problem(rng)
    wanted = Constraints(num_micro_batches=int(rng.choice([1, 2])) if rng.random() < 0.3 else None)
    least = brute_force(problem, wanted)
    found = best_of(problem, wanted)
    if not np.isfinite(least):
        assert found == []
        return
    assert found[0].seconds == pytest.approx(least)
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    for candidate in found:
        check(candidate, problem)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(30))
def test_every_found_plan_can_be_run(seed):
    problem = random_problem(np.random.default_rng(1000 + seed))
    for candidate in best_of(problem, Constraints()):
        check(candidate, problem)


@pytest.mark.parametrize(
    ("batch", "most", "tried"),
    [
        (1, 1, [1]),
        (64, 64, [1, 2, 4, 8, 16, 32, 64]),
        (4096, 64, [1, 2, 4, 8, 16, 32, 64]),
        (81, 81, [1, 3, 9, 27, 81]),
        (97, 97, [1, 97]),
        (24, 24, [1, 2, 3, 4, 6, 8, 12, 24]),
        (192, 192, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192]),
        (1000, 1000, [1, 2, 4, 5, 8, 10, 20, 25, 40, 50, 100, 125, 200, 250, 500, 1000]),
        (
            5184,
            1024,
            [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 144, 192, 288, 324, 576, 648, 864],
        ),
    ],
)
def test_numbers_of_microbatches_that_are_tried(batch, most, tried):
    """All divisors; where there are many, what lies near the powers of the root of two."""
    assert spread_divisors(batch, most) == tried


def check(candidate, problem):
    """All layers once, no device twice, within the memory."""
    assignment = candidate.assignment
    assert [layer for layers in assignment.layers for layer in layers] == list(
        range(len(problem.groups))
    )
    used = [d for submesh in assignment.submeshes for d in submesh.devices]
    assert len(used) == len(set(used)) <= problem.cluster.num_devices
    assert set(used) <= set(range(problem.cluster.num_devices))
    assert max(candidate.memory) <= problem.memory_bytes
    for submesh in assignment.submeshes:
        data, model = submesh.logical_mesh
        assert data * model == len(submesh.devices)
        assert problem.batch_size % (assignment.num_micro_batches * data) == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("seed", range(5))
def test_replicas_change_what_they_change_and_nothing_else(seed, schedule):
    problem = random_problem(np.random.default_rng(seed))
    seen = set()
    for alike in alike_but_replicas(settings(problem, Constraints(schedule=schedule), schedule)):
        assert [one.replicas for one in alike] == sorted({one.replicas for one in alike})
        outlines = Outlines(problem, alike[0])
        for setting in reversed(alike):  # in any order
            known = outlines.of(setting)
            seen.add(setting.replicas)
            device_seconds = np.full(problem.table.spans["work_seconds"][0].shape, np.inf)
            for k, choice in enumerate(known.choices):
                first, rest, work = alone(problem, setting, choice)
                np.testing.assert_array_equal(known.tables.seconds[0, :, :, k], first)
                np.testing.assert_array_equal(known.tables.rest[0, :, :, k], rest)
                device_seconds = np.minimum(device_seconds, work * known.tables.sizes[k])
            np.testing.assert_array_equal(known.device_seconds, device_seconds)
    assert problem.cluster.num_devices == 1 or len(seen) > 1


def alone(problem, setting, choice):
    """Return the seconds of a choice on its mesh alone, infinite where it cannot fit."""
    cluster, (data, model) = problem.cluster, choice.logical_mesh
    count = setting.num_micro_batches
    goes_back = SCHEDULES[setting.schedule].last_stage_alternates(count)
    mesh = Mesh.of(data, model, problem.table.index(model, choice.sequence))
    alone = dataclasses.replace(setting, replicas=None)
    every = StageCosts(problem.table, [mesh], cluster, alone, goes_back)
    costs = StageCosts(problem.table, [mesh], cluster, setting, goes_back)
    hidden = max(hidden_forwards(problem, setting))
    assert choice.remat == FEWEST
    most = setting.memory_bytes or np.inf
    lost = np.where(every.memory(choice.zero, OPEN, [1])[0, 0] <= most, 0.0, np.inf)
    first, rest, work, _ = costs.seconds(choice.zero, OPEN, [hidden])
    return first[0] + lost, rest[0, 0] + lost, work[0] + lost


def random_tables(rng):
    """Few layers, devices and sizes; costs that repeat, and stages that do not fit."""
    layers, devices = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    sizes = rng.integers(1, devices + 1, rng.integers(1, 4)).tolist()  # the same twice is allowed
    shape = (min(layers, devices), layers, layers + 1, len(sizes))
    seconds = rng.integers(1, 20, shape) / 4
    rest = rng.integers(0, 30, shape) / 4
    first, end = np.indices(shape[1:3])
    seconds[:, end <= first] = np.inf
    seconds[rng.random(shape) < rng.choice([0.0, 0.2, 0.6])] = np.inf
    rest[np.isinf(seconds)] = np.inf
    return StageTables(tuple(sizes), seconds, rest), devices


def least_objective(tables, devices):
    most, layers = tables.seconds.shape[:2]
    least = np.inf
    for count in range(1, most + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            spans = list(itertools.pairwise((0, *cuts, layers)))
            for used in itertools.product(range(len(tables.sizes)), repeat=count):
                if sum(tables.sizes[j] for j in used) > devices:
                    continue
                at = [(count - 1 - s, *spans[s], used[s]) for s in range(count)]
                value = objective([tables.seconds[i] for i in at], [tables.rest[i] for i in at])
                least = min(least, value)
    return least


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(80))
def test_the_best_stages_are_those_of_least_objective(seed):
    tables, devices = random_tables(np.random.default_rng(seed))
    least = least_objective(tables, devices)
    found = best_stages(tables, devices)
    if not np.isfinite(least):
        assert found is None
        return
    assert found.objective == pytest.approx(least)
    count = len(found.stages)
    at = [(count - 1 - s, *stage) for s, stage in enumerate(found.stages)]
    assert found.objective == pytest.approx(
        objective([tables.seconds[i] for i in at], [tables.rest[i] for i in at])
    )
    assert sum(tables.sizes[j] for _, _, j in found.stages) <= devices
    assert best_stages(tables, devices, best=least) is None  # none is better


def test_devices_stay_idle_where_that_is_faster():
    seconds = np.array([[[[np.inf, np.inf], [1.0, 2.0]]]])
    found = best_stages(StageTables((1, 4), seconds, np.zeros_like(seconds)), 4)
    assert found.stages == ((0, 1, 0),)
