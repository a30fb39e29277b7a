"""Blocks as one scan compute what blocks in a row do, and are planned alike."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from filled import filled_params

from launcher.config.families import find_models
from launcher.partition.stages import cut_stages
from launcher.partition.task_programs import trace_stage
from launcher.plan import local_shape
from launcher.plan.methods import PipeshardParallel, UniformStageOption
from launcher.recipes import build_dataset, build_model
from launcher.recipes.datasets.synthetic import Synthetic
from launcher.recipes.models.bert import BERTOptions
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.moe import MoEOptions
from launcher.recipes.models.vit import ViTOptions
from launcher.schedule import Kind
from launcher.testing import assert_allclose
from launcher.trace import described_cudnn, matmul_flops, nbytes, trace_step
from launcher.train.step import init_state, make_train_step

LAYERS = 2
SHAPE = {"size": None, "num_layers": LAYERS, "num_heads": 2, "hidden_size": 16}
OPTIONS = {
    "bert": BERTOptions(**SHAPE, vocab_size=32, sequence_length=8).filled(),
    "vit": ViTOptions(**SHAPE, image_size=8, channels=2, num_classes=4, patch_size=4),
    "gpt": GPTOptions(**SHAPE, vocab_size=32, sequence_length=8).filled(),
    "llama": LlamaOptions(**SHAPE, vocab_size=32, sequence_length=8).filled(),
}


def in_a_row_and_scanned(name):
    scanned = dataclasses.replace(OPTIONS[name], scan_layers=True)
    return build_model(OPTIONS[name], "fp32"), build_model(scanned, "fp32")


def batch_for(name):
    return build_dataset(Synthetic(num_samples=8), OPTIONS[name], 8, seed=0).train(0)


def taken_apart(params):
    """The same tree, with a block's parameters under a name of their own."""
    rest = dict(params)
    stacked = rest.pop("layers")
    return rest | {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(LAYERS)}


@pytest.mark.devices(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_scanned_layers_compute_what_layers_in_a_row_do(name):
    apart, scanned = in_a_row_and_scanned(name)
    params, batch = filled_params(scanned), batch_for(name)
    assert jax.tree.structure(taken_apart(params)) == jax.tree.structure(filled_params(apart))

    def with_gradient(model, params):
        return jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, None)[0]))(params)

    expected, slopes = with_gradient(apart, taken_apart(params))
    found, stacked = with_gradient(scanned, params)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    assert_allclose(taken_apart(stacked), slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.devices(1)
@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_scanned_layers_start_apart(name):
    _, scanned = in_a_row_and_scanned(name)
    layers = jax.jit(scanned.init)(jax.random.key(0))["layers"]
    kernels = max(jax.tree.leaves(layers), key=lambda leaf: leaf.ndim)
    assert len({np.asarray(kernel).tobytes() for kernel in kernels}) == LAYERS


@pytest.mark.parametrize("name", ["bert", pytest.param("vit", marks=pytest.mark.stress)])
def test_the_plan_is_that_of_layers_in_a_row(name):
    """Stages, memory, parameters, seconds: only the names of the blocks' parameters differ."""
    optimizer, batch, plans = optax.adam(1e-3), batch_for(name), []
    for model in in_a_row_and_scanned(name):
        step = make_train_step(model, optimizer, lambda count: 1e-3)
        start = functools.partial(init_state, model, optimizer)
        state = jax.eval_shape(start, jax.random.key_data(jax.random.key(0)))
        method = PipeshardParallel(2, stage_option=UniformStageOption(2))
        plans.append(method.plan(trace_step(step, (state, batch)), local_shape(4, 1, "cpu")))
    apart, scanned = plans
    assert [s.layers for s in scanned.stages] == [s.layers for s in apart.stages]
    memory = [[s.memory_bytes for s in plan.stages] for plan in plans]
    assert memory[1] == pytest.approx(memory[0], rel=0.02)
    assert scanned.num_parameters == apart.num_parameters
    assert scanned.predicted_step_seconds == pytest.approx(apart.predicted_step_seconds, rel=0.02)


def test_every_family_that_scans_is_here():
    have_it = {n for n, f in find_models().items() if "scan_layers" in f.__dataclass_fields__}
    assert have_it == {*OPTIONS, "moe"}


def kept_and_computed(name, scanned, **changes):
    """Bytes that a layer's forward pass keeps, and the operations of its products in both passes.

    Of a layer: what four of them have more than two.
    """
    found = []
    for layers in (2, 4):
        options = dataclasses.replace(WIDE[name], num_layers=layers, scan_layers=scanned, **changes)
        model, optimizer = build_model(options, "bf16"), optax.sgd(1e-3)
        step = make_train_step(model, optimizer, lambda count: 1e-3)
        start = functools.partial(init_state, model, optimizer)
        state = jax.eval_shape(start, jax.random.key_data(jax.random.key(0)))
        batch = build_dataset(Synthetic(num_samples=8), options, 8, seed=0).train(0)
        loss = trace_step(step, (state, batch)).loss(1)
        (graph,) = cut_stages(loss, [tuple(range(max(loss.layers) + 1))])
        of = trace_stage(graph, loss, "none", {Kind.FORWARD, Kind.BACKWARD})
        names = of.programs[Kind.FORWARD].outputs
        kept = sum(nbytes(name.of.aval) for name in names if name.kind == "residual")
        found.append((kept, sum(matmul_flops(p.closed.eqns) for p in of.programs.values())))
    return [(many - few) / 2 for few, many in zip(*found, strict=True)]


WIDE = {
    name: dataclasses.replace(options, hidden_size=64, num_heads=2)
    for name, options in {
        **OPTIONS,
        "moe": MoEOptions(**SHAPE, vocab_size=32, sequence_length=8, num_experts=4).filled(),
    }.items()
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"attention": "xla"}) for name in WIDE),
        ("gpt", {"attention": "cudnn"}),
        ("gpt", {"attention": "xla", "dropout": 0.1}),
    ],
)
def test_a_scanned_layer_keeps_no_more_than_one_in_a_row(name, changes):
    """And no product is computed twice, nor attention in one kernel."""
    with described_cudnn():
        kept, flops = kept_and_computed(name, True, **changes)
        most, once = kept_and_computed(name, False, **changes)
    assert kept <= most
    assert flops == once
