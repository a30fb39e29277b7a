"""The train step and the evaluation step: pure functions of the state and a batch.

Plain JAX, written as for one device; the launcher makes a pipeline of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

import launcher
from launcher.train.optimizer import Schedule, count_updates
from recipes import InputError

if TYPE_CHECKING:
    from recipes import Batch, Model

Metrics = dict[str, jax.Array]
_OWN_METRICS = ("loss", "grad_norm", "learning_rate", "skipped")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training, with its random key.

    Attributes:
        step: the number of finished steps, int32 [].
        params: the model's parameters.
        opt_state: the optimizer's state.
        key: `jax.random.key_data` of the run's random key, uint32. It holds the bits and not a
            typed key, so that every leaf is a plain array to store and to move.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def init_state(
    model: Model, optimizer: optax.GradientTransformation, key_data: jax.Array
) -> TrainState:
    """Return the state before the first step; `key_data` is uint32, from `jax.random.key_data`."""
    init_key, step_key = jax.random.split(jax.random.wrap_key_data(key_data))
    params = model.init(init_key)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=jax.random.key_data(step_key),
    )


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    skip_non_finite: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return a function `(state, batch) -> (state, metrics)`.

    `metrics` holds the float32 scalars `loss`, `grad_norm` (before clipping), `learning_rate` and
    those that the model adds. The dropout key is a function of the run's key and the step's number,
    so a resumed run draws the same numbers as one that was never interrupted.

    Args:
        model: the model, with its loss.
        optimizer: an optimizer of `build_optimizer`.
        schedule: its learning-rate schedule.
        skip_non_finite: whether a step with a loss or gradient norm that is not finite leaves the
            parameters and the optimizer's state unchanged, its count of updates included: the next
            step then has the learning rate of this one. `metrics` then also holds `skipped`, 0 or
            1.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        value_and_grad = launcher.value_and_grad(_checked(model), has_aux=True)
        (loss, extra), grads = value_and_grad(state.params, batch, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norm, updates_done = optax.tree.norm(grads), state.step
        if skip_non_finite:
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            before = state.params, state.opt_state
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), (params, opt_state), before
            )
            extra = {**extra, "skipped": 1.0 - finite.astype(jnp.float32)}
            updates_done = count_updates(state.opt_state)
        metrics = {
            **extra,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(updates_done), jnp.float32),
        }
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    return train_step


def make_eval_step(model: Model) -> Callable[[Any, Batch], Metrics]:
    """Return a function `(params, batch) -> metrics`, without dropout.

    `metrics` holds `loss` and what the model adds.
    """

    def evaluate(params: Any, batch: Batch) -> Metrics:
        loss, extra = _checked(model)(params, batch, None)
        return {**extra, "loss": loss}

    return launcher.microbatched(evaluate)


def _checked(model: Model) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Return the model's loss with a check of what it returns, made while it is traced.

    It must return `(loss, metrics)`: a number, and a dict of numbers whose names are not the
    launcher's own. Otherwise the returned function raises InputError.
    """

    def loss(params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        out = model.loss(params, batch, key)
        if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[1], dict):
            raise InputError(
                "the model's loss must return (loss, metrics), one number and a dict of further "
                f"ones, maybe an empty one; it returns {_in_words(out)}"
            )
        for name, value in {"the loss": out[0], **out[1]}.items():
            if not jax.tree_util.all_leaves([value]) or value is None or jnp.shape(value):
                metric = name if value is out[0] else f"its metric {name!r}"
                raise InputError(
                    f"the model's loss must return numbers; {metric} is {_in_words(value)}: "
                    "take its mean, or leave it out"
                )
        if taken := [name for name in out[1] if name in _OWN_METRICS]:
            raise InputError(
                f"the model's loss gives a metric the name {taken[0]!r}, which the launcher's own "
                "has; choose another"
            )
        return out

    return loss


def _in_words(value: Any) -> str:
    """Return the type and the shape of what a loss returned, in words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
