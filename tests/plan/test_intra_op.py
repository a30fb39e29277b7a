"""The choice of what to cut: Megatron's for transformers, the expert dimension for experts, and
never dearer than any other choice."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.partition.named_dims import NamedDims, Sharding
from launcher.plan import local_shape
from launcher.plan.cost.collectives import equation_load, flow, seconds
from launcher.plan.intra_op import along_data, model_classes
from launcher.plan.methods import ShardParallel
from launcher.recipes import build_model
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.mlp import MLPOptions
from launcher.trace import trace_step
from launcher.trace.ir.jaxpr import inline_calls, make_jaxpr, nbytes
from launcher.trace.ir.primitive_kinds import PRODUCTS

ROWS = 16
# Waiting is cheap, or a model this small would rather be whole.
CLUSTER = dataclasses.replace(local_shape(4, 1, "cpu"), latency=50e-6, intra_host=30e9)


def shape(*lengths):
    return jax.ShapeDtypeStruct(lengths, jnp.float32)


def shardings(options, mesh):
    """The plan's shardings of the parameters that are cut, by name."""
    model = build_model(options, "fp32")
    params = jax.eval_shape(model.init, jax.random.key(0))
    if options.name == "mlp":
        batch = {"x": shape(ROWS, options.input_size), "y": shape(ROWS, options.output_size)}
    else:
        text = jax.ShapeDtypeStruct((ROWS, options.sequence_length), jnp.int32)
        batch = {"tokens": text, "targets": text}

    def step(params, batch):
        return launcher.grad(lambda p: model.loss(p, batch, None)[0])(params)

    plan = ShardParallel(1, mesh).plan(trace_step(step, (params, batch)), CLUSTER)
    assert len(plan.stages) == 1
    found = plan.stages[0].shardings
    return {name[2:]: spec for name, spec in found.items() if name[0] == "0" and any(spec)}


