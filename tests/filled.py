"""A network's first parameters where their values do not matter: threefry would compile longest."""

import jax
import numpy as np


def filled(shapes, std=None):
    """Parameters of these shapes, of this deviation or about as large as an initializer's."""
    rng = np.random.default_rng(0)

    def of(path, x):
        last = jax.tree_util.keystr(path[-1:])
        if x.ndim > 1:
            return (rng.normal(size=x.shape) * (std or x.shape[-2] ** -0.5)).astype(x.dtype)
        if "scale" in last or "var" in last:
            return np.ones(x.shape, x.dtype)
        return np.zeros(x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(of, shapes)


def filled_params(model, std=None):
    """A model's first parameters."""
    return filled(jax.eval_shape(model.init, jax.random.key(0)), std)
