"""Odd programs: loops, rules of their own, strange states; and what has one clear refusal."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from programs.pieces import (
    CLASSES,
    HIDDEN,
    WIDTH,
    batch,
    decay,
    descended,
    losses,
    net,
    normal,
    of_loss,
    params,
    rows,
)
from programs.program import (
    ROWS,
    Program,
    Refused,
    everywhere,
    one_microbatch_only,
    several_slices,
    table_test,
)

import launcher
from launcher.trace import GradientError, TraceError


def squares(y, b):
    return ((y - b["t"]) ** 2).mean()


# -- inside the loss -------------------------------------------------------------------------------


def scanned(p, b):
    """A layer applied several times, and each example on its own."""
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h * w), None), jnp.tanh(b["x"] @ p["a"]), p["a"])
    launcher.mark_pipeline_boundary()
    return lax.map(lambda row: jnp.sum(row[0] @ p["b"] - row[1]) ** 2, (h, b["t"])).mean()


def rematerialized(p, b):
    h = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w)))(b["x"], p["a"])
    launcher.mark_pipeline_boundary()
    return squares(jax.checkpoint(jnp.matmul)(h, p["b"]), b)


def chosen_by_the_batch(p, b):
    y = net(p, b)
    return lax.cond(b["mask"].sum() > 9, lambda y: squares(y, b), lambda y: y.mean() * 3, y)


@jax.custom_vjp
def rounded(x):
    return jnp.round(4 * x) / 4


rounded.defvjp(lambda x: (rounded(x), jnp.abs(x) < 2), lambda kept, g: (g * kept,))


def straight_through(p, b):
    h = rounded(jnp.tanh(b["x"] @ p["a"]))
    launcher.mark_pipeline_boundary()
    return squares(h @ rounded(p["b"]), b)


@jax.custom_jvp
def smooth(x):
    return jnp.maximum(x, 0)


smooth.defjvp(lambda x, dx: (smooth(x[0]), jax.nn.sigmoid(x[0]) * dx[0]))


@jax.custom_vjp
def normalized(x):
    return x


normalized.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


def attention(p, b):
    """JAX's own function; each example is a sequence of its features."""
    h = jnp.tanh(b["x"][:, :, None, None] * p["a"][None, :, None])
    launcher.mark_pipeline_boundary()
    h = jax.nn.dot_product_attention(h, h, h, is_causal=True)
    return squares(h[:, -1, 0] @ p["b"], b)


def frozen_first_layer(p, b):
    """The first stage reads nothing of the batch."""
    h = jnp.tanh(jnp.ones((rows(b), WIDTH)) @ p["a"])
    launcher.mark_pipeline_boundary()
    return squares(h @ p["b"], b)


def hypernetwork(p, b):
    """The first stage makes weights of weights."""
    w = jnp.tanh(p["a"] @ p["b"])
    launcher.mark_pipeline_boundary()
    return squares(b["x"] @ w, b)


def parameters_alone(p, b):
    first = jnp.sum(jnp.tanh(p["a"]))
    launcher.mark_pipeline_boundary()
    return first * jnp.sum(p["b"] ** 2) + decay(p)


def spectrum(p, b):
    h = jnp.abs(jnp.fft.rfft(jnp.tanh(b["x"] @ p["a"]))) + 0.1
    launcher.mark_pipeline_boundary()
    return squares(h[:, :CLASSES] @ p["b"][:CLASSES], b)


def named_axis(p, b):
    """Batch norm by a mean over a `vmap`'s axis, as Equinox has it."""
    h = jnp.tanh(b["x"] @ p["a"])
    launcher.mark_pipeline_boundary()
    normed = jax.vmap(lambda h: h - lax.pmean(h, "batch"), axis_name="batch")(h)
    return squares(normed @ p["b"], b)


def of_each_number(p, b):
    """A row of a learned table for each example."""
    return losses({**p, "a": p["a"] * 2}, b).mean() + jnp.mean(
        p["log"][b["number"] % 2] * b["weight"]
    )


