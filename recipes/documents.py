"""Documents that `task=prepare_data` has tokenised: rows of the tokens it wrote."""

from __future__ import annotations

from typing import Any

from recipes import Dataset, InputError, tokens
from recipes.corpus.prepare import Preparation, up_to_date
from recipes.corpus.tokenizers import Tokenizer, load_tokenizer
from recipes.documents_options import Documents
from recipes.tokens_options import Tokens


def check(options: Documents, model_options: Any, validation: bool) -> None:
    """Refuse documents that are not tokenised, or tokens that cannot be used.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        validation: whether the run evaluates.

    Raises:
        InputError: the tokens are not there, are those of another source or tokenizer, or do not
            fit the model.
    """
    work = preparation(options)
    if up_to_date(work) is None:
        there = work.folder.is_dir()
        what = "are those of another source or other settings" if there else "are not made yet"
        raise InputError(
            f"the tokens of dataset.path={options.path} {what} ({options.folder}); run this "
            "command with task=prepare_data first"
        )
    tokens.check(_tokens(options), model_options, validation)


def build(options: Documents, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return batches of the tokens, as `dataset=tokens` makes them.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        global_batch_size: the samples of a batch.
        seed: picks the order of the training data.
    """
    return tokens.build(_tokens(options), model_options, global_batch_size, seed)


def fingerprint(options: Documents) -> str:
    """Return a digest of the tokens."""
    return tokens.fingerprint(_tokens(options))


def tokenizer(options: Documents) -> Tokenizer:
    """Return the tokenizer that the settings name."""
    return load_tokenizer(options.tokenizer)


def preparation(options: Documents) -> Preparation:
    """Return what `task=prepare_data` is to do."""
    return Preparation(
        path=options.path,
        pattern=options.pattern,
        format=options.format,
        field=options.field,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        bad=options.bad,
        tokens=options.folder,
    )


def _tokens(options: Documents) -> Tokens:
    return Tokens(
        path=options.folder,
        packing=options.packing,
        validation_fraction=options.validation_fraction,
    )
