"""The train step: a pure function of the state and a batch.

Plain JAX, written as for one device; the launcher makes a pipeline of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from launcher.checkpoint.train_state import Picks, TrainState, rejoined, split_named
from launcher.recipes.checked_model import checked_loss, checked_optimizer, init_model
from launcher.trace import arrays_only, value_and_grad
from launcher.train.optimizer import Schedule, count_updates
from launcher.train.spikes import LIMIT, no_steps, spike_score

if TYPE_CHECKING:
    from launcher.recipes import Batch, Model


def init_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    key_data: jax.Array,
    learns: Picks | None = None,
    averages: bool = False,
    watches: bool = False,
) -> TrainState:
    """Return the state before the first step.

    Args:
        model: the model.
        optimizer: the optimizer.
        key_data: uint32, from `jax.random.key_data`.
        learns: which parameters learn; None: all.
        averages: whether an average of the parameters is kept.
        watches: whether steps are scored, to find spikes.
    """
    init_key, step_key = jax.random.split(jax.random.wrap_key_data(key_data))
    params, model_state = init_model(model, init_key)
    learning = split_named(params, learns)[0] if learns else params
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=arrays_only(optimizer.init, optimizer.init(learning)),
        key=jax.random.key_data(step_key),
        model_state=model_state,
        ema=jax.tree.map(jnp.copy, learning) if averages else None,
        recent=no_steps() if watches else None,
    )


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    skip_non_finite: bool = False,
    learns: Picks | None = None,
    ema: float | None = None,
    spikes: str = "off",
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """Return a function `(state, batch) -> (state, metrics)`.

    `metrics` holds the float32 scalars `loss`, `grad_norm` (before clipping), `learning_rate` and
    those that the model adds. The dropout key is a function of the run's key and the step's number,
    so a resumed run draws the same numbers as one that was never interrupted.

    Args:
        model: the model, with its loss.
        optimizer: an optimizer of `build_optimizer`.
        schedule: its learning-rate schedule.
        skip_non_finite: whether a step with a loss or gradient norm that is not finite leaves the
            parameters, the model's state and the optimizer's state unchanged, its count of updates
            included: the next step then has the learning rate of this one. `metrics` then also
            holds `skipped`, 0 or 1.
        learns: which parameters learn; None: all. The others have no gradient.
        ema: the decay of an average of the parameters; None: none is kept.
        spikes: `train.spikes`. Unless it is "off", `metrics` holds `spike_score`, and the state the
            steps that it is of; "skip" leaves the state as `skip_non_finite` does, at a score above
            `LIMIT`.
    """
    model_loss, (update, rate) = checked_loss(model), checked_optimizer(optimizer, schedule)

    @functools.wraps(model.loss, updated=())
    def loss_of(learning: Any, fixed: Any, *rest: Any) -> Any:
        return model_loss(rejoined(learning, fixed) if learns else learning, *rest)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        learning, fixed = split_named(state.params, learns) if learns else (state.params, None)
        gradient = value_and_grad(loss_of, has_aux=True)
        out, grads = gradient(learning, fixed, state.model_state, batch, key)
        loss, (extra, model_state) = out
        updates, opt_state = update(grads, state.opt_state, learning, loss)
        params = optax.apply_updates(learning, updates)
        average = state.ema
        if ema is not None:
            average = jax.tree.map(lambda old, x: ema * old + (1 - ema) * x, state.ema, params)
        norm, updates_done, recent = optax.tree.norm(grads), state.step, state.recent
        takes = []
        if skip_non_finite:
            takes.append(jnp.isfinite(loss) & jnp.isfinite(norm))
        if spikes != "off":
            score, recent = spike_score(state.recent, loss, norm)
            extra = {**extra, "spike_score": score}
        if spikes == "skip":
            takes.append(score <= LIMIT)
        if takes:
            is_taken = functools.reduce(jnp.logical_and, takes)
            new = params, opt_state, model_state, average, recent
            before = learning, state.opt_state, state.model_state, state.ema, state.recent
            params, opt_state, model_state, average, recent = jax.tree.map(
                lambda new, old: jnp.where(is_taken, new, old), new, before
            )
            extra = {**extra, "skipped": 1.0 - is_taken.astype(jnp.float32)}
            counted = count_updates(state.opt_state)
            updates_done = state.step if counted is None else counted
        metrics = {**extra, "loss": loss, "grad_norm": norm, "learning_rate": rate(updates_done)}
        params = rejoined(params, fixed) if learns else params
        parts = params, opt_state, state.key, model_state, average, recent
        return TrainState(state.step + 1, *parts), metrics

    return train_step
