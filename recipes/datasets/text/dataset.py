"""Text as bytes: the standard library's source files, or the user's own. Vocabulary: 256 bytes.

The text is one row of bytes, cut into sequences that follow each other; each shares one byte with
the next, so that every byte but the first is predicted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from launcher.recipes import Dataset, InputError, Tokenizer
from launcher.recipes.data.batches import batches, held_out, next_token_batch
from launcher.recipes.data.corpus.tokenizers import plain_bytes
from launcher.recipes.data.files import (
    FileSlice,
    find_stdlib,
    find_text,
    fingerprint_of,
    split,
    stdlib_folder,
    total_size,
)
from launcher.recipes.data.masking import Gather, as_the_model_takes, check_takes_text
from launcher.recipes.datasets.text import VOCABULARY, StdlibText, Text


class _Text(NamedTuple):
    """The text to read: where it comes from, as the user said it, and its two parts."""

    source: str
    train: list[FileSlice]
    validation: list[FileSlice]
    left_out: str = ""


def check(options: StdlibText | Text, model_options: Any, validation: bool) -> None:
    """Refuse text that cannot be used, by the names and sizes of its files.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        validation: whether the run evaluates.

    Raises:
        InputError: the text does not fit the model, is too short, or cannot be read.
    """
    text = _find(options, model_options)
    if not validation or text.validation:
        return
    raise InputError(
        f"dataset.validation_fraction={options.validation_fraction} of {text.source} holds out no "
        f"sequence of {model_options.sequence_length} + 1 bytes to evaluate on (files are held out "
        "whole); raise it, give more text, or set train.eval_every=0"
    )


def build(
    options: StdlibText | Text, model_options: Any, global_batch_size: int, seed: int
) -> Dataset:
    """Return batches of `tokens` and `targets`, each int32 [global_batch_size, sequence_length].

    The last batch of held-out sequences holds the remaining ones. A single file is mapped into
    memory, several are read into it.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        global_batch_size: the samples of a batch.
        seed: picks the order of the training data.
    """
    text = _find(options, model_options)
    validation = None
    if text.validation:
        count, gather = _sequences(text.validation, model_options)
        validation = held_out(count, global_batch_size, gather)
    count, gather = _sequences(text.train, model_options)
    return Dataset(
        train=batches(count, global_batch_size, seed, gather),
        validation=validation,
        describe=_describe(text),
    )


def bytes_per_target(options: StdlibText | Text, model_options: Any, rows: int) -> float:
    """Return the bytes of text that a target stands for: one."""
    return 1.0


def tokenizer(options: StdlibText | Text) -> Tokenizer:
    """Return bytes as tokens."""
    return plain_bytes()


def fingerprint(options: StdlibText | Text) -> str:
    """Return a digest of the text, from samples of its files."""
    if isinstance(options, Text):
        pieces, _ = find_text(options.path, options.pattern)
    else:
        pieces = find_stdlib()
    return fingerprint_of([piece.path for piece in pieces])


def _find(options: Any, model_options: Any) -> _Text:
    check_takes_text(options, model_options, "text")
    if model_options.vocab_size < VOCABULARY:
        raise InputError(
            f"model.vocab_size={model_options.vocab_size} is too small for text read as bytes; "
            f"set model.vocab_size={VOCABULARY} or more"
        )
    left_out = ""
    if options.name == "stdlib_text":
        source, pieces = f"the standard library in {stdlib_folder()}", find_stdlib()
    else:
        source = f"dataset.path={options.path}"
        pieces, left_out = find_text(options.path, options.pattern)

    sequence = model_options.sequence_length + 1
    if total_size(pieces) < sequence:
        raise InputError(
            f"{source} holds {total_size(pieces):,} bytes, less than one sequence of "
            f"{sequence - 1} + 1 bytes; give more text or lower model.sequence_length"
        )
    parts = split(pieces, options.validation_fraction, minimum=sequence)
    text = _Text(source, *parts, left_out)
    if total_size(text.train) < sequence:
        raise InputError(
            f"dataset.validation_fraction={options.validation_fraction} leaves "
            f"{total_size(text.train):,} bytes of {source} for training, less than one sequence "
            f"of {sequence - 1} + 1 bytes; lower it"
        )
    return text


def _sequences(pieces: Sequence[FileSlice], model: Any) -> tuple[int, Gather]:
    """Return how many sequences the text holds, and what makes a batch of some of them."""
    length = model.sequence_length
    windows = np.lib.stride_tricks.sliding_window_view(_read(pieces), length + 1)[::length]
    return len(windows), as_the_model_takes(model, lambda which: next_token_batch(windows[which]))


def _read(pieces: Sequence[FileSlice]) -> np.ndarray:
    """Return the bytes of `pieces` in a row, uint8; a single one stays on disk until it is used."""
    if len(pieces) == 1:
        (piece,) = pieces
        return np.memmap(piece.path, np.uint8, "r", offset=piece.start, shape=piece.size)
    # Read, not mapped: a mapping keeps its file open, and there may be thousands.
    return np.concatenate(
        [np.fromfile(p.path, np.uint8, count=p.size, offset=p.start) for p in pieces]
    )


def _describe(text: _Text) -> str:
    pieces = text.train + text.validation
    files, size = len({piece.path for piece in pieces}), total_size(pieces)
    held_out = f"{total_size(text.validation):,} bytes"
    if not text.validation:
        how = "none of it held out"
    elif files == 1:
        how = f"its last {held_out} held out for validation"
    else:
        how = f"{len(text.validation)} of them ({held_out}) held out for validation"
    said = f"{text.source}: {files} file{'s' if files > 1 else ''}, {size:,} bytes, {how}"
    return said + text.left_out