def double(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]


@jax.custom_vjp
def kernel(x):
    return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


kernel.defvjp(lambda x: (kernel(x), None), lambda _, g: (kernel(g),))


def with_kernel(p, b):
    h = kernel(jnp.tanh(b["x"] @ p["a"]))
    launcher.mark_pipeline_boundary()
    return squares(h @ p["b"], b)


def ridge(p, b):
    """The best weights for the batch, in closed form."""
    h = jnp.tanh(b["x"] @ p["a"])
    launcher.mark_pipeline_boundary()
    w = jnp.linalg.solve(h.T @ h + jnp.eye(HIDDEN), h.T @ b["t"])
    return ((w - p["b"]) ** 2).mean()


def printed(p, b):
    value = losses(p, b).mean()
    jax.debug.print("{}", value)
    return value


def constrained(p, b):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    h = lax.with_sharding_constraint(net(p, b), NamedSharding(mesh, PartitionSpec("x")))
    return squares(h, b)


def shard_mapped(p, b):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    spec = PartitionSpec("x")
    return squares(jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)(net(p, b)), b)


def called_back(p, b):
    y = net(p, b)
    shape = jax.ShapeDtypeStruct(b["t"].shape, b["t"].dtype)
    return squares(y, {"t": jax.pure_callback(np.sort, shape, b["t"])})


def row_by_row(p, b):
    return sum(jnp.sum(row**2) for row in net(p, b))


def fixed_shape(p, b):
    return squares(net(p, b).reshape(ROWS, CLASSES), b)


def checked_size(p, b):
    assert rows(b) == ROWS, "another batch size"
    return squares(net(p, b), b)


def other_on_few(p, b):
    return losses(p, b).mean() if rows(b) > ROWS // 2 else losses(p, b).sum()


def accumulated(p, b):
    """The user's own microbatches, inside the loss."""
    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), b)
    y = net(p, b).reshape(2, -1, CLASSES)
    return lax.map(lambda part: squares(part[0], part[1]), (y, parts)).mean()


# -- around the loss -------------------------------------------------------------------------------


def stateful(init, step_of, of=batch, **options):
    """A program whose step is `step_of(value_and_grad, state, batch)`."""

    def build(value_and_grad):
        return lambda state, b: step_of(value_and_grad, state, b)

    return Program(init, build, of, **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """A script's own class, with a static field and one that is not there."""

    params: Any
    opt: Any
    nothing: None = None
    name: str = dataclasses.field(default="own", metadata={"static": True})


OPTIMIZER = optax.MultiSteps(
    optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2, eps=1e-3)), every_k_schedule=2
)


def own_state(value_and_grad, state, b):
    """Gradients averaged over steps, a clip by their global norm, Adam."""
    value, grads = value_and_grad(lambda p, b: losses(p, b).mean())(state.params, b)
    updates, opt = OPTIMIZER.update(grads, state.opt, state.params)
    new = optax.apply_updates(state.params, updates)
    return dataclasses.replace(state, params=new, opt=opt), value


def loss_scaled(value_and_grad, state, b):
    """A step whose gradients overflow is skipped, and the scale lowered."""

    def loss(p, b, scale):
        value = losses(p, b).mean()
        return value * scale * 2.0**40, value

    scale = state["scale"]
    (_, value), grads = value_and_grad(loss, has_aux=True)(state["params"], b, scale)
    grads = jax.tree.map(lambda g: g / scale / 2.0**40, grads)
    finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    new = lax.cond(finite, lambda: descended(state["params"], grads), lambda: state["params"])
    return {"params": new, "scale": jnp.where(finite, scale, scale * 2.0**-60)}, value


def two_arguments(value_and_grad, state, b):
    """Two networks, one loss, a gradient of each."""

    def loss(first, second, b, *, scale):
        h = jnp.tanh(b["x"] @ first)
        launcher.mark_pipeline_boundary()
        return squares(h @ second, b) * scale

    value, (of_first, of_second) = value_and_grad(loss, argnums=(0, 1))(*state, b, scale=2.0)
    return (state[0] - 0.02 * of_first, state[1] - 0.01 * of_second), value


