"""What a parity case is, its serial reference, and the pieces that cases are made of.

Sizes are tiny, since what a case costs is compiling, and no other axis is as long as the batch:
`serial` tells by its length what is cut into slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import launcher

BATCH, WIDTH, LAYERS, LENGTH, VOCAB = 24, 8, 4, 6, 12
mark = launcher.mark_pipeline_boundary
State = Any
Step = Callable[[State, Any], tuple[State, Any]]


class Case(NamedTuple):
    """A train step `step(state, batch) -> (state, metrics)`.

    `init(key) -> state`; `batch(k)` is the k-th batch; `build` makes the step with a function in
    the place of `launcher.value_and_grad`.
    """

    name: str
    init: Callable[[jax.Array], State]
    build: Callable[[Any], Step]
    batch: Callable[[int], Any]

    @property
    def step(self) -> Step:
        """The step as it is parallelized."""
        return self.build(launcher.value_and_grad)


def serial(case: Case, num_slices: int) -> Step:
    """The step on one device by plain `jax.jit`, its loss taken over equal slices of the batch,
    one after another."""
    return jax.jit(case.build(functools.partial(_over_slices, num_slices)))


def _over_slices(count, fun, argnums=0, has_aux=False, reduce="mean"):
    """`jax.value_and_grad` that does by hand what `launcher.value_and_grad` says."""
    plain = jax.value_and_grad(fun, argnums, has_aux)

    def wrapped(*args, **kwargs):
        def one(m):
            return plain(*_slice(args, m, count), **_slice(kwargs, m, count))

        values, grads = jax.lax.map(one, jnp.arange(count))
        words = jax.tree.broadcast(reduce, values)
        of_loss = jax.tree.leaves(words)[0]
        value = jax.tree.map(_combined, words, values)
        return value, jax.tree.map(functools.partial(_combined, of_loss), grads)

    return wrapped


def _slice(tree, m, count):
    """Slice `m` of `count`: its rows of what is cut, and keys folded with `m`."""

    def of(x):
        if count == 1 or not hasattr(x, "dtype"):
            return x
        if x.shape[:1] == (BATCH,):
            return jax.lax.dynamic_slice_in_dim(x, m * (BATCH // count), BATCH // count)
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        if not is_key and x.dtype != jnp.uint32:
            return x
        fold = jax.random.fold_in
        for _ in range(x.ndim if is_key else x.ndim - 1):
            fold = jax.vmap(fold, (0, None))
        return fold(x, m)

    return jax.tree.map(of, tree)


def _combined(word, parts):
    if word == "concat":
        return parts.reshape(-1, *parts.shape[2:])
    return {"mean": parts.mean, "sum": parts.sum, "last": lambda axis: parts[-1]}[word](0)


# -- pieces ----------------------------------------------------------------------------------------


def optimizer():
    """A global norm, a schedule by step and a decay: numbers that every stage must agree on."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, 2, 20)
    return optax.chain(
        optax.clip_by_global_norm(0.5), optax.sgd(schedule, momentum=0.9, nesterov=True)
    )


def dense(rng, *shape):
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


def vectors(k, width=WIDTH):
    rng = np.random.default_rng(k)
    x = rng.normal(size=(BATCH, width)).astype(np.float32)
    return {"x": x, "y": np.roll(np.tanh(x), 1, axis=1)}


def tokens(k):
    text = np.random.default_rng(k).integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def images(k):
    rng = np.random.default_rng(k)
    image = rng.normal(size=(BATCH, 6, 6, 2)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, 3, BATCH).astype(np.int32)}


def chain(layer, h, layers):
    """`layer` by `layer`, a boundary between any two."""
    for i, params in enumerate(layers):
        if i:
            mark()
        h = layer(params, h)
    return h


def plain_init(make_params, **extra):
    """`make_params(rng)` draws with NumPy: threefry would be most of what there is to compile."""

    def init(key):
        del key
        params = make_params(np.random.default_rng(0))
        return {"params": params, "opt": optimizer().init(params), "step": jnp.int32(0), **extra}

    return init


def update(state, grads):
    updates, opt = optimizer().update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt": opt, "step": state["step"] + 1}


def plain_build(loss):
    """Loss, gradients, update: the step that most cases need."""

    def build(value_and_grad):
        def step(state, batch):
            value, grads = value_and_grad(loss)(state["params"], batch)
            return update(state, grads), {"loss": value, "norm": optax.tree.norm(grads)}

        return step

    return build


def weights(rng):
    return [dense(rng, WIDTH, WIDTH) for _ in range(LAYERS)]


def vector_case(name, layer, make_params=weights):
    """A chain of layers on vectors."""

    def loss(params, batch):
        return jnp.mean((chain(layer, batch["x"], params) - batch["y"]) ** 2)

    return Case(name, plain_init(make_params), plain_build(loss), vectors)
