"""A tiny model with a tied weight, a skip connection over stages and a clipped update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import launcher

WIDTH, LAYERS = 8, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
_rng = np.random.default_rng(0)
BATCHES = [_rng.normal(size=(24, WIDTH)).astype(np.float32) for _ in range(6)]


def init(key):
    names = ["tied", "w1", "w2"]
    keys = jax.random.split(key, len(names))
    params = {n: jax.random.normal(k, (WIDTH, WIDTH)) / 3 for n, k in zip(names, keys, strict=True)}
    return params, OPTIMIZER.init(params)


def step(state, x):
    def loss(params, x):
        first = h = jnp.tanh(x @ params["tied"])
        for name in ("w1", "w2"):
            launcher.mark_pipeline_boundary()
            h = jnp.tanh(h @ params[name])
        launcher.mark_pipeline_boundary()
        return (((h + first) @ params["tied"] - x) ** 2).mean()

    params, opt = state
    value, grads = launcher.value_and_grad(loss)(params, x)
    updates, opt = OPTIMIZER.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), value


def evaluate(state, x):
    """A loss of the same cuts, without gradients."""

    def of(params, x):
        for name in ("w1", "w2", "tied"):
            x = jnp.tanh(x @ params[name])
            launcher.mark_pipeline_boundary()
        return (x**2).mean()

    return launcher.microbatched(of)(state[0], x)


def serial(count):
    """The state after so many steps by plain JAX, and each step's loss."""
    state, fun, losses = jax.jit(init)(jax.random.key(0)), jax.jit(step), []
    for k in range(count):
        state, loss = fun(state, BATCHES[k % len(BATCHES)])
        losses.append(float(loss))
    return state, losses


def run(train, count):
    """The same by a parallelized step, whose losses are as it returns them."""
    state, losses = train.create(init, jax.random.key(0), like=BATCHES[0]), []
    for batch in BATCHES[:count]:
        state, loss = train(state, batch)
        losses.append(loss)
    return state, losses
