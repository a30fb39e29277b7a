"""Grouping layers and cutting the loss."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.partition.stages import cut_stages, group_layers, layer_flops
from launcher.trace import trace_step


def brute_force(costs, groups):
    cuts = itertools.combinations(range(1, len(costs)), groups - 1)
    splits = [[costs[a:b] for a, b in itertools.pairwise((0, *c, len(costs)))] for c in cuts]
    return min(max(map(sum, split)) for split in splits)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_grouping_is_optimal(seed, groups):
    costs = np.random.default_rng(seed).integers(1, 20, 6).astype(float).tolist()
    found = group_layers(costs, groups)
    assert [layer for group in found for layer in group] == list(range(6))
    assert all(found)
    assert max(sum(costs[i] for i in g) for g in found) == brute_force(costs, groups)


def test_skip_connections_and_shared_weights():
    def loss(params, x):
        first = jnp.tanh(x @ params["tied"])
        launcher.mark_pipeline_boundary()
        second = jnp.tanh(first @ params["own"])
        launcher.mark_pipeline_boundary()
        return ((second + first) @ params["tied"]).sum()

    def step(params, x):
        return launcher.grad(loss)(params, x)

    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    args = {"own": w, "tied": w}, jax.ShapeDtypeStruct((8, 4), jnp.float32)
    found = trace_step(step, args).loss(2)
    assert len(set(layer_flops(found))) == 2
    stages = cut_stages(found, [(0,), (1,), (2,)])
    own, tied, x = range(3)
    assert [s.operands for s in stages] == [(x, tied), (own,), (tied,)]
    assert stages[0].consumers == ((1, 2),)
    assert len(stages[2].activations_in) == 2
    assert stages[2].results == (0,)
    assert [len(s.active_in) for s in stages] == [0, 1, 2]
