"""Numbered batches over shuffled samples, with Grain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from launcher.recipes.protocols import Batch, Batches


def batches(
    num_samples: int, batch_size: int, seed: int, gather: Callable[[np.ndarray], Batch]
) -> Batches:
    """Return endless batches, of which batch k is a pure function of `seed` and k.

    Samples 0 … `num_samples` - 1 are put in a new order for each pass over them; batches are cut
    from the endless sequence of passes, so no sample is left out.

    Args:
        num_samples: the number of samples; may be smaller than `batch_size`.
        batch_size: the samples of a batch.
        seed: picks the order of each pass.
        gather: turns sample numbers, int64 [rows], into rows, one or more of a batch's.
    """

    @functools.cache
    def passes() -> Any:
        import grain  # here: checking a dataset must not import JAX, nor planning Grain and Orbax

        # Grain derives the order of each pass from the seed and the number of the pass.
        one = grain.MapDataset.range(num_samples).seed(seed).shuffle()
        return one.repeat().batch(batch_size)

    return Batches(lambda k: passes()[k], gather, a_sample=0)


def held_out(
    num_samples: int, batch_size: int, gather: Callable[[np.ndarray], Batch]
) -> Batches | None:
    """Return batches for evaluation that hold each sample once, in the same order for every run.

    Args:
        num_samples: the number of samples; the last batch holds the remaining ones. 0: there are
            no batches, None.
        batch_size: the samples of every other batch.
        gather: as in `batches`.
    """
    if not num_samples:
        return None
    shuffled = batches(num_samples, batch_size, 0, gather).numbers

    def numbers(k: int) -> np.ndarray:
        return shuffled(k)[: max(0, num_samples - k * batch_size)]

    return Batches(numbers, gather, num_samples, a_sample=0)


def next_token_batch(sequences: np.ndarray) -> Batch:
    """Return inputs and, one position later, targets.

    Args:
        sequences: T + 1 tokens each, integer [B, T + 1].

    Returns:
        `tokens` and `targets`, each int32 [B, T].
    """
    return {
        "tokens": sequences[:, :-1].astype(np.int32),
        "targets": sequences[:, 1:].astype(np.int32),
    }
