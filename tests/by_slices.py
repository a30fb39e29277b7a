"""A loss computed slice by slice, as plans do, without devices, against the whole batch.

Also a small model and its batch, for losses to be made of.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import launcher
from launcher.trace import trace_step
from launcher.trace.ir.jaxpr import Jaxpr, jaxpr_as_fun

ROWS = 8


def normal(*shape):
    """Random numbers, the same for the same shape."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


PARAMS = {"a": normal(4, 6) / 2, "b": normal(6, 3) / 2}
BATCH = {
    "x": normal(ROWS, 4),
    "t": normal(ROWS, 3),
    "label": np.random.default_rng(1).integers(0, 3, ROWS),
    "mask": np.array([0, 0, 1, 1, 1, 0, 1, 1], np.float32),  # slice 0 of 4 has no weight
    "weight": np.random.default_rng(2).uniform(size=ROWS).astype(np.float32),
}


def net(p, b):
    return jnp.tanh(b["x"] @ p["a"]) @ p["b"]


def losses(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(net(p, b), b["label"])


COMBINE = {
    "mean": lambda parts: sum(parts) / len(parts),
    "sum": sum,
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
    "concat": np.concatenate,
    "last": lambda parts: parts[-1],
    "infer": lambda parts: parts[0],  # of the only slice
}


def by_slices(fun, params, batch, count, reduce="infer", **kwargs):
    """`jax.value_and_grad(fun)(params, batch)` from `count` slices of the batch.

    Returns the results' leaves, the gradients' leaves, and how the results were combined.
    """

    def step(params, batch):
        return launcher.value_and_grad(fun, reduce=reduce, **kwargs)(params, batch)

    (values, grads), words = run(step, (params, batch), count)
    return jax.tree.leaves(values), jax.tree.leaves(grads), words


def run(step, args, count):
    """`step(*args)` with its loss computed from slices of `args[1]`, and how it was combined."""
    traced = trace_step(step, args)
    loss = traced.loss(count)
    names = [*traced.constants, *traced.invars]
    given = [*traced.constants.values(), *jax.tree.leaves(args)]
    operands = computed(names, traced.before, traced.operands, given)
    cuts = [cut(x, i, loss) for i, x in enumerate(operands)]
    sliced = jaxpr_as_fun(Jaxpr(loss.invars, loss.equations, loss.outvars))
    seed = 1 / count if loss.reduce[:1] == ("mean",) else 1.0  # as tasks have it

    @jax.jit
    def of_slice(own):
        def of(wrt):
            wrt = iter(wrt)
            outs = sliced(*(next(wrt) if i in loss.wrt else x for i, x in enumerate(own)))
            return outs[0] * seed if loss.wrt else 0.0, outs

        return jax.value_and_grad(of, has_aux=True)([own[i] for i in loss.wrt])

    found = [of_slice([x[s] for x in cuts]) for s in range(count)]
    outs = zip(*(outs for (_, outs), _ in found), strict=True)
    values = [COMBINE[word](parts) for word, parts in zip(loss.reduce, outs, strict=True)]
    grads = [sum(parts) for parts in zip(*(grads for _, grads in found), strict=True)]
    known = dict(zip(names, given, strict=True)) | dict(zip(traced.operands, operands, strict=True))
    known |= dict(zip(traced.loss_equation.outvars, [*values, *grads], strict=True))
    outs = computed([*known], traced.after, traced.outvars, [*known.values()])
    return jax.tree.unflatten(traced.out_tree, outs), loss.reduce


def computed(names, equations, results, given):
    """What equations make; compiled, where there are any."""
    fun = jaxpr_as_fun(Jaxpr(names, equations, results))
    return (jax.jit(fun) if equations else fun)(*given)


def compare(step, args, count, rtol=1e-5):
    """Hold a step against itself on the whole batch; returns how results were combined."""
    found, words = run(step, args, count)
    want = jax.tree.leaves(jax.jit(step)(*args))
    for got, value in zip(jax.tree.leaves(found), want, strict=True):
        np.testing.assert_allclose(got, value, rtol=rtol, atol=rtol)
    return words


def cut(x, i, loss):
    """The slices of an operand."""
    axis = loss.slice_axes[i]
    split = np.split if isinstance(x, np.ndarray) else jnp.split
    return [x] * loss.num_slices if axis is None else split(x, loss.num_slices, axis)


def check(fun, params, batch, count, reduce="infer", **kwargs):
    """Hold `fun` by slices against `fun` on the whole batch; returns how results were combined."""

    def step(params, batch):
        return launcher.value_and_grad(fun, reduce=reduce, **kwargs)(params, batch)

    return compare(step, (params, batch), count)
