"""Loss spikes: how far a step's loss and gradient norm are above those of the steps before.

The score is a z-score of medians, which a spike among the steps before hardly moves (Iglewicz and
Hoaglin, How to Detect and Handle Outliers, 1993). It is of logarithms, as losses and norms vary by
factors. The noise is taken from the differences of successive steps (von Neumann, Annals of
Mathematical Statistics 12, 1941), so that neither a fall of the loss nor a restart of the rate
counts as noise. The scores of the loss and of the norm, which rise together in a spike, are added
(Stouffer's method).

It is computed on the devices, from the state: all processes come to the same decision, and a run
that resumes to that of one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp

WINDOW = 200  # steps
LIMIT = 8.0  # a score above it is a spike
LAG = 3  # a spike shows within so many steps, the first of them that of the batch that did it
_NEAR = 20  # the newest steps, whose median is the level; with fewer, nothing is a spike
_NEAREST = 5  # the same where it rises, as after a restart of the rate
_TO_DEVIATION = 1.4826 / 2**0.5  # times the median of differences: the deviation, of normal noise
# The least deviation. Noise that is smaller, as where all batches are alike, would make a spike of
# a slight rise.
_LEAST = 0.05


def no_steps() -> jax.Array:
    """Return the record of no steps: NaN, float32 [2, WINDOW]."""
    return jnp.full((2, WINDOW), jnp.nan, jnp.float32)


def spike_score(recent: jax.Array, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a step's score, and the record with the step.

    With x the logarithm of the loss, m the larger one of the medians of the newest 20 and of the
    newest 5 x_i, and d_i = x_i - x_(i-1), it is
    z = (x - m) / max(1.4826 / sqrt(2) median|d_i - median d|, 0.05), of the norm likewise; the
    score is the sum of both / sqrt(2). What has no logarithm, such as a loss of 0, adds 0.

    Args:
        recent: the logarithms of the newest steps' losses and gradient norms, the oldest first,
            float32 [2, WINDOW]; NaN where none is known.
        loss: the step's, [].
        norm: its gradient's, [].

    Returns:
        The score, float32 [], 0 while it is not known; and the new record.
    """
    found = jnp.stack([loss, norm]).astype(jnp.float32)[:, None]
    newest = jnp.log(jnp.where(found > 0, found, jnp.nan))
    near, steps = recent[:, -_NEAR:], recent[:, 1:] - recent[:, :-1]
    deviation = _TO_DEVIATION * _median(jnp.abs(steps - _median(steps)))
    level = jnp.maximum(_median(near), _median(recent[:, -_NEAREST:]))
    scores = (newest - level) / jnp.maximum(deviation, _LEAST)
    is_known = ~jnp.any(jnp.isnan(near), axis=1, keepdims=True) & ~jnp.isnan(scores)
    score = jnp.sum(jnp.where(is_known, scores, 0.0)) / 2**0.5
    return score, jnp.concatenate([recent[:, 1:], newest], axis=1)


def batch_index(start: int, count: int, passed: Collection[int]) -> int:
    """Return the index of a batch among those that are not passed over.

    Args:
        start: an index.
        count: how many batches after that one, or before if below 0; 0 is the first from there on.
        passed: the indices of the batches that are passed over.
    """
    index = start + count
    for each in sorted(each for each in passed if each >= start):
        index += each <= index
    for each in sorted((each for each in passed if each < start), reverse=True):
        index -= each >= index
    return index


def _median(values: jax.Array) -> jax.Array:
    """Return the lower median of each row's values but NaN, [rows, 1]."""
    return jnp.nanquantile(values, 0.5, axis=1, method="lower", keepdims=True)