BLOCK = {
    "self_attention.linear_qkv.kernel": (None, None, "model", None),  # by heads
    "self_attention.linear_qkv.bias": (None, "model", None),
    "self_attention.linear_proj.kernel": ("model", None, None),
    "mlp.linear_fc1.kernel": (None, "model"),
    "mlp.linear_fc1.bias": ("model",),
    "mlp.linear_fc2.kernel": ("model", None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_is_cut_as_megatron_cuts_it(devices, tied):
    options = GPTOptions(
        vocab_size=512, hidden_size=64, num_layers=2, num_heads=4, sequence_length=16,
        mlp_ratio=4, tie_embeddings=tied,
    ).filled()  # fmt: skip
    want = {f"layers_{i}.{name}": spec for i in range(2) for name, spec in BLOCK.items()}
    if tied:
        want["word_embeddings.embedding"] = ("model", None)
    else:  # one of the two is enough
        want["output_layer.kernel"] = (None, "model")
    assert shardings(options, (4 // devices, devices)) == want


def test_an_mlp_is_cut_by_columns_and_rows_in_turn():
    options = MLPOptions(input_size=8, hidden_size=16, output_size=4, num_layers=4)
    columns, rows = (None, "model"), ("model", None)
    assert shardings(options, (1, 4)) == {
        "layers_0.kernel": columns,
        "layers_0.bias": ("model",),
        "layers_1.kernel": rows,
        "layers_2.kernel": columns,
        "layers_2.bias": ("model",),
        "output_layer.kernel": rows,
    }


def test_experts_are_cut_by_expert():
    """Switch's dispatch by einsum (Fedus et al. 2021): experts run apart, nothing is summed in
    them."""
    rows, experts, capacity, width = 1024, 8, 256, 64

    def loss(params, x):
        gates = jax.nn.softmax(x @ params["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts, dtype=int)
        place = jax.nn.one_hot((jnp.cumsum(chosen, 0) * chosen).sum(-1), capacity)
        dispatch = chosen[:, :, None] * place[:, None, :]
        taken = jnp.einsum("bd,bec->ecd", x, dispatch)
        inner = jax.nn.relu(jnp.einsum("ecd,edf->ecf", taken, params["up"]))
        made = jnp.einsum("ecf,efd->ecd", inner, params["down"])
        out = jnp.einsum("ecd,bec,be->bd", made, dispatch, gates)
        return ((out - x) ** 2).mean()

    params = {
        "gate": shape(width, experts),
        "up": shape(experts, width, 4 * width),
        "down": shape(experts, 4 * width, width),
    }
    closed = inline_calls(make_jaxpr(loss, params, shape(rows, width)))
    down, gate, up, _ = closed.invars  # by name
    dims, found = chosen_classes(closed, 3)
    expert = dims.classes(up)[0]
    assert expert == dims.classes(down)[0] == dims.classes(gate)[1]
    assert [of for of in (*dims.classes(up), *dims.classes(down)) if of in found] == [expert] * 2


def chosen_classes(closed, num_parameters, devices=4):
    """What is cut of a function whose last operand is the batch, rows first."""
    invars = closed.invars
    dims = NamedDims(closed.eqns)
    parameters = invars[:num_parameters]
    batch = {dims.classes(v)[0] for v in invars[num_parameters:]}
    flows = flow(closed.eqns, parameters)
    found = model_classes(dims, parameters, batch, flows, devices, CLUSTER, CLUSTER.intra_host)
    return dims, found


def two_layers(params, x):
    return (jnp.tanh(x @ params[0]) @ params[1]).sum()


def shared_width(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w)
    return x.sum()


def wide_and_narrow(params, x):
    a, b, c = params
    return (jax.nn.relu(x @ a) @ b).sum() + (x @ c).mean()


def through_a_scan(params, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w[0]) @ w[1], None), x, params)[0].sum()


PROGRAMS = {
    "two layers": (two_layers, [shape(8, 32), shape(32, 8)]),
    "one width": (shared_width, [shape(8, 8)] * 3),
    "wide and narrow": (wide_and_narrow, [shape(8, 64), shape(64, 4), shape(8, 12)]),
    "scan": (through_a_scan, [shape(3, 8, 32), shape(3, 32, 8)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_other_choice_is_cheaper(name):
    """By trying all of them."""
    fun, params = PROGRAMS[name]
    closed = inline_calls(make_jaxpr(fun, params, shape(ROWS, 8)))
    dims, found = chosen_classes(closed, len(params))
    invars = closed.invars
    parameters, batch = invars[: len(params)], dims.classes(invars[-1])[0]
    flows = flow(closed.eqns, parameters)
    sizes = {"model": 4}
    arrays = [(v, 0) for v in parameters]
    arrays += [
        (v, use.scope)
        for use in dims.uses
        if use.eqn.primitive.name in PRODUCTS
        for v in (*use.eqn.invars, *use.eqn.outvars)
    ]
    every = [(v, use.scope) for use in dims.uses for v in (*use.eqn.invars, *use.eqn.outvars)]
    classes = sorted({of for v, scope in every for of in dims.classes(v, scope)} - {batch})
    classes = [of for of in classes if dims.size(of) > 1 and dims.size(of) % 4 == 0]

    def price(of):
        cut = Sharding(dims, sizes)
        cut.axis_of.update({of: ("model",)} if of is not None else {})
        found = (equation_load(use, cut, flows) for use in dims.uses)
        return sum(seconds(one, sizes, CLUSTER, CLUSTER.intra_host) for one in found)

    prices = {of: price(of) - price(None) for of in classes}
    cut_bytes = {
        of: sum(nbytes(v.aval) for v in parameters if of in dims.classes(v)) for of in classes
    }
    allowed = [
        chosen
        for k in range(len(classes) + 1)
        for chosen in itertools.combinations(classes, k)
        if all(len(set(chosen) & set(dims.classes(*v))) <= 1 for v in arrays)
    ]
    most = max(sum(cut_bytes[of] for of in chosen) for chosen in allowed)
    enough = [c for c in allowed if sum(cut_bytes[of] for of in c) >= 0.75 * most]
    assert tuple(found) in enough
    best = min(sum(prices[of] for of in chosen) for chosen in enough)
    assert sum(prices[of] for of in found) == pytest.approx(best)


def test_nothing_is_cut_that_no_devices_divide():
    closed = inline_calls(make_jaxpr(two_layers, [shape(7, 9), shape(9, 5)], shape(ROWS, 7)))
    assert chosen_classes(closed, 2)[1] == []


@pytest.mark.parametrize(
    ("lengths", "spec", "replicas", "model", "want"),
    [
        ((8, 16), (None, None), 4, 1, (None, "data")),  # the longest
        ((8, 8), (None, None), 4, 1, ("data", None)),  # the first of these
        ((8, 16), (None, "model"), 4, 2, ("data", "model")),  # rather one that is whole
        ((6, 16), (None, "model"), 4, 2, (None, ("model", "data"))),
        ((6, 16), (None, "model"), 4, 8, None),  # 2 are left of 16
        ((6, 9), (None, None), 4, 1, None),
        ((), (), 4, 1, None),
        ((0, 5), (None, None), 4, 1, None),
    ],
)
def test_the_dimension_to_cut_along_data(lengths, spec, replicas, model, want):
    assert along_data(lengths, spec, replicas, model) == want
