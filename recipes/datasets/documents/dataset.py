"""Documents, tokenised once before the training: rows of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.recipes import Dataset, InputError, Tokenizer
from launcher.recipes.data.corpus.tokenizers import load_tokenizer
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus, sources_of, up_to_date
from launcher.recipes.datasets.tokens import Tokens
from launcher.recipes.datasets.tokens import dataset as tokens


def check(options: Documents, model_options: Any, validation: bool) -> None:
    """Refuse documents that cannot be tokenised, or tokens that cannot be used.

    Documents that are still to be tokenised, which a training does first, are only looked for.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        validation: whether the run evaluates.

    Raises:
        InputError: there are no documents, or no such tokenizer; or the tokens do not fit the
            model.
    """
    if up_to_date(options) is not None:
        tokens.check(_tokens(options), model_options, validation)
        return
    sources_of(options)
    tokens.check_vocabulary(
        f"dataset.tokenizer={options.tokenizer}",
        load_tokenizer(options.tokenizer).vocab_size,
        model_options,
    )


def is_prepared(options: Documents) -> bool:
    """Return whether the tokens are there, made of these very documents by these settings."""
    return up_to_date(options) is not None


def prepare(options: Documents, processes: int, progress: Callable[[float], None]) -> str:
    """Tokenize the documents that are not tokenized yet; see `prepare_corpus`.

    Returns:
        What there is now and what is not read, in a line, and before it which were bad.
    """
    meta = prepare_corpus(options, processes, progress)
    bad = next((part.first_bad for part in meta.parts if part.first_bad), "")
    left_out = f"left out: {_several(meta.skipped, 'bad document')}, first {bad}\n"
    return (
        f"{left_out if meta.skipped else ''}{_several(meta.documents, 'document')}, "
        f"{meta.tokens:,} tokens of {meta.vocab_size:,} are in {options.folder}"
        f"{sources_of(options)[1].left_out}"
    )


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def build(options: Documents, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return batches of the tokens, as `dataset=tokens` makes them.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        global_batch_size: the samples of a batch.
        seed: picks the order of the training data.

    Raises:
        InputError: the tokens are not there, or are those of another source or tokenizer.
    """
    if up_to_date(options) is None:
        there = Path(options.folder).expanduser().is_dir()
        what = "are those of another source or other settings" if there else "are not made yet"
        raise InputError(
            f"the tokens of dataset.path={options.path} {what} ({options.folder}); run this "
            "command with task=prepare_data first"
        )
    return tokens.build(_tokens(options), model_options, global_batch_size, seed)


def fingerprint(options: Documents) -> str:
    """Return a digest of the tokens."""
    return tokens.fingerprint(_tokens(options))


def bytes_per_target(options: Documents, model_options: Any, rows: int) -> float | None:
    """Return the bytes of text of a held-out target; as of tokens."""
    return tokens.bytes_per_target(_tokens(options), model_options, rows)


def tokenizer(options: Documents) -> Tokenizer:
    """Return the tokenizer that the settings name."""
    return load_tokenizer(options.tokenizer)


def _tokens(options: Documents) -> Tokens:
    return Tokens(
        path=options.folder,
        packing=options.packing,
        validation_fraction=options.validation_fraction,
    )
