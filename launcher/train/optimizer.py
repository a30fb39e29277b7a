"""Builds an Optax transformation and its learning-rate schedule from the `optimizer` section.

Every optimizer is the same chain of Optax's parts: clip, scale, decay, learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from launcher.config.optimizers import Optimizer

Schedule = Callable[[Any], jax.Array]


def build_optimizer(
    options: Optimizer, total_steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """Build the optimizer that `options.name` selects, for a run of `total_steps` steps.

    Gradients are clipped to the global norm `clip_norm` (None: no clipping). Weight decay is
    decoupled and scaled by the learning rate (Loshchilov & Hutter, 2019, "Decoupled Weight Decay
    Regularization") for every optimizer. It leaves out parameters of fewer than two dimensions:
    biases and the scales of norms.

    Returns:
        The transformation, whose state is a plain Optax pytree, and the schedule: a function from
            the number of finished steps to the learning rate of the next one.
    """
    schedule = build_schedule(options, total_steps)
    scaling = _SCALINGS.get(options.scaling) or getattr(optax, options.scaling)
    parts = [scaling(**options.arguments), optax.scale_by_learning_rate(schedule)]
    if options.weight_decay:
        parts.insert(1, optax.add_decayed_weights(options.weight_decay, mask=_matrices))
    if options.clip_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(options.clip_norm))
    return optax.chain(*parts), schedule


def count_updates(opt_state: Any) -> jax.Array:
    """Return the number of updates, int32 [], in a state of a `build_optimizer` optimizer."""
    schedules = (part for part in opt_state if isinstance(part, optax.ScaleByScheduleState))
    return next(schedules).count


def build_schedule(options: Optimizer, total_steps: int) -> Schedule:
    """Build a linear warm-up to `learning_rate` and the decay to `final_learning_rate`.

    With w warm-up steps, step k (from 0) of the first w has learning rate `learning_rate * (k + 1)
    / (w + 1)`: no step is wasted on a rate of zero. The decay ends after `total_steps`; `constant`
    stays at `learning_rate`.
    """
    peak, final, warmup = options.learning_rate, options.final_learning_rate, options.warmup_steps
    shape = _DECAYS[options.decay](max(1, total_steps - warmup))
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)

    def decay(count: Any) -> Any:
        return final + (peak - final) * shape(count)

    return optax.join_schedules([rise, decay], [warmup])


# From 1 to 0 over so many steps: shapes and not rates, so that a peak of 0 is no special case.
_DECAYS: dict[str, Callable[[int], Schedule]] = {
    "constant": lambda steps: optax.constant_schedule(1.0),
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
    "linear": lambda steps: optax.linear_schedule(1.0, 0.0, steps),
}


def _scale_by_momentum(momentum: float) -> optax.GradientTransformation:
    return optax.trace(momentum)


def _scale_by_adafactor() -> optax.GradientTransformation:
    """Shazeer & Stern, 2018: update clipping at 1, steps relative to the parameter's own size."""
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


# What Optax has by another name or in several parts; by the names in `config.optimizers`.
_SCALINGS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "scale_by_momentum": _scale_by_momentum,
    "scale_by_adafactor": _scale_by_adafactor,
}


def _matrices(params: Any) -> Any:
    """Return which parameters decay: a pytree of booleans like `params`."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