def partly_frozen(value_and_grad, state, b):
    """A parameter that no loss reads, and one whose gradient is stopped."""

    def loss(p, b):
        return losses({**p, "a": lax.stop_gradient(p["a"])}, b).mean()

    value, grads = value_and_grad(loss)(state, b)
    return descended(state, grads), {"value": value, "norm": optax.tree.norm(grads)}


def memory_bank(value_and_grad, state, b):
    """Negatives are the last steps' outputs, which the state keeps (MoCo)."""

    def loss(p, b, bank):
        y = net(p, b)
        right = (y * b["t"]).sum(1, keepdims=True)
        scores = jnp.concatenate([right, y @ bank.T], 1)
        return -jax.nn.log_softmax(scores)[:, 0].mean(), lax.stop_gradient(y)

    with_outputs = value_and_grad(loss, has_aux=True)
    (value, y), grads = with_outputs(state["params"], b, state["bank"])
    bank = jnp.concatenate([y, state["bank"]])[: len(state["bank"])]
    return {"params": descended(state["params"], grads), "bank": bank}, value


def own_forms(value_and_grad, state, b):
    """Bytes, a number of the whole batch, a mask of booleans."""

    def loss(p, b):
        y = net(p, {"x": b["bytes"].astype(jnp.float32) / 255 - 0.5})
        each = ((y - b["t"]) ** 2).mean(1) * b["temperature"]
        return jnp.mean(each, where=b["kept"]), {}

    (value, _), grads = value_and_grad(loss, has_aux=True)(state, b)
    return descended(state, grads), value


def of_own_forms(k):
    image = np.random.default_rng(k).integers(0, 256, (ROWS, WIDTH)).astype(np.uint8)
    b = batch(k)
    return {"bytes": image, "t": b["t"], "kept": b["mask"] > 0, "temperature": np.float32(0.5 + k)}


def in_a_loop(value_and_grad, state, b):
    def one(p, _):
        value, grads = value_and_grad(lambda p, b: losses(p, b).mean())(p, b)
        return descended(p, grads), value

    return lax.scan(one, state, None, length=2)


def of_single_examples(value_and_grad, state, b):
    """The gradient of each example, clipped (Abadi et al., 2016)."""

    def loss(p, x, t):
        return ((net(p, {"x": x}) - t) ** 2).mean()

    found, grads = jax.vmap(value_and_grad(loss), (None, 0, 0))(state, b["x"], b["t"])
    norms = jax.vmap(optax.tree.norm)(grads)
    share = jnp.minimum(1, 0.1 / norms)
    grads = jax.tree.map(lambda g: (g.T * share).T.mean(0), grads)
    return descended(state, grads), {"found": found, "norms": norms}


def real_and_fake(p, b):
    """A network that tells the batch from what another one makes, in one pass over both."""
    fake = jnp.tanh(b["t"] @ p["b"].T) @ p["a"].T
    y = net(p, {"x": jnp.concatenate([b["x"], fake])})[:, 0]
    real, fake = jnp.split(y, 2)
    return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()


def drawn_points(value_and_grad, state, key):
    """No batch: the points at which an equation must hold are drawn."""

    def loss(p, key):
        return (net(p, {"x": jax.random.normal(key, (ROWS, WIDTH))}) ** 2).mean()

    value, grads = value_and_grad(loss)(state, key)
    return descended(state, grads), value


def own_norm(h):
    return (h - h.mean(0)) * lax.rsqrt(h.var(0) + 0.1)


def norm_of_slices(value_and_grad, p, b, norm):
    def loss(p, b):
        h = norm(jnp.tanh(b["x"] @ p["a"]))
        launcher.mark_pipeline_boundary()
        return squares(h @ p["b"], b)

    value, grads = value_and_grad(loss)(p, b)
    return descended(p, grads), value


