"""Random keys: each slice draws the numbers that one device draws for its rows."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs.pieces import CLASSES, HIDDEN, batch, descended, losses, net, params, rows
from programs.program import METHODS, ROWS, Program, assert_same, check, table_test

import launcher


def drawing(forward, loss, key_of, given=True):
    """A program whose loss is `loss(forward(params, batch, key), params, batch)`.

    Args:
        forward: returns a row, or several, of each example.
        loss: a number of all rows, and metrics.
        key_of: the key at a step, which is counted in the state.
        given: whether the step makes the key, and hands it to the loss; else the loss makes it.
    """

    def build(value_and_grad):
        def step(state, b):
            def of(p, b, at):
                found = forward(p, b, at if given else key_of(at))
                return loss(found, p, b)

            at = key_of(state["step"]) if given else state["step"]
            found, grads = value_and_grad(of, has_aux=True)(state["params"], b, at)
            new = {"params": descended(state["params"], grads), "step": state["step"] + 1}
            return new, {"found": found, "grads": grads}

        return step

    return Program(lambda: {"params": params(), "step": np.int32(0)}, build, batch)


def dropped(p, b, key):
    """Outputs of a network with dropout, and what was kept."""
    h = jnp.tanh(b["x"] @ p["a"])
    kept = jax.random.bernoulli(key, 0.75, h.shape)
    launcher.mark_pipeline_boundary()
    return (h * kept / 0.75) @ p["b"], kept


def squares(found, p, b):
    y, drawn = found
    return ((y - b["t"]) ** 2).mean(), drawn


def masked_squares(found, p, b):
    y, kept = found
    mask = kept[:, 0] * b["mask"]
    return (((y - b["t"]) ** 2).mean(1) * mask).sum() / jnp.maximum(mask.sum(), 1), mask.sum()


def noised(p, b, key):
    """Diffusion: each example at a time of its own, with noise of its own."""
    of_time, of_noise = jax.random.split(key)
    time = jax.random.uniform(of_time, (rows(b), 1))
    noise = jax.random.normal(of_noise, b["x"].shape)
    y = net(p, {"x": (1 - time) * b["x"] + time * noise})
    return y - noise[:, :CLASSES], time


def sampled(p, b, key):
    """Labels are drawn from what the network says, and learned."""
    y = net(p, b)
    drawn = jax.random.categorical(key, jax.lax.stop_gradient(y))
    return jax.nn.one_hot(drawn, CLASSES) - jax.nn.softmax(y) + y, drawn


def by_layers(p, b, keys):
    """A key of each layer, by a loop."""
    h, _ = jax.lax.scan(
        lambda h, key: (h + 0.1 * jax.random.normal(key, h.shape), None),
        jnp.tanh(b["x"] @ p["a"]),
        keys,
    )
    launcher.mark_pipeline_boundary()
    return h @ p["b"], h


class Dropped(nn.Module):
    """Flax's dropout, whose key is folded by the module's name."""

    @nn.compact
    def __call__(self, h):
        return nn.Dropout(0.4, deterministic=False)(h)


def of_all_kinds(p, b, key):
    """Noise, dropout by both of Flax's, labels for each example, and one number for all."""
    of_noise, of_linen, of_nnx, of_labels, of_all = jax.random.split(key, 5)
    x = b["x"] + 0.1 * jax.random.normal(of_noise, b["x"].shape)
    h = Dropped().apply({}, jnp.tanh(x @ p["a"]), rngs={"dropout": of_linen})
    launcher.mark_pipeline_boundary()
    h = nnx.Dropout(0.3, rngs=nnx.Rngs(dropout=of_nnx))(h)
    drawn = jax.random.choice(of_labels, CLASSES, (rows(b),))
    share = jax.random.beta(of_all, 0.4, 0.4)
    return h @ p["b"] - share * jax.nn.one_hot(drawn, CLASSES), drawn


