"""Rows of a corpus: T + 1 tokens each, one behind the other, sharing one token with the next."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from launcher.recipes.data.batches import next_token_batch
from launcher.recipes.data.corpus.files import Corpus
from launcher.recipes.data.skipping import BadSampleError, Skipping
from launcher.recipes.protocols import Batch, InputError


@dataclass(frozen=True)
class RowMaker:
    """Makes rows of a corpus.

    Row i holds the tokens from `first` + i T to that + T, as `tokens` and one later `targets`,
    int32 [rows, T]. With `packed` it also has, each [rows, T]: `segments`, int32, the number of a
    token's document in the row; `positions`, int32, its place in the document, from 0 where the
    row begins; and `weights`, float32, 0 where the target belongs to another document. With
    `masked` `weights` is also 0 where the target is not to be learned.

    Attributes:
        corpus: the tokens.
        length: T.
        first: the first token.
        vocab_size: tokens are smaller.
        packed: whether attention is to keep within documents.
        masked: whether some tokens are not to be learned, or rows are to have weights all the same.
        end_token: what ends a document in files without ends.
        skipping: has another row in the place of one with a token outside the vocabulary; None:
            such a row is refused.
    """

    corpus: Corpus
    length: int
    first: int
    vocab_size: int
    packed: bool = False
    masked: bool = False
    end_token: int | None = None
    skipping: Skipping | None = None

    def __call__(self, which: np.ndarray) -> Batch:
        """Return the rows of these numbers.

        Raises:
            InputError: a token is not in the model's vocabulary.
        """
        width = self.length + 1
        read = self._row if self.skipping is None else functools.partial(self.skipping, self._row)
        try:
            rows = [*self.corpus.access.each(read, map(int, which))]
        except BadSampleError as error:
            raise InputError(
                f"{error}; enlarge that, check dataset.dtype and the file, or leave such examples "
                "out with dataset.bad=skip"
            ) from None
        batch = next_token_batch(np.array([row[0] for row in rows], np.int64).reshape(-1, width))
        weights = np.array([row[1] for row in rows], bool).reshape(-1, width)[:, 1:]
        if self.packed:
            begins = np.array([row[2] for row in rows], bool).reshape(-1, width)
            places = np.arange(width)
            positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            weights &= ~begins[:, 1:]
            batch["segments"] = np.cumsum(begins, axis=1)[:, :-1].astype(np.int32)
            batch["positions"] = positions[:, :-1].astype(np.int32)
        if self.packed or self.masked:
            batch["weights"] = weights.astype(np.float32)
        return batch

    def _row(self, number: int) -> tuple[np.ndarray, ...]:
        """Return a row's tokens, which are to be learned, and where documents begin if `packed`.

        Raises:
            BadSampleError: a token is not in the model's vocabulary.
        """
        start, width = self.first + number * self.length, self.length + 1
        tokens = self.corpus.tokens(start, width)
        bad = (tokens < 0) | (tokens >= self.vocab_size)
        if not bad.any():
            learned = self.corpus.learned(start, width) if self.masked else np.ones(width, bool)
            if not self.packed:
                return tokens, learned
            return tokens, learned, self.corpus.begins(start, tokens, self.end_token)
        place = int(bad.argmax())
        file, position = self.corpus.place(start + place)
        raise BadSampleError(
            f"{file.path}: token {position:,} is {tokens[place]}, which is outside "
            f"model.vocab_size={self.vocab_size}"
        )


def rows_between(first: int, stop: int, length: int) -> int:
    """Return how many rows of `length` + 1 tokens, sharing one, the tokens from `first` on hold."""
    return max(0, (stop - first - 1) // length)
