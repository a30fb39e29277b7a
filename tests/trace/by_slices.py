"""A loss computed slice by slice, as plans do, without devices: to be held against the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np

import launcher
from launcher.trace import trace_step
from launcher.trace.jaxpr import jaxpr_as_fun, program
from launcher.trace.random_keys import fold_slices

COMBINE = {
    "mean": lambda parts: sum(parts) / len(parts),
    "sum": sum,
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
    "concat": np.concatenate,
    "last": lambda parts: parts[-1],
}


def by_slices(fun, params, batch, count, reduce="infer", **kwargs):
    """`jax.value_and_grad(fun)(params, batch)` from `count` slices of the batch, with its words."""

    def step(params, batch):
        return launcher.value_and_grad(fun, reduce=reduce, **kwargs)(params, batch)

    traced = trace_step(step, (params, batch))
    loss = traced.loss(count)
    before = program([*traced.constants, *traced.invars], traced.before, traced.operands)
    given = [*traced.constants.values(), *jax.tree.leaves((params, batch))]
    operands = [cut(x, i, loss) for i, x in enumerate(jaxpr_as_fun(before)(*given))]
    sliced = jaxpr_as_fun(program(loss.invars, loss.equations, loss.outvars))

    def of(wrt, rest):
        wrt = iter(wrt)
        outs = sliced(*(next(wrt) if i in loss.wrt else x for i, x in enumerate(rest)))
        return outs[0], outs

    outs, grads = [], []
    for s in range(count):
        own = [x[s] for x in operands]
        (_, found), grad = jax.value_and_grad(of, has_aux=True)([own[i] for i in loss.wrt], own)
        outs.append(found)
        grads.append(grad)
    values = [
        COMBINE[word](parts)
        for word, parts in zip(loss.reduce, zip(*outs, strict=True), strict=True)
    ]
    summed = [COMBINE[loss.reduce[0]](parts) for parts in zip(*grads, strict=True)]
    return values, summed, loss.reduce


def cut(x, i, loss):
    """The slices of an operand."""
    axis = loss.slice_axes[i]
    if loss.keys[i]:
        folded = fold_slices(x, loss.raw_keys[i], loss.num_slices)
        return [folded[s : s + 1] for s in range(loss.num_slices)]
    return [x] * loss.num_slices if axis is None else jnp.split(x, loss.num_slices, axis)


def check(fun, params, batch, count, reduce="infer", has_aux=False, rtol=1e-5):
    """Compare; returns the words."""
    values, grads, words = by_slices(fun, params, batch, count, reduce, has_aux=has_aux)
    want, gradient = jax.value_and_grad(fun, has_aux=has_aux)(params, batch)
    for got, value in zip(values, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, value, rtol=rtol, atol=rtol)
    for got, value in zip(grads, jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(got, value, rtol=rtol, atol=rtol)
    return words