def by_flax(p, b, key):
    h = Dropped().apply({}, jnp.tanh(b["x"] @ p["a"]), rngs={"dropout": key})
    launcher.mark_pipeline_boundary()
    return h @ p["b"], h


def one_time(p, b, key):
    """One number for all examples."""
    time = jax.random.uniform(key)
    return net(p, b) * time, jnp.full(rows(b), time)


def stepped(step):
    return jax.random.fold_in(jax.random.key(0), step)


def raw(step):
    return jax.random.fold_in(jax.random.PRNGKey(3), step)


def seeded(step):
    return jax.random.key(step)


def fixed(step):
    return jax.random.key(0)


def several(step):
    return jax.random.split(stepped(step), 2)


def same_numbers(step_loss):
    """A program whose step draws, or whose loss is given a key by it."""

    def build(value_and_grad):
        def step(state, b):
            key = jax.random.fold_in(jax.random.key(0), state["step"])
            value, grads = step_loss(value_and_grad, state["params"], b, key)
            return {"params": descended(state["params"], grads), "step": state["step"] + 1}, value

        return step

    return Program(lambda: {"params": params(), "step": np.int32(0)}, build, batch)


def drawn_before(value_and_grad, p, b, key):
    noise = jax.random.normal(key, b["x"].shape)
    return value_and_grad(lambda p, b: losses(p, b).mean())(p, {**b, "x": b["x"] + noise})


def never_drops(value_and_grad, p, b, key):
    def loss(p, b, key):
        kept = jax.random.bernoulli(key, 1.0, (rows(b), HIDDEN))
        h = jnp.tanh(b["x"] @ p["a"])
        launcher.mark_pipeline_boundary()
        return (((h * kept) @ p["b"] - b["t"]) ** 2).mean()

    return value_and_grad(loss)(p, b, key)


def of_each_example(value_and_grad, p, b, key):
    """The keys are those of the examples' numbers, whatever slice they are in."""

    def loss(p, b):
        noise = jax.vmap(lambda n: jax.random.normal(jax.random.key(n), (CLASSES,)))(b["number"])
        return ((net(p, b) - b["t"] - noise) ** 2).mean()

    return value_and_grad(loss)(p, b)


def shuffled(value_and_grad, p, b, key):
    order = jax.random.permutation(key, rows(b))
    return value_and_grad(lambda p, b, t: ((net(p, b) - t) ** 2).mean())(p, b, b["t"][order])


PROGRAMS = {
    "key of the step": drawing(dropped, squares, stepped),
    "raw key": drawing(dropped, squares, raw),
    "keys of layers": drawing(by_layers, squares, several),
    "key of a number in the loss": drawing(dropped, squares, fixed, given=False),
    "key of the step in the loss": drawing(dropped, squares, stepped, given=False),
    "key of a seed in the loss": drawing(dropped, squares, seeded, given=False),
    "raw key in the loss": drawing(dropped, squares, raw, given=False),
    "split in the loss": drawing(by_layers, squares, several, given=False),
    "random mask and its sum": drawing(dropped, masked_squares, stepped),
    "random mask and its sum, key in the loss": drawing(
        dropped, masked_squares, stepped, given=False
    ),
    "diffusion": drawing(noised, squares, stepped),
    "sampled labels": drawing(sampled, squares, stepped),
    "all kinds": drawing(of_all_kinds, squares, stepped),
    "Flax's dropout": drawing(by_flax, squares, stepped),
    "one number for all": drawing(one_time, squares, stepped),
    "drawn before the loss": same_numbers(drawn_before),
    "shuffled before the loss": same_numbers(shuffled),
    "dropout that drops nothing": same_numbers(never_drops),
    "a key of each example": same_numbers(of_each_example),
}
test_equal_to_one_device_or_refused = table_test(PROGRAMS)


