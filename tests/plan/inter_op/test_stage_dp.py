"""The stage search finds what trying everything finds."""

import itertools

import numpy as np
import pytest

from launcher.plan.inter_op.stage_construction import StageTables, best_stages, objective


def random_candidates(rng):
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


def brute_force(tables, devices):
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


@pytest.mark.parametrize("seed", range(80))
def test_the_best_stages_are_those_of_brute_force(seed):
    tables, devices = random_candidates(np.random.default_rng(seed))
    least = brute_force(tables, devices)
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