def norm_by_hand(count):
    """The norm of each slice of the batch, on one device."""

    def norm(h):
        return jax.vmap(own_norm)(h.reshape(count, -1, HIDDEN)).reshape(-1, HIDDEN)

    return lambda p, b: norm_of_slices(jax.value_and_grad, p, b, norm)


JOINED = one_microbatch_only("joins examples")
PROGRAMS = {
    "scan and map": of_loss(scanned),
    "branch of the batch": of_loss(chosen_by_the_batch),
    "checkpoint": of_loss(rematerialized),
    "straight through": of_loss(straight_through),
    "own derivative": of_loss(lambda p, b: squares(smooth(net(p, b)), b)),
    "attention": of_loss(attention),
    "frozen first layer": of_loss(frozen_first_layer),
    "hypernetwork": of_loss(hypernetwork),
    "parameters alone": of_loss(parameters_alone),
    # XLA:CPU computes no FFT of what it has gathered from several devices.
    "spectrum": of_loss(
        spectrum, refused={"shard": Refused(r"RET_CHECK failure .*fft", jax.errors.JaxRuntimeError)}
    ),
    "learned table": of_loss(of_each_number),
    "divided by the root of the rows": of_loss(
        lambda p, b: losses(p, b).sum() / np.sqrt(rows(b)) + np.log(rows(b))
    ),
    "own state": stateful(lambda: State(params(), OPTIMIZER.init(params())), own_state),
    "loss scaling": stateful(
        lambda: {"params": params(), "scale": np.float32(2.0**120)}, loss_scaled
    ),
    "two arguments": stateful(lambda: (params()["a"], params()["b"]), two_arguments),
    "partly frozen": stateful(lambda: {**params(), "unused": normal(5, 3)}, partly_frozen),
    "memory bank": stateful(
        lambda: {"params": params(), "bank": normal(6, 2 * ROWS, CLASSES)}, memory_bank
    ),
    "bytes, booleans and a number": stateful(params, own_forms, of_own_forms),
    "gradients of single examples": stateful(params, of_single_examples),
    "no batch": stateful(
        params, drawn_points, jax.random.key, refused=one_microbatch_only("holds no arrays")
    ),
    "norm of slices": Program(
        params,
        lambda value_and_grad: (
            lambda p, b: norm_of_slices(value_and_grad, p, b, launcher.per_slice(own_norm))
        ),
        batch,
        reference=norm_by_hand,
    ),
    # what joins examples
    "named axis": of_loss(named_axis, refused=JOINED),
    "real and fake": of_loss(real_and_fake),
    "normalized gradient": of_loss(lambda p, b: squares(normalized(net(p, b)), b), refused=JOINED),
    "kernel": of_loss(with_kernel, refused=one_microbatch_only("pallas_call at .* joins examples")),
    "ridge": of_loss(ridge, refused=JOINED),
    "own microbatches": of_loss(accumulated, refused=JOINED),
    # other programs on a slice
    "row by row": of_loss(row_by_row, refused=several_slices("another program on a slice")),
    "fixed shape": of_loss(fixed_shape, refused=several_slices("write -1 in reshape")),
    "checked size": of_loss(checked_size, refused=several_slices("another batch size")),
    "other on few rows": of_loss(other_on_few, refused=several_slices("another program")),
    # what no plan runs
    "print": of_loss(printed, refused=everywhere("has a side effect", TraceError)),
    "callback": of_loss(
        called_back, refused=everywhere("pure_callback at .* has a side effect", TraceError)
    ),
    "sharding of its own": of_loss(
        constrained, refused=everywhere("with_sharding_constraint at", TraceError)
    ),
    "shard_map": of_loss(shard_mapped, refused=everywhere("shard_map at .* Remove it", TraceError)),
    "gradient in a loop": stateful(
        params, in_a_loop, refused=everywhere("inside scan at", GradientError)
    ),
}
test_equal_to_one_device_or_refused = table_test(PROGRAMS)