PLANS = {  # data × microbatches × stages × ZeRO
    f"{kind.__name__}, data {devices}, microbatches {count}": (devices, kind(count))
    for devices, count, kind in itertools.product(
        (2, 4), (1, 2, 4), (launcher.DataParallel, launcher.Zero2Parallel, launcher.Zero3Parallel)
    )
}
PLANS |= {
    f"two stages, data {data}, microbatches {count}": (
        2 * data,
        launcher.ThreeDParallel(data=data, pipeline=2, num_micro_batches=count),
    )
    for data, count in itertools.product((1, 2), (1, 2, 4))
}


@pytest.mark.sampled(19)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_as_one_device(monkeypatch, plan):
    """Losses, gradients and parameters of each step."""
    devices, method = PLANS[plan]
    monkeypatch.setitem(METHODS, plan, method)
    check(PROGRAMS["all kinds"], plan, rtol=1e-6, devices=devices)


@pytest.mark.parametrize("given", [True, False], ids=["given", "made in the loss"])
def test_no_two_examples_see_the_same_numbers(given):
    """Neither two slices, nor two steps."""

    def forward(p, b, key):
        return net(p, b), jax.random.normal(key, (rows(b),))

    program = drawing(forward, squares, stepped, given=given)
    step = launcher.parallelize(
        program.build(launcher.value_and_grad),
        method=METHODS["stages"],
        devices=jax.devices()[:4],
        donate_argnums=(),
    )
    state, drawn = program.init(), []
    for k in range(2):
        state, metrics = step(state, program.batch(k))
        drawn.append(np.asarray(metrics["found"][1]))
    assert len(np.unique(np.concatenate(drawn))) == 2 * ROWS


KEYS = {
    "raw": jax.random.PRNGKey(5),
    "raw of another generator": jax.random.key_data(jax.random.key(5, impl="rbg")),
    "typed": jax.random.key(5),
    "raw, a number added": jax.random.PRNGKey(5),
    "raw, unused": jax.random.PRNGKey(5),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rows", [ROWS, 4], ids=["", "as many rows as words"])
@pytest.mark.parametrize("kind", KEYS)
def test_a_key_in_the_batch_is_a_key_and_no_rows(kind, rows):
    key = KEYS[kind]

    def loss(w, x, key):
        if kind == "raw of another generator":
            key = jax.random.wrap_key_data(key, impl="rbg")
        if kind == "raw, a number added":
            key = key + jnp.uint32(3)
        if kind == "raw, unused":
            key = jax.random.key(0)
        first, other = jax.random.split(key)
        h = jnp.tanh(x @ w + jax.random.normal(first, x.shape))
        launcher.mark_pipeline_boundary()
        return jnp.mean((h @ w) ** 2 * jax.random.uniform(other, x.shape))

    def step(w, b, key=None):
        own = lambda w, b: loss(w, b["x"], b.get("rng", key))  # noqa: E731
        return launcher.value_and_grad(own)(w, b)

    x = np.random.default_rng(0).normal(size=(rows, 8)).astype(np.float32)
    options = {"devices": jax.devices()[:4], "donate_argnums": ()}
    run = launcher.parallelize(step, method=METHODS["stages"], **options)
    wanted, got = run(jnp.eye(8), {"x": x}, key), run(jnp.eye(8), {"x": x, "rng": key})
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_raw_keys_of_the_examples_are_rows():
    def step(w, b):
        def loss(w, b):
            noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(b["rng"])
            return jnp.mean((b["x"] @ w + noise) ** 2)

        return launcher.value_and_grad(loss)(w, b)

    b = {"x": np.ones((ROWS, 8), np.float32), "rng": jax.random.split(jax.random.PRNGKey(0), ROWS)}
    got = launcher.parallelize(step, method=launcher.DataParallel(2), donate_argnums=())
    assert_same(got(jnp.eye(8), b), jax.jit(step)(jnp.eye(8), b), 1e-5)
