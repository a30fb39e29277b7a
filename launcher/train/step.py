"""The train step and the evaluation step: pure functions of the state and a batch.

Plain JAX, as for one device; that they run as a pipeline is somebody else's business. `program`
traces them, in the driver and in each worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

import launcher
from launcher.train.optimizer import Schedule

if TYPE_CHECKING:
    from recipes import Batch, Model

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training changes, and its random seed.

    Attributes:
        step: finished steps, int32 [].
        params: the model's parameters. opt_state: the optimizer's state.
        key: `jax.random.key_data` of the run's random key, uint32. The bits and not a typed key, so
            that every leaf is a plain array to whoever moves or stores the state.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def init_state(
    model: Model, optimizer: optax.GradientTransformation, key_data: jax.Array
) -> TrainState:
    """The state before the first step. `key_data` is uint32, from `jax.random.key_data`."""
    init_key, step_key = jax.random.split(jax.random.wrap_key_data(key_data))
    params = model.init(init_key)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=jax.random.key_data(step_key),
    )


def make_train_step(
    model: Model, optimizer: optax.GradientTransformation, schedule: Schedule
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A function `(state, batch) -> (state, metrics)`.

    `metrics` holds the float32 scalars `loss`, `grad_norm` (before clipping), `learning_rate` and
    what the model adds. The dropout key is a function of the run's key and the step's number, so
    a resumed run draws what an undisturbed one would have.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        value_and_grad = launcher.value_and_grad(model.loss, has_aux=True)
        (loss, extra), grads = value_and_grad(state.params, batch, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            **extra,
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        }
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    return train_step


def make_eval_step(model: Model) -> Callable[[Any, Batch], Metrics]:
    """A function `(params, batch) -> metrics`: `loss` and what the model adds, without dropout."""

    def evaluate(params: Any, batch: Batch) -> Metrics:
        loss, extra = model.loss(params, batch, None)
        return {**extra, "loss": loss}

    return launcher.microbatched(evaluate)
