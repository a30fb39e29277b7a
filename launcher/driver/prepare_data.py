"""`task=prepare_data` and `task=tokenize`: tokens, and a tokenizer, of the user's documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.report.console import status

if TYPE_CHECKING:
    from recipes.documents_options import Documents


def prepare_data(config: Config, console: Console) -> int:
    """Tokenise the documents of `dataset`, or what is missing of them; return the exit code.

    Raises:
        ConfigError: the dataset has no documents.
        recipes.InputError: they, or the tokenizer, cannot be used.
        OSError: a file cannot be read or written.
    """
    from recipes.corpus.prepare import prepare_corpus
    from recipes.documents import preparation

    options = _documents(config)
    processes = config.prepare.processes or len(os.sched_getaffinity(0))
    with status(console, f"tokenising {options.path}") as progress:
        meta = prepare_corpus(preparation(options), processes, progress)
    bad = next((part.first_bad for part in meta.parts if part.first_bad), "")
    if meta.skipped:
        console.print(f"{meta.skipped:,} bad documents were left out, first {bad}", soft_wrap=True)
    console.print(
        f"{meta.documents:,} documents, {meta.tokens:,} tokens of {meta.vocab_size:,} are in "
        f"{options.folder}",
        soft_wrap=True,
    )
    return 0


def tokenize(config: Config, console: Console) -> int:
    """Train a tokenizer on the documents of `dataset`; return the exit code.

    Raises:
        ConfigError: the dataset has no documents, or the file cannot be made.
        recipes.InputError: they cannot be used.
        OSError: a file cannot be read or written.
    """
    from recipes.corpus.train_tokenizer import train_tokenizer
    from recipes.documents import preparation

    options, path = _documents(config), Path(config.tokenize.path).expanduser()
    if os.path.lexists(path) or not path.parent.is_dir():
        is_there = os.path.lexists(path)
        raise ConfigError(
            f"tokenize.path={config.tokenize.path} "
            + ("is there already" if is_there else f"cannot be made: {path.parent} is no folder"),
            "Name another file." if is_there else "Make it first.",
            ["tokenize.path"],
        )
    with status(console, f"training a tokenizer on {options.path}"):
        size = train_tokenizer(preparation(options), config.tokenize.vocab_size, path)
    console.print(f"a tokenizer of {size:,} tokens is in {path}", soft_wrap=True)
    return 0


def _documents(config: Config) -> Documents:
    from recipes.documents_options import Documents

    if not isinstance(config.dataset, Documents):
        raise ConfigError(
            f"task={config.task} is for documents, and dataset={config.dataset.name} has none",
            "Use dataset=jsonl, parquet, arrow or documents.",
            ["task", "dataset.name"],
        )
    return config.dataset
