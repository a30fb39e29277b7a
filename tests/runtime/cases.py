"""`jax.value_and_grad` over slices of a batch, by hand, which are told by their length alone."""

import functools

import jax
import jax.numpy as jnp

BATCH = 24  # no other axis is as long


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
