"""A small train step to cut and to plan: dense layers, with a mark between any two of them."""

import jax
import jax.numpy as jnp

import launcher
from launcher.trace import trace_step


def layered_step(shapes, rows, updated=None, scale=None, marked=True):
    """Trace the step, from shapes alone.

    Args:
        shapes: the shape of each layer's weight.
        rows: the size of the batch.
        updated: the layers whose weights the step updates, by their gradients. None: it returns the
            gradients of all.
        scale: a factor in each layer, which makes it another program; None: no such factor.
        marked: whether there are marks.
    """

    def step(params, x):
        def loss(params, x):
            for i, w in enumerate(params):
                if i and marked:
                    launcher.mark_pipeline_boundary()
                x = jnp.tanh(x @ w if scale is None else x @ w * scale)
            return (x**2).mean()

        grads = launcher.grad(loss)(params, x)
        if updated is None:
            return grads
        pairs = zip(params, grads, strict=True)
        return [w - g if i in updated else w for i, (w, g) in enumerate(pairs)]

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    batch = jax.ShapeDtypeStruct((rows, shapes[0][0]), jnp.float32)
    return trace_step(step, (params, batch))
