"""A model whose blocks are one `lax.scan`, and the same with its blocks one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import launcher

WIDTH, LAYERS = 8, 12
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
BATCHES = [np.random.default_rng(i).normal(size=(24, WIDTH)).astype(np.float32) for i in range(4)]


def params_of(key):
    del key  # to draw would be most of what there is to compile
    rng = np.random.default_rng(0)
    small = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    blocks = {"w": small(LAYERS, WIDTH, WIDTH), "b": jnp.zeros((LAYERS, WIDTH))}
    return {"tied": small(WIDTH, WIDTH), "blocks": blocks, "head": small(WIDTH)}


def init(key):
    params = params_of(key)
    return params, OPTIMIZER.init(params)


def block(h, p):
    return h + jnp.tanh(h @ p["w"] + p["b"]), None


def loss(params, x):
    h, _ = lax.scan(block, jnp.tanh(x @ params["tied"]), params["blocks"])
    return ((h @ params["tied"].T * params["head"] - x) ** 2).mean()


def unrolled_loss(params, x):
    h = jnp.tanh(x @ params["tied"])
    for i, p in enumerate(params["blocks"]):
        if i:
            launcher.mark_pipeline_boundary()
        h, _ = block(h, p)
    return ((h @ params["tied"].T * params["head"] - x) ** 2).mean()


def unrolled(tree):
    """The tree with a list of the layers in place of each stacked array."""

    def apart(blocks):
        return [jax.tree.map(lambda p, i=i: np.asarray(p)[i], blocks) for i in range(LAYERS)]

    is_params = lambda x: isinstance(x, dict) and "blocks" in x  # noqa: E731
    return jax.tree.map(
        lambda x: {**x, "blocks": apart(x["blocks"])} if is_params(x) else x,
        tree,
        is_leaf=is_params,
    )


def step_of(loss):
    def step(state, x):
        params, kept = state
        value, grads = launcher.value_and_grad(loss)(params, x)
        updates, kept = OPTIMIZER.update(grads, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    return step


step, unrolled_step = step_of(loss), step_of(unrolled_loss)


def evaluate(state, x):
    return launcher.microbatched(loss)(state[0], x)


def serial(count):
    state, losses = jax.jit(init)(jax.random.key(0)), []
    for x in BATCHES[:count]:
        state, value = jax.jit(step)(state, x)
        losses.append(float(value))
    return state, losses
