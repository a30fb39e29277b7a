"""Stages of the best plan end at any layer, also between layers that the search joined."""

import dataclasses

import numpy as np
import pytest
from exhaustive import seconds_of
from random_problems import random_layers

from launcher.partition.stages import group_layers
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.search import find_plans


def problems(seed):
    """Six layers on two devices, and the same as three pairs."""
    whole = random_layers(np.random.default_rng(seed), 6, hosts=1, each=2, batch=8)
    whole = dataclasses.replace(whole, memory_bytes=np.inf)
    groups = group_layers([1.0] * 6, 3)
    joined = dataclasses.replace(whole, table=whole.table.grouped(groups), groups=groups)
    return whole, joined


@pytest.mark.parametrize("seed", range(8))
def test_stages_end_between_joined_layers_where_that_is_faster(seed):
    whole, joined = problems(seed)
    two = Constraints(num_stages=2, schedule="1f1b", remat="none", num_micro_batches=8)
    coarse = find_plans(joined, two)
    fine = find_plans(dataclasses.replace(joined, unjoined=whole.table), two)
    (best, estimate) = fine.ranked[0]
    assert fine.best <= coarse.best
    assert fine.least_seconds <= fine.best
    assert seconds_of(best, whole) == pytest.approx(estimate.predicted_step_seconds)
    cut = len(best.layers[0])
    for other in {cut - 1, cut + 1} & set(range(1, 6)):  # no further move of one layer helps
        ends = tuple(range(other)), tuple(range(other, 6))
        again = seconds_of(dataclasses.replace(best, layers=ends), whole)
        assert again >= 0.999 * fine.best


def test_some_of_these_are_moved():
    two = Constraints(num_stages=2, schedule="1f1b", remat="none", num_micro_batches=8)
    odd = 0
    for seed in range(8):
        whole, joined = problems(seed)
        fine = find_plans(dataclasses.replace(joined, unjoined=whole.table), two)
        odd += len(fine.ranked[0][0].layers[0]) % 2
    assert odd
