"""Layers of models that mark none."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.partition.stages import layer_flops
from launcher.plan import Plan, PlanError, local_shape, make_forward_plan
from launcher.plan.methods import AutoLayerOption, PipeshardParallel, Replay
from launcher.runtime import compile_step
from launcher.trace import TraceError, trace_step
from launcher.trace.auto_layers import _crossing, _own, apply_layer_ends, cluster_layers
from launcher.trace.ir.cost import matmul_flops, program_flops
from launcher.trace.slicing.slices import ANY_LAYER
from launcher.trace.step import TracedStep

BATCH = 8


def mlp(widths: list[int], depth_of_scan: int = 0) -> tuple[Any, Any]:
    """A train step of dense layers without marks, and its arguments."""
    keys = jax.random.split(jax.random.key(0), len(widths))
    shapes = list(itertools.pairwise(widths))
    params = [jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=False)]
    batch = np.random.default_rng(0).normal(size=(BATCH, widths[0])).astype(np.float32)

    def forward(params: Any, batch: Any) -> Any:
        x = batch
        for weight in params:
            x = jnp.tanh(x @ weight)
        if depth_of_scan:
            x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=depth_of_scan)
        return jnp.mean(x**2)

    def step(params: Any, batch: Any) -> Any:
        value, grads = launcher.value_and_grad(forward)(params, batch)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    return step, (params, batch)


def traced(widths: list[int], **more: int) -> TracedStep:
    step, arguments = mlp(widths, **more)
    return trace_step(step, arguments)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_few_bytes_cross_and_no_layer_is_too_large(num_layers: int) -> None:
    """Equal to trying every cut into layers that each hold a product."""
    step, eps = traced([32, 64, 4, 64, 32, 8, 48]), 0.8
    loss = step.loss(1)
    equations, crossing = _own(loss), _crossing(_own(loss), loss)
    bound = (1 + eps) * program_flops(equations) / num_layers
    feasible = []
    for cuts in itertools.combinations(range(1, len(equations)), num_layers - 1):
        layers = [equations[a:b] for a, b in itertools.pairwise([0, *cuts, len(equations)])]
        if all(program_flops(own) <= bound and matmul_flops(own) for own in layers):
            feasible.append(crossing[list(cuts)].sum())
    found = apply_layer_ends(loss, cluster_layers(loss, num_layers, eps))
    assert found.num_layers == num_layers
    starts = [found.layers.index(layer) for layer in range(1, num_layers)]
    assert max(layer_flops(found)) <= bound
    assert crossing[starts].sum() == min(feasible)


def test_layers_are_consecutive_and_none_is_empty() -> None:
    loss = traced([8] * 9).loss(1)
    for count in range(1, 9):
        found = apply_layer_ends(loss, cluster_layers(loss, count, 0.6))
        layers = [layer for layer in found.layers if layer != ANY_LAYER]
        assert layers == sorted(layers)
        assert set(layers) == set(range(count))


def test_equal_blocks_make_equal_layers() -> None:
    loss = traced([16] * 13).loss(1)
    costs = layer_flops(apply_layer_ends(loss, cluster_layers(loss, 4, 0.6)))
    assert max(costs) <= 1.05 * min(costs)


def test_a_loop_stays_whole() -> None:
    """However much of the work it is."""
    loss = traced([4, 4, 4], depth_of_scan=1000).loss(1)
    found = apply_layer_ends(loss, cluster_layers(loss, 3, 0.1))
    assert found.num_layers == 3
    assert sum(eqn.primitive.name == "scan" for eqn in found.equations) == 1


def test_smaller_slices_are_cut_in_the_same_places() -> None:
    step = AutoLayerOption(4).layered(traced([16] * 9))
    names = [
        [(layer, e.primitive.name) for e, layer in zip(loss.equations, loss.layers, strict=True)]
        for loss in (step.loss(1), step.loss(4))
    ]
    assert names[0] == names[1]


def test_another_model_is_refused() -> None:
    ends = cluster_layers(traced([16] * 9).loss(1), 4, 0.6)
    with pytest.raises(TraceError, match="it is another model"):
        apply_layer_ends(traced([16] * 3).loss(1), ends)


def test_more_layers_than_equations() -> None:
    with pytest.raises(PlanError, match=r"parallel.num_layers=99 does not fit a forward pass of"):
        AutoLayerOption(99).layered(traced([4, 4]))


@pytest.mark.devices
def test_a_pipeline_of_automatic_layers_is_the_serial_step_and_can_be_replayed() -> None:
    step, arguments = mlp([16] * 7)
    params, value = jax.jit(step)(*arguments)
    method = PipeshardParallel(num_micro_batches=2, layer_option=AutoLayerOption(4))
    devices = jax.devices()[:2]
    run = launcher.parallelize(step, method=method, devices=devices, donate_argnums=())
    plan = run.plan(*arguments)
    assert sum(len(stage.layers) for stage in plan.stages) == 4
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    again.validate(trace_step(step, arguments))
    replayed = launcher.parallelize(step, method=Replay(again), devices=devices, donate_argnums=())
    for found in (run(*arguments), replayed(*arguments)):
        np.testing.assert_allclose(found[1], value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found[0], params)


@pytest.mark.parametrize("ends", ["ab", [[1]], [[1, -1]], [[2, 0], [1, 0]], [[1, 0.5]]])
def test_ends_that_are_none_are_refused(ends: Any) -> None:
    step = traced([8] * 4)
    plan = PipeshardParallel(1, "auto").plan(step, local_shape(1, 1, "cpu"))
    with pytest.raises(PlanError, match=r"layer_ends.* not (ascending pairs|a )"):
        Plan.from_dict(plan.to_dict() | {"layer_ends": ends}).validate(step)


@pytest.mark.devices
def test_evaluation_follows_automatic_layers_without_the_dropout() -> None:
    """The parameters of a stage are the same in both."""
    weights = [jnp.ones((8, 8)) for _ in range(6)]
    x, key = np.ones((BATCH, 8), np.float32), jax.random.key(0)

    def forward(params: Any, batch: Any, key: Any) -> Any:
        for weight in params:
            batch = jnp.tanh(batch @ weight)
            if key is not None:
                batch = batch * jax.random.bernoulli(key, 0.5, batch.shape)
        return jnp.mean(batch)

    def train(params: Any, batch: Any, key: Any) -> Any:
        value, grads = launcher.value_and_grad(forward)(params, batch, key)
        return [p - g for p, g in zip(params, grads, strict=True)], value

    def evaluate(params: Any, batch: Any) -> Any:
        return launcher.microbatched(lambda p, b: forward(p, b, None))(params, batch)

    shape = local_shape(3, 1, "cpu")
    plan = PipeshardParallel(2, AutoLayerOption(3)).plan(
        trace_step(train, (weights, x, key)), shape
    )
    step = trace_step(evaluate, (weights, x), donate_argnums=())
    follow = make_forward_plan(step, plan)
    assert [s.num_parameters for s in plan.stages] == [128, 128, 128]
    executable = compile_step(step, follow, jax.devices()[:3])
    homes = [next(iter(s.device_set)).id for s in executable.in_shardings[0]]
    assert homes == sorted(homes)
    assert [homes.count(d) for d in range(3)] == [2, 2, 2]
