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


@pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_tensor_parallel_sums_are_megatrons(case, mesh):
    layer, shapes, each = CASES[case]
    step = step_of(layer, shapes)
    data, model = mesh
    # Links so fast that cutting pays, small as these blocks are.
    cluster = dataclasses.replace(local_shape(data * model, 1, "cpu"), latency=0.0, intra_host=2e11)
    plan = make_plan(
        step, method="shard", data=data, model=model, num_micro_batches=1, cluster=cluster
    )
    best = [ACTIVATION / data] * (2 * each * BLOCKS)
    assert predicted(step, plan) == best
    sums, others = compiled(compile_step(step, plan, jax.devices()))
    assert (sums, others) == (best, [])
