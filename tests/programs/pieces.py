"""What most programs are made of: a network of two layers, a batch whose slices differ, a step.

A batch's rows grow in size, its masks are uneven (a slice of the masks holds nothing but zeros) and
labels come in runs, so that a slice's own mean, count or largest is far from the whole batch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from programs.program import ROWS, Program

import launcher

WIDTH, HIDDEN, CLASSES = 6, 8, 4
LEARNING_RATE = 0.02


def normal(seed: int, *shape: int) -> np.ndarray:
    """Numbers of a fixed draw, about as large as an initializer's."""
    rng = np.random.default_rng(seed)
    scale = np.sqrt(shape[-2]) if len(shape) > 1 else 1.0
    return (rng.normal(size=shape) / scale).astype(np.float32)


def params() -> dict[str, np.ndarray]:
    """The network's weights, and numbers that a few losses learn."""
    return {
        "a": normal(1, WIDTH, HIDDEN),
        "b": normal(2, HIDDEN, CLASSES),
        "log": np.array([0.3, -0.2], np.float32),
    }


def batch(k: int) -> dict[str, np.ndarray]:
    """The k-th batch."""
    rng = np.random.default_rng(100 + k)
    size = np.linspace(0.2, 1.5, ROWS)[:, None]
    mask = (rng.uniform(size=ROWS) < 0.6).astype(np.float32)
    mask[4 * k : 4 * k + 4] = 0  # of four slices one has no weight
    mask[15 - k] = 1
    return {
        "x": (size * rng.normal(size=(ROWS, WIDTH))).astype(np.float32),
        "t": (size * rng.normal(size=(ROWS, CLASSES))).astype(np.float32),
        "label": np.sort(rng.integers(0, CLASSES, ROWS)).astype(np.int32),
        "mask": mask,
        "weight": np.linspace(0.1, 2, ROWS, dtype=np.float32) ** 2,
        "number": np.arange(ROWS, dtype=np.int32) + ROWS * k,
    }


def net(p: Any, b: Any) -> jax.Array:
    """`[rows, CLASSES]`, by two layers."""
    h = jnp.tanh(b["x"] @ p["a"])
    launcher.mark_pipeline_boundary()
    return h @ p["b"]


def losses(p: Any, b: Any) -> jax.Array:
    """The cross-entropy of each row."""
    return optax.softmax_cross_entropy_with_integer_labels(net(p, b), b["label"])


def decay(p: Any) -> jax.Array:
    """A term without examples."""
    return 0.1 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


def descended(params: Any, grads: Any) -> Any:
    """The parameters after a step of gradient descent."""
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)


def rows(b: Any) -> int:
    """How many rows the batch, or a slice of it, has."""
    return len(b["x"])


def of_loss(
    fun: Callable[..., Any], has_aux: bool = False, reduce: Any = None, **options: Any
) -> Program:
    """A program of a loss `fun(params, batch)` by gradient descent.

    `options` are those of `Program`; `has_aux` and `reduce` those of `launcher.value_and_grad`.
    """

    def build(value_and_grad: Any) -> Any:
        own = value_and_grad is launcher.value_and_grad and reduce is not None
        words = {"reduce": reduce} if own else {}

        def step(state: Any, batch: Any) -> Any:
            found, grads = value_and_grad(fun, has_aux=has_aux, **words)(state, batch)
            return descended(state, grads), {"found": found, "grads": grads}

        return step

    return Program(params, build, batch, **options)
