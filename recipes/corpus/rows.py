"""Rows of a corpus: T + 1 tokens each, one behind the other, sharing one token with the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from recipes import InputError
from recipes.corpus.files import Stream

if TYPE_CHECKING:
    from recipes import Batch


@dataclass(frozen=True)
class RowMaker:
    """Makes rows of a stream of tokens.

    Row i holds the tokens from `first` + i T to that + T, as `tokens` and one later `targets`,
    int32 [rows, T]. With `packed` it also has, each [rows, T]: `segments`, int32, the number of a
    token's document in the row; `positions`, int32, its place in the document, from 0 where the
    row begins; and `weights`, float32, 0 where the target belongs to another document. With
    `masked` `weights` is also 0 where the target is not to be learned.

    Attributes:
        stream: the tokens.
        length: T.
        first: the first token.
        vocab_size: tokens are smaller.
        packed: whether attention is to keep within documents.
        masked: whether some tokens are not to be learned.
        end_token: what ends a document where the files do not tell.
    """

    stream: Stream
    length: int
    first: int
    vocab_size: int
    packed: bool = False
    masked: bool = False
    end_token: int | None = None

    def __call__(self, which: np.ndarray) -> Batch:
        """Return the rows of these numbers.

        Raises:
            InputError: a token is not in the model's vocabulary.
        """
        width = self.length + 1
        starts = [self.first + int(row) * self.length for row in which]
        tokens = np.stack([self.stream.tokens(start, width) for start in starts])
        self._check(tokens, starts)
        batch = {
            "tokens": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
        }
        weights = np.ones((len(starts), self.length), bool)
        if self.masked:
            weights &= np.stack([self.stream.learned(start, width)[1:] for start in starts])
        if self.packed:
            begins = np.stack(
                [
                    self.stream.begins(start, row, self.end_token)
                    for start, row in zip(starts, tokens, strict=True)
                ]
            )
            places = np.arange(width)
            positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            weights &= ~begins[:, 1:]
            batch["segments"] = np.cumsum(begins, axis=1)[:, :-1].astype(np.int32)
            batch["positions"] = positions[:, :-1].astype(np.int32)
        if self.packed or self.masked:
            batch["weights"] = weights.astype(np.float32)
        return batch

    def with_weights(self) -> RowMaker:
        """Return the same, whose rows have weights even if all tokens are to be learned."""
        return replace(self, masked=True)

    def _check(self, tokens: np.ndarray, starts: list[int]) -> None:
        bad = (tokens < 0) | (tokens >= self.vocab_size)
        if not bad.any():
            return
        row, place = (int(x) for x in np.argwhere(bad)[0])
        file, position = self.stream.place(starts[row] + place)
        raise InputError(
            f"{file.path}: token {position:,} is {tokens[row, place]}, which is none of "
            f"model.vocab_size={self.vocab_size}; enlarge that, or check dataset.dtype and the file"
        )


def rows_between(first: int, stop: int, length: int) -> int:
    """Return how many rows of `length` + 1 tokens, sharing one, the tokens from `first` on hold."""
    return max(0, (stop - first - 1) // length)
