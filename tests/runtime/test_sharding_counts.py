"""Methods cut what they claim, and communicate as often as they claim: bytes on each device, and
every collective of the compiled programs."""

import collections
import dataclasses
import functools
import re
import sys
from pathlib import Path

import jax
import pytest

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

sys.path.insert(0, str(Path(__file__).parent))
from trainings import RECIPES, training

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
SLOW_GPT = {"zero2, 2", "shard 2x2", "3d"}
GRID = [
    pytest.param(name, method, marks=marks, id=f"{name}-{method}")
    for name in ("mlp", "gpt_short")
    for method in METHODS
    for by_hand in [pytest.mark.slow if method in SLOW_GPT else pytest.mark.stress]
    for marks in [[] if name == "mlp" else [by_hand]]
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


@pytest.mark.sampled(3, rest="stress")
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

KINDS = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"
_CALL = re.compile(rf"= [^=]*?\b({'|'.join(KINDS)})(?:-start)?\(([^)]*)\)")


def collectives(text):
    """How many arrays each kind of collective has; XLA combines several into one operation."""
    found = collections.Counter()
    for kind, operands in _CALL.findall(re.sub(r"/\*.*?\*/", "", text)):
        found[kind] += operands.count("%")
    return dict(found)


def expected(name, method, plan):
    """Of every program that communicates."""
    num_params = len(
        jax.tree.leaves(jax.eval_shape(training(name)[1], jax.random.key(0))["params"])
    )
    both, update = "stage.0.forward_backward", "update.0"
    # The global norm: a number for each parameter, of those that are cut; and the mean loss.
    norms, loss = {"all-reduce": num_params + 1}, {"all-reduce": 1}
    scattered, gathered = {"reduce-scatter": 1}, {"all-gather": num_params}  # scattered: packed
    if method == "data, 1":
        return {both: {"all-reduce": num_params}, update: loss}
    if method == "data, 2":  # the microbatches' sum, once a step
        return {"stage.0.reduce": {"all-reduce": num_params}, update: loss}
    if method == "zero2, 1":
        return {both: scattered, update: norms | gathered}
    if method == "zero2, 2":
        return {"stage.0.reduce": scattered, update: norms | gathered}
    if method in ("zero3, 1", "zero3, 2"):
        return {both: scattered | gathered, update: norms}
    return _model_parallel(name, method, plan)


def _model_parallel(name, method, plan):
    """Megatron: the MLP sums after its second and fourth layer, and the gradient into its third.
    GPT: twice a layer forward and twice backward, the lookup, the logits' largest, their sum and
    the right one's, and the gradient into the output layer."""
    cut = [
        sum(n.startswith("0.params") and "model" in str(spec) for n, spec in s.shardings.items())
        for s in plan.stages
    ]
    layers = RECIPES[name].num_layers
    if method != "3d":
        sums = 3 if name == "mlp" else 4 * layers + 5
        along_data = method == "shard 2x2"
        found = {
            "stage.0.forward_backward": {"all-reduce": sums},
            "update.0": {"all-reduce": cut[0] + along_data},  # norms of what is cut, and the loss
        }
        if along_data:
            found["stage.0.reduce"] = {"all-reduce": _num_params(plan.stages[0])}
        return found
    found = {
        "update.0": {"all-reduce": cut[0]},
        "update.1": {"all-reduce": cut[1] + 1},
    }
    for s, stage in enumerate(plan.stages):
        found[f"stage.{s}.reduce"] = {"all-reduce": _num_params(stage)}
    if name == "mlp":
        # The gradient into the second stage crosses as the first one's result does, in full.
        return found | {
            "stage.0.forward": {"all-reduce": 1},
            "stage.1.forward_backward": {"all-reduce": 2},
        }
    return found | {
        "stage.0.forward": {"all-reduce": 2 * layers // 2 + 1},
        "stage.0.backward": {"all-reduce": 2 * layers // 2},
        "stage.1.forward_backward": {"all-reduce": 4 * layers // 2 + 4},
    }


def _num_params(stage):
    return sum(name.startswith("0.params") for name in stage.shardings)


@pytest.mark.parametrize(("name", "method"), GRID)
def test_every_collective_is_accounted_for(name, method):
    _, executable = compiled(name, method)
    found = {program: collectives(text) for program, text in executable.hlo_text().items()}
    assert {program: kinds for program, kinds in found.items() if kinds} == expected(
        name, method, executable.plan
    )
