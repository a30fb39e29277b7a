"""The model that the benchmarks train, as a step function, and the ways to run it serially."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from launcher.recipes import build_model
from launcher.recipes.models.gpt import GPTOptions

BATCH = 32
SIZES = GPTOptions(
    vocab_size=512,
    hidden_size=256,
    num_layers=8,
    num_heads=4,
    sequence_length=128,
    tie_embeddings=False,
).filled()
TINY = dataclasses.replace(SIZES, hidden_size=16, sequence_length=8)


class Contest:
    """A GPT with AdamW on one batch. `init(key)` makes its state."""

    def __init__(self, options: GPTOptions) -> None:
        self.model = build_model(options, "fp32")
        self.optimizer = optax.adamw(1e-3)
        rng = np.random.default_rng(0)
        shape = BATCH, options.sequence_length + 1
        text = rng.integers(0, options.vocab_size, shape, dtype=np.int32)
        self.batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}

    def init(self, key: Any) -> Any:
        """Parameters and optimizer state."""
        params = self.model.init(key)
        return params, self.optimizer.init(params)

    def loss(self, params: Any, batch: Any) -> Any:
        """As `value_and_grad(has_aux=True)` wants it."""
        return self.model.loss(params, batch, None)

    def step(self, value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
        """The step on a whole batch, with JAX's or with our `value_and_grad`."""

        def step(state: Any, batch: Any) -> Any:
            (loss, _), grads = value_and_grad(self.loss, has_aux=True)(state[0], batch)
            return self._updated(state, grads), loss

        return step

    def scanned(self, micro_batches: int) -> Callable[..., Any]:
        """The step as a scan over microbatches that adds up their gradients."""

        def step(state: Any, batch: Any) -> Any:
            split = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)

            def body(grads: Any, part: Any) -> Any:
                value_and_grad = jax.value_and_grad(self.loss, has_aux=True)
                (loss, _), new = value_and_grad(state[0], part)
                return jax.tree.map(lambda a, b: a + b / micro_batches, grads, new), loss

            zeros = jax.tree.map(lambda x: x * 0, state[0])
            grads, losses = jax.lax.scan(body, zeros, split)
            return self._updated(state, grads), losses.mean()

        return step

    def _updated(self, state: Any, grads: Any) -> Any:
        params, opt_state = state
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
