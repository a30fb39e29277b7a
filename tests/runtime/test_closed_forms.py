"""What crosses between devices: the planner's count, the known optimum and the compiled program."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.plan import local_shape, make_plan
from launcher.plan.sharding.cost import all_reduced, flow
from launcher.plan.sharding.layout import MODEL, layouts
from launcher.plan.stages import cut_stages
from launcher.runtime import compile_step
from launcher.trace import trace_step

COLLECTIVE = re.compile(r"= (\(?[^=]*?) (all-[\w-]+|reduce-scatter|collective-\w+)\(")
BATCH, LENGTH, WIDTH, HEADS, BLOCKS = 4, 8, 32, 4, 2
ACTIVATION = BATCH * LENGTH * WIDTH * 4  # bytes


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def mlp(p, x):
    return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]


def attention(p, x):
    query, key, value = jnp.einsum("bsm,mtnh->tbsnh", normed(x), p["qkv"])
    weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", query, key))
    return x + jnp.einsum("bqnh,nhm->bqm", jnp.einsum("bnqk,bknh->bqnh", weights, value), p["o"])


def block(p, x):
    return mlp(p, attention(p, x))


MLP = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
ATTENTION = {
    "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
    "o": (HEADS, WIDTH // HEADS, WIDTH),
}
# Sums of an activation over the model axis for each block, in each pass: Megatron-LM's (Shoeybi et
# al. 2019, section 3), one for an MLP and one for attention.
CASES = {"mlp": (mlp, MLP, 1), "attention": (attention, ATTENTION, 1)}
CASES["block"] = block, MLP | ATTENTION, 2


DIMENSIONS = ("NWC", "WIO", "NWC")
CONV = {"widen": (3, WIDTH, 4 * WIDTH), "narrow": (3, 4 * WIDTH, WIDTH)}
EXPERTS, CAPACITY = 4, 16
MOE = {
    "gate": (WIDTH, EXPERTS),
    "up": (EXPERTS, WIDTH, 4 * WIDTH),
    "down": (EXPERTS, 4 * WIDTH, WIDTH),
}


def conv(p, x):
    h = jax.lax.conv_general_dilated(x, p["widen"], (1,), "SAME", dimension_numbers=DIMENSIONS)
    h = jax.nn.relu(h)
    return x + jax.lax.conv_general_dilated(
        h, p["narrow"], (1,), "SAME", dimension_numbers=DIMENSIONS
    )


def moe(p, x):
    """Switch's (Fedus et al. 2021), dispatched by einsum."""
    tokens = x.reshape(-1, WIDTH)
    gates = jax.nn.softmax(tokens @ p["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = jax.nn.one_hot(((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(int), CAPACITY)
    dispatch = chosen[:, :, None] * place[:, None, :]
    taken = jnp.einsum("td,tec->ecd", tokens, dispatch)
    inner = jax.nn.relu(jnp.einsum("ecd,edf->ecf", taken, p["up"]))
    made = jnp.einsum("ecf,efd->ecd", inner, p["down"])
    return x + jnp.einsum("ecd,tec,te->td", made, dispatch, gates).reshape(x.shape)


def step_of(layer, shapes):
    def loss(params, batch):
        x = batch @ params["first"]
        for p in params["blocks"]:
            x = layer(p, x)
        return (x**2).mean()

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    of_block = {name: floats(*shape) for name, shape in shapes.items()}
    params = {"first": floats(5, WIDTH), "blocks": [of_block] * BLOCKS}

    def train(params, batch):
        grads = launcher.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return trace_step(train, (params, floats(BATCH, LENGTH, 5)))


def predicted(step, plan):
    """Bytes of each sum over the model axis in the passes of the only stage."""
    loss = step.loss(plan.num_micro_batches * plan.num_replicas)
    (graph,) = cut_stages(loss, [stage.layers for stage in plan.stages])
    (layout,) = layouts(step, loss, plan)
    seeds = {loss.invars[i]: layout.operand(i) for i in graph.operands}
    flows = flow(graph.equations, [loss.invars[i] for i in graph.wrt])
    sums = all_reduced(layout.inside(graph.equations, seeds), flows)
    forward, backward = sums.get(MODEL, ([], []))
    return sorted(forward + backward)


def compiled(executable):
    """Bytes of each array that a pass of the pipeline sums over devices, kinds of all others."""
    sums, others = [], []
    for name, text in executable.hlo_text().items():
        if not name.startswith("stage."):
            continue
        for shapes, kind in COLLECTIVE.findall(text):
            if kind != "all-reduce":
                others.append(kind)
            for sizes in re.findall(r"f32\[([\d,]*)\]", shapes):
                sums.append(4 * math.prod(int(n) for n in sizes.split(",") if n))
    return sorted(sums), others


def planned(layer, shapes, mesh):
    """The step, its plan on a logical mesh, and the size of the data axis."""
    step = step_of(layer, shapes)
    data, model = mesh
    # Links so fast that cutting pays, small as these blocks are.
    cluster = dataclasses.replace(local_shape(data * model, 1, "cpu"), latency=0.0, intra_host=2e11)
    plan = make_plan(
        step, method="shard", data=data, model=model, num_micro_batches=1, cluster=cluster
    )
    return step, plan, data


@pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_tensor_parallel_sums_are_megatrons(case, mesh):
    layer, shapes, each = CASES[case]
    step, plan, data = planned(layer, shapes, mesh)
    best = [ACTIVATION / data] * (2 * each * BLOCKS)
    assert predicted(step, plan) == best
    sums, others = compiled(compile_step(step, plan, jax.devices()))
    assert (sums, others) == (best, [])


@pytest.mark.parametrize("mesh", [(1, 2), (1, 4)])
def test_a_pair_of_convolutions_sums_once_in_each_pass(mesh):
    """By output channels, then by input channels: as a perceptron's two products are cut."""
    step, plan, _ = planned(conv, CONV, mesh)
    best = [float(ACTIVATION)] * (2 * BLOCKS)
    assert predicted(step, plan) == best
    sums, others = compiled(compile_step(step, plan, jax.devices()))
    assert (sums, others) == (best, [])


@pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (2, 2)])
def test_experts_run_apart_and_only_their_tokens_are_summed(mesh):
    """Expert parallelism on devices that all have the tokens: a block's result is summed forward,
    and its input's gradient, of the experts and of the gate, backward. Sums of the gate's numbers,
    one a token and expert, are small."""
    step, plan, data = planned(moe, MOE, mesh)
    cut = {name for name, spec in plan.stages[0].shardings.items() if "model" in spec}
    assert cut == {f"0.blocks.{b}.{name}" for b in range(BLOCKS) for name in MOE}
    tokens = [ACTIVATION / data] * (3 * BLOCKS)
    found = predicted(step, plan)
    sums, _ = compiled(compile_step(step, plan, jax.devices()))
    assert [size for size in found if size >= tokens[0]] == tokens
    assert [size for size in sums if size >= tokens[0]] == tokens
    assert sum(found) == pytest.approx(sum(sums), rel=0.05)
