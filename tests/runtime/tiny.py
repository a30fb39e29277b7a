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
