"""Methods cut what they claim, and communicate as often as they claim: bytes on each device, and
every collective of the compiled programs."""

import collections
import dataclasses
import functools

import jax
import pytest
from collective_counts import collectives
from trainings import training

from launcher.plan import local_shape
from launcher.plan.methods import (
    DataParallel,
    ShardParallel,
    ThreeDParallel,
    Zero2Parallel,
    Zero3Parallel,
)
from launcher.runtime import compile_step
from launcher.trace import trace_step
from launcher.trace.interface import leaf_names

METHODS = {
    "data, 1": (4, DataParallel(1)),
    "data, 2": (4, DataParallel(2)),
    "zero2, 1": (4, Zero2Parallel(1)),
    "zero3, 2": (4, Zero3Parallel(2)),
    "zero2, 2": (4, Zero2Parallel(2)),
    "zero3, 1": (4, Zero3Parallel(1)),
    "shard": (2, ShardParallel(2)),
    "shard 2x2": (4, ShardParallel(2, (2, 2))),
    "3d": (8, ThreeDParallel(2, 2, 2, num_micro_batches=2)),
}
GRID = [
    *(("mlp", method) for method in METHODS),
    pytest.param("gpt_short", "3d", marks=pytest.mark.slow),
    *(
        pytest.param("gpt_short", how, marks=pytest.mark.stress)
        for how in ("zero2, 2", "shard 2x2")
    ),
]


@functools.cache
def compiled(name, method):
    """A step for devices that are slow beside their links, so that all is cut that can be."""
    step, init, batches = training(name)
    devices, how = METHODS[method]
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), batches[0]))
    cluster = dataclasses.replace(local_shape(devices, 1, "cpu"), flops=1e6, memory_bandwidth=1e6)
    plan = how.plan(traced, cluster)
    return traced, compile_step(traced, plan, jax.devices())


# -- bytes -----------------------------------------------------------------------------------------


def planned_bytes(traced, plan):
    """Of the state on each device, by what the plan says of each leaf."""
    found = collections.Counter()
    owner = {}  # what the optimizer keeps for a parameter lives with it
    for stage in plan.stages:
        for name in stage.shardings:
            if name.startswith("0.params."):
                owner.setdefault(name.removeprefix("0.params"), stage)
    leaves = zip(leaf_names(traced), traced.invars, traced.batch, strict=True)
    for name, var, is_batch in leaves:
        if is_batch or not var.aval.shape:
            continue
        (stage,) = (stage for path, stage in owner.items() if name.endswith(path))
        sizes = dict(zip(("data", "model"), stage.logical_mesh, strict=True))
        size = var.aval.size * var.aval.dtype.itemsize
        for axis in stage.shardings.get(name, ()):
            for one in (axis,) if isinstance(axis, str) else axis or ():
                size //= sizes[one]
        found.update(dict.fromkeys(stage.devices, size))
    return dict(found)


def live_bytes(state):
    """Of all but single numbers, on each device."""
    found = collections.Counter()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards if leaf.ndim else ():
            found[shard.device.id] += shard.data.nbytes
    return dict(found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "method"), GRID)
def test_each_device_holds_what_the_plan_says(name, method):
    traced, executable = compiled(name, method)
    _, init, batches = training(name)
    state = executable.create(init, jax.random.key(0))
    planned = planned_bytes(traced, executable.plan)
    assert live_bytes(state) == planned
    state, _ = executable(state, batches[0])
    assert live_bytes(state) == planned
    for stage in executable.plan.stages:
        assert stage.memory_bytes > max(planned[d] for d in stage.devices)


@pytest.mark.parametrize(
    ("method", "params", "moments"),
    [("data, 1", 1, 1), ("zero2, 1", 1, 4), ("zero2, 2", 1, 4), ("zero3, 1", 4, 4)],
)
def test_zero_divides_the_state_by_the_devices(method, params, moments):
    _, executable = compiled("mlp", method)
    state = executable.create(training("mlp")[1], jax.random.key(0))
    whole = sum(x.nbytes for x in jax.tree.leaves(state["params"]))
    held = live_bytes(state)
    assert set(held.values()) == {whole // params + 2 * whole // moments}


# -- collectives -----------------------------------------------------------------------------------

BOTH, UPDATE, REDUCE = "stage.0.forward_backward", "update.0", "stage.0.reduce"
SUMS, SCATTERED = "all-reduce", "reduce-scatter"  # what is scattered is packed
ZERO_UPDATE = {SUMS: 9, "all-gather": 8}  # norms of the 8 parameters, the loss; the new ones
# How many arrays each kind of collective has, of the programs that have any.
EXPECTED = {
    "mlp": {
        "data, 1": {BOTH: {SUMS: 8}, UPDATE: {SUMS: 1}},
        "data, 2": {REDUCE: {SUMS: 8}, UPDATE: {SUMS: 1}},  # the microbatches' sum, once a step
        "zero2, 1": {BOTH: {SCATTERED: 1}, UPDATE: ZERO_UPDATE},
        "zero2, 2": {REDUCE: {SCATTERED: 1}, UPDATE: ZERO_UPDATE},
        "zero3, 1": {BOTH: {SCATTERED: 1, "all-gather": 8}, UPDATE: {SUMS: 9}},
        "zero3, 2": {BOTH: {SCATTERED: 1, "all-gather": 8}, UPDATE: {SUMS: 9}},
        # Megatron: after the second and fourth layer, and the gradient into the third; then norms
        # of what is cut.
        "shard": {BOTH: {SUMS: 3}, UPDATE: {SUMS: 6}},
        "shard 2x2": {BOTH: {SUMS: 3}, REDUCE: {SUMS: 8}, UPDATE: {SUMS: 7}},
        # The gradient into the second stage crosses as the first one's result does, in full.
        "3d": {
            "stage.0.forward": {SUMS: 1},
            "stage.1.forward_backward": {SUMS: 2},
            **{f"stage.{stage}.reduce": {SUMS: 4} for stage in (0, 1)},
            UPDATE: {SUMS: 3},
            "update.1": {SUMS: 4},
        },
    },
    # Twice a layer forward and twice backward, the lookup, the logits' largest, their sum and the
    # right one's, and the gradient into the output layer.
    "gpt_short": {
        "zero2, 2": {REDUCE: {SCATTERED: 1}, UPDATE: {SUMS: 30, "all-gather": 29}},
        "shard 2x2": {BOTH: {SUMS: 13}, REDUCE: {SUMS: 29}, UPDATE: {SUMS: 15}},
        "3d": {
            "stage.0.forward": {SUMS: 3},
            "stage.0.backward": {SUMS: 2},
            "stage.1.forward_backward": {SUMS: 8},
            "stage.0.reduce": {SUMS: 14},
            "stage.1.reduce": {SUMS: 15},
            UPDATE: {SUMS: 7},
            "update.1": {SUMS: 8},
        },
    },
}


@pytest.mark.parametrize(("name", "method"), GRID)
def test_every_collective_is_accounted_for(name, method):
    _, executable = compiled(name, method)
    found = {
        program: collections.Counter(kind for kind, _ in collectives(text))
        for program, text in executable.hlo_text().items()
    }
    assert {program: kinds for program, kinds in found.items() if kinds} == EXPECTED[name][method]
