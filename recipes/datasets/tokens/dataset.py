"""Tokens on disk: a corpus that `task=prepare_data` wrote, or `.bin` and `.npy` files."""

from __future__ import annotations

from typing import Any, NamedTuple

from launcher.recipes import Dataset, InputError, Tokenizer
from launcher.recipes.data.batches import batches, held_out
from launcher.recipes.data.corpus.files import Corpus, find_corpus
from launcher.recipes.data.corpus.rows import RowMaker, rows_between
from launcher.recipes.data.corpus.tokenizers import load_tokenizer
from launcher.recipes.data.masking import as_the_model_takes, check_takes_text
from launcher.recipes.data.skipping import Skipping
from launcher.recipes.datasets.tokens import Tokens


class TokenRanges(NamedTuple):
    """Which tokens are for training and which are held out, a corpus and a range for each."""

    train: Corpus
    train_stop: int
    validation: Corpus
    validation_start: int

    @property
    def mask_token(self) -> int | None:
        """The mask of the tokenizer that made them; None: it has none, or is not known."""
        return self.train.meta.mask_token if self.train.meta is not None else None


def check(options: Tokens, model_options: Any, validation: bool) -> None:
    """Refuse token files that cannot be used, by their names, sizes and headers.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        validation: whether the run evaluates.

    Raises:
        InputError: the files do not fit the model, hold too little, or cannot be read.
    """
    ranges = find_ranges(options, model_options)
    length = model_options.sequence_length
    held = rows_between(ranges.validation_start, ranges.validation.count, length)
    if validation and not held:
        raise InputError(
            f"dataset.validation_fraction={options.validation_fraction} of {ranges.train.source} "
            f"holds out no example of {length} + 1 tokens to evaluate on; raise it, name held-out "
            "tokens with dataset.validation_path, or set train.eval_every=0"
        )


def build(options: Tokens, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return batches as `RowMaker` makes them, of `model_options.sequence_length` tokens a row.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        global_batch_size: the samples of a batch.
        seed: picks the order of the training data.
    """
    ranges = find_ranges(options, model_options)
    makers = [
        as_the_model_takes(model_options, maker, ranges.mask_token)
        for maker in row_makers(options, model_options, ranges)
    ]
    length = model_options.sequence_length
    count = rows_between(0, ranges.train_stop, length)
    held = rows_between(ranges.validation_start, ranges.validation.count, length)
    return Dataset(
        train=batches(count, global_batch_size, seed, makers[0]),
        validation=held_out(held, global_batch_size, makers[1]),
        describe=_describe(ranges, count, held),
    )


def fingerprint(options: Tokens) -> str:
    """Return a digest of the tokens, from the folder's own or from samples of the files."""
    paths = [path for path in (options.path, options.validation_path) if path is not None]
    corpora = (find_corpus(path, options.dtype, options=options) for path in paths)
    return " ".join(corpus.fingerprint for corpus in corpora)


def bytes_per_target(options: Tokens, model_options: Any, rows: int) -> float | None:
    """Return the mean bytes of text that a target of the first held-out rows stands for.

    None where that is not known, or some tokens are not predicted.
    """
    ranges = find_ranges(options, model_options)
    meta = ranges.validation.meta
    if meta is None or meta.masked or options.packing == "documents":
        return None
    count = rows * model_options.sequence_length
    size = ranges.validation.text_bytes(ranges.validation_start + 1, count)
    return None if size is None else size / count


def tokenizer(options: Tokens) -> Tokenizer:
    """Return the tokenizer that the folder names; raises InputError where it names none."""
    meta = find_corpus(options.path, options.dtype, options=options).meta
    if meta is None:
        raise InputError(
            f"dataset.path={options.path} does not say by which tokenizer its tokens were made; "
            "prepare the corpus with task=prepare_data"
        )
    made = load_tokenizer(meta.tokenizer)
    if made.fingerprint != meta.tokenizer_fingerprint:
        raise InputError(
            f"dataset.path={options.path} was made by another tokenizer than the one that "
            f"{meta.tokenizer} is now; put the file back"
        )
    return made


def find_ranges(options: Tokens, model_options: Any, key: str = "dataset.path") -> TokenRanges:
    """Find the files and split their tokens.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        key: the setting that names the files.

    Raises:
        InputError: they do not fit the model.
    """
    check_takes_text(options, model_options, "tokens")
    corpus = find_corpus(options.path, options.dtype, key, options)
    _check_fit(corpus, options, model_options)
    if options.validation_path is not None:
        of = "dataset.validation_path"
        held = find_corpus(options.validation_path, options.dtype, of, options)
        _check_fit(held, options, model_options)
        ranges = TokenRanges(corpus, corpus.count, held, 0)
    else:
        stop = corpus.count - int(options.validation_fraction * corpus.count)
        ranges = TokenRanges(corpus, stop, corpus, stop)
    length = model_options.sequence_length
    if not rows_between(0, ranges.train_stop, length):
        raise InputError(
            f"{corpus.source} holds {ranges.train_stop:,} tokens for training, less than one "
            f"example of {length} + 1 tokens; give more, or lower model.sequence_length"
        )
    return ranges


def row_makers(
    options: Tokens, model_options: Any, ranges: TokenRanges
) -> tuple[RowMaker, RowMaker]:
    """Return what makes rows for training and what makes held-out ones."""
    corpora = (ranges.train, ranges.validation)
    masked = any(corpus.meta is not None and corpus.meta.masked for corpus in corpora)
    length = model_options.sequence_length

    def maker(corpus: Corpus, first: int, stop: int) -> RowMaker:
        skips = options.bad == "skip"
        return RowMaker(
            corpus,
            length,
            first,
            vocab_size=model_options.vocab_size,
            packed=options.packing == "documents",
            masked=masked,
            end_token=options.end_token,
            skipping=Skipping(rows_between(first, stop, length), "examples") if skips else None,
        )

    train, held = maker(ranges.train, 0, ranges.train_stop), ranges.validation
    return train, maker(held, ranges.validation_start, held.count)


def check_vocabulary(source: str, vocab_size: int, model_options: Any) -> None:
    """Raise InputError if a model takes no tokens, or not as many as there are.

    Args:
        source: the data or tokenizer, in words.
        vocab_size: the number of its tokens.
        model_options: the model's settings.
    """
    wanted = getattr(model_options, "vocab_size", None)
    if wanted is not None and vocab_size > wanted:
        raise InputError(
            f"{source} has {vocab_size:,} tokens, more than model.vocab_size={wanted}; set "
            f"model.vocab_size={vocab_size} or more"
        )


def _check_fit(corpus: Corpus, options: Tokens, model_options: Any) -> None:
    meta = corpus.meta
    if meta is not None:
        made = f"{corpus.source}, made by {meta.tokenizer},"
        check_vocabulary(made, meta.vocab_size, model_options)
    if meta is None and options.packing == "documents" and options.end_token is None:
        raise InputError(
            f"{corpus.source} does not say where documents end; set dataset.end_token (GPT-2's is "
            "50256), or prepare the corpus with task=prepare_data"
        )


def _describe(ranges: TokenRanges, count: int, held: int) -> str:
    corpus = ranges.train
    files, end = len(corpus.files), f"{held:,} examples held out for validation"
    size = f"{corpus.count:,} tokens"
    size += f", {corpus.meta.documents:,} documents" if corpus.meta is not None else ""
    return (
        f"{corpus.source}: {files} file{'s' if files > 1 else ''}, {size}; "
        f"{count:,} examples, {end if held else 'none held out'}{corpus.left_out}"
    )
