"""The whole search finds what trying everything in its space finds, on small made-up tables."""

import itertools

import numpy as np
import pytest
from random_problems import random_problem

from launcher.plan.inter_op.problem import Constraints, best_of, ways
from launcher.plan.inter_op.stage_construction import objective
from launcher.plan.inter_op.submeshes import SearchPoint, spread_divisors


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
