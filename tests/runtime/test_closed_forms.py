"""What crosses between devices: the planner's count, the known optimum and the compiled program."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from collective_counts import collectives

import launcher
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel, ShardParallel, Zero2Parallel, Zero3Parallel
from launcher.runtime import compile_step
from launcher.trace import trace_step
from launcher.trace.interface import leaf_names

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


def separate(p, x):
    """Attention with a matrix each for query, key and value."""
    read = normed(x)
    query, key, value = (jnp.einsum("bsm,mnh->bsnh", read, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", query, key))
    return x + jnp.einsum("bqnh,nhm->bqm", jnp.einsum("bnqk,bknh->bqnh", weights, value), p["o"])


def block(p, x):
    return mlp(p, separate(p, x))


def again(p, x):
    """A block of which the backward pass computes all again."""
    return jax.checkpoint(block)(p, x)


def twice(p, x):
    """Two blocks in a loop."""
    return jax.lax.scan(lambda x, p: (block(p, x), None), x, p)[0]


MLP = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
ATTENTION = {
    "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
    "o": (HEADS, WIDTH // HEADS, WIDTH),
}
SEPARATE = dict.fromkeys("qkv", (WIDTH, HEADS, WIDTH // HEADS)) | {"o": ATTENTION["o"]}
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


@launcher.per_slice
def moe(p, x):
    """Switch's (Fedus et al. 2021), dispatched by einsum; capacity is each slice's own."""
    tokens = x.reshape(-1, WIDTH)
    gates = jax.nn.softmax(tokens @ p["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = jax.nn.one_hot(((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(int), CAPACITY)
    dispatch = chosen[:, :, None] * place[:, None, :]
    taken = jnp.einsum("td,tec->ecd", tokens, dispatch)
    inner = jax.nn.relu(jnp.einsum("ecd,edf->ecf", taken, p["up"]))
    made = jnp.einsum("ecf,efd->ecd", inner, p["down"])
    return x + jnp.einsum("ecd,tec,te->td", made, dispatch, gates).reshape(x.shape)


TOKENS = BATCH * LENGTH * 4  # bytes of a number for each token


def small(devices):
    """Of experts, beside what is of an activation's size: the gate's largest, its sum, the one that
    is chosen, and a sum going back; where the largest is, each device tells the others."""
    return [("all-reduce", TOKENS)] * 4 + [("all-gather", devices * TOKENS)] * 2


# A layer, its parameters, how often it sums an activation over the model axis, and what is small.
# Megatron-LM's (Shoeybi et al. 2019, section 3): one for an MLP and one for attention in each pass,
# which is also what a pair of convolutions needs, and experts whose devices all have the tokens.
CASES = {
    "block": (block, MLP | SEPARATE, 4),
    "attention": (attention, ATTENTION, 2),
    "moe": (moe, MOE, 2),
    "conv": (conv, CONV, 2),
}


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

    def train(state, batch):
        params, momentum = state
        grads = launcher.grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    return trace_step(train, ((params, params), floats(BATCH, LENGTH, 5)))


def compiled(executable, data, programs=""):
    """The kind and bytes of every array that devices sum, gather or scatter, of the programs whose
    names begin so."""
    return collections.Counter(
        (kind, size * (data if kind == "reduce-scatter" else 1))
        for name, text in executable.hlo_text().items()
        if name.startswith(programs)
        for kind, size in collectives(text)
    )


def planned(layer, shapes, method):
    """The step and its plan."""
    # Transfers that take no time to start, so that cutting pays, small as these blocks are.
    cluster = dataclasses.replace(local_shape(4, 1, "cpu"), latency=0.0, intra_host=5e9)
    step = step_of(layer, shapes)
    return step, method.plan(step, cluster)


def summary(found):
    """Count and bytes of every kind."""
    total = collections.defaultdict(lambda: [0, 0])
    for (kind, size), count in found.items():
        total[kind][0] += count
        total[kind][1] += count * size
    return dict(total)


def of_plan(plan):
    """Of a step of one microbatch."""
    total = collections.defaultdict(lambda: [0, 0])
    for one in plan.stages[0].collectives:
        total[one.kind][0] += one.count
        total[one.kind][1] += one.bytes
    return dict(total)


def parameter_bytes(step, plan):
    """Of every parameter, on each device along the model axis."""
    named = zip(leaf_names(step), step.invars, strict=True)
    model = plan.stages[0].logical_mesh[1]
    cut = {n for n, spec in plan.stages[0].shardings.items() if "model" in spec}
    leaves = [(n, v.aval.size * 4) for n, v in named if n.startswith("0.0.")]
    return [size // (model if name in cut else 1) for name, size in leaves]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)])
@pytest.mark.parametrize("case", CASES)
def test_tensor_parallel(case, mesh):
    """Sums over the model axis are as few as is known to be possible, each gradient is summed once
    over the replicas, and the plan says so."""
    layer, shapes, each = CASES[case]
    data, model = mesh
    step, plan = planned(layer, shapes, ShardParallel(1, mesh, bucket_bytes=0))
    best = collections.Counter({("all-reduce", ACTIVATION // data): each * BLOCKS})
    if case == "moe":
        for kind, size in small(model) * BLOCKS:
            best[kind, size // data] += 1
    if data > 1:
        best.update(("all-reduce", size) for size in parameter_bytes(step, plan))
    assert compiled(compile_step(step, plan, jax.devices()), data) == best
    assert of_plan(plan) == summary(best)


@pytest.mark.parametrize("mesh", [(1, 4), pytest.param((2, 2), marks=pytest.mark.stress)])
def test_parts_of_a_gradient_are_added_before_they_are_summed_in_bodies_too(mesh):
    """In a loop, whose body is there once, and where the backward pass computes a block again, but
    for its last sum."""
    pairs = {name: (2, *lengths) for name, lengths in (MLP | SEPARATE).items()}
    for layer, shapes, each in ((twice, pairs, 4), (again, MLP | SEPARATE, 5)):
        step, plan = planned(layer, shapes, ShardParallel(1, mesh))
        found = compiled(compile_step(step, plan, jax.devices()), mesh[0], "stage.")
        assert found["all-reduce", ACTIVATION // mesh[0]] == each * BLOCKS
        assert {kind for kind, _ in found} == {"all-reduce"}


def rounded(p, x):
    """Products in 32 bits of what is read in 16: parts of the gradient are rounded."""
    read = normed(x).astype(jnp.bfloat16)
    heads = [
        jnp.matmul(read, p[n].reshape(WIDTH, -1), preferred_element_type=jnp.float32) for n in "qkv"
    ]
    return x + sum(heads) @ p["o"].reshape(-1, WIDTH)


def test_parts_of_a_gradient_are_summed_in_as_many_bits_as_they_are_made():
    step, plan = planned(rounded, SEPARATE, ShardParallel(1, (1, 4)))
    found = compiled(compile_step(step, plan, jax.devices()), 1, "stage.")
    # Each of the three, before it is rounded: of their sum less would be left.
    assert found == {("all-reduce", ACTIVATION): (1 + 3) * BLOCKS}


ALONG_DATA = {  # how often each parameter is in each kind: all that is needed
    "data": (DataParallel(1, bucket_bytes=0), {"all-reduce": 1}),
    "zero2": (Zero2Parallel(1, bucket_bytes=0), {"reduce-scatter": 1, "all-gather": 1}),
    "zero3": (Zero3Parallel(1, bucket_bytes=0), {"reduce-scatter": 1, "all-gather": 1}),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("method", ALONG_DATA)
@pytest.mark.parametrize("case", CASES)
def test_along_data(case, method):
    """Each gradient is summed once, over all devices, or scattered; with ZeRO each parameter is
    gathered once: after the update, or for both passes of the only microbatch."""
    how, times = ALONG_DATA[method]
    layer, shapes, _ = CASES[case]
    step, plan = planned(layer, shapes, how)
    best = collections.Counter()
    for size in parameter_bytes(step, plan):
        best.update({(kind, size): count for kind, count in times.items()})
    assert compiled(compile_step(step, plan, jax.devices()), 4) == best
    assert of_plan(plan) == summary(best)
