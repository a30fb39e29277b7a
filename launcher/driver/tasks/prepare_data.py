"""`task=prepare_data`, which a training begins with where needed, and `task=tokenize`."""

from __future__ import annotations

import os

from rich.console import Console

from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.folder import folder
from launcher.driver.planning.downloads import download
from launcher.driver.tasks.task import TaskKind, new_path
from launcher.recipes import needs_preparing, prepare_dataset
from launcher.report.console import RunConsole, status


class PrepareData(TaskKind):
    """Prepare the dataset for a training."""

    name = "prepare_data"

    def run(self, config: Config, console: RunConsole) -> int:
        """Prepare the data for a training, as far as that is not done; return the exit code.

        Raises:
            ConfigError: this data needs no preparation.
            launcher.recipes.InputError: it, or the tokenizer, cannot be used.
            OSError: a file cannot be read or written.
        """
        download(config, console)
        if not _prepare_here(folder.pinned(config), console):
            raise ConfigError(
                f"task={config.task} is for documents and pictures, and of dataset="
                f"{config.dataset.name} nothing is made",
                "Use dataset=jsonl, parquet, arrow, documents, pictures or webdataset.",
            )
        return 0


def prepare_first(config: Config, console: Console) -> None:
    """Prepare the data of a training, where that has not been done; raises as `prepare_data`."""
    if needs_preparing(config.dataset):
        _prepare_here(config, console)


def _prepare_here(config: Config, console: Console) -> bool:
    """Prepare the data and print its description; return whether it needs preparation at all."""
    source = getattr(config.dataset, "path", config.dataset.name)
    processes = config.prepare.processes or len(os.sched_getaffinity(0))
    with status(console, f"preparing {source}") as progress:
        made = prepare_dataset(config.dataset, processes, progress)
    for line in (made or "").splitlines():
        console.print(line, soft_wrap=True)
    return made is not None


class TokenizeTask(TaskKind):
    """Train a tokenizer on the dataset's documents."""

    name = "tokenize"

    def run(self, config: Config, console: RunConsole) -> int:
        """Train a tokenizer on the documents of `dataset`; return the exit code.

        Raises:
            ConfigError: the dataset has no documents, or the file cannot be made.
            launcher.recipes.InputError: they cannot be used.
            OSError: a file cannot be read or written.
        """
        from launcher.recipes.datasets.documents import Documents
        from launcher.recipes.datasets.documents.prepare import train_tokenizer

        options = folder.pinned(config).dataset
        if not isinstance(options, Documents):
            raise ConfigError(
                f"task={config.task} is for documents, and dataset={options.name} has none",
                "Use dataset=jsonl, parquet, arrow or documents.",
            )
        path = new_path("tokenize.path", config.tokenize.path)
        with status(console, f"training a tokenizer on {options.path}"):
            size = train_tokenizer(options, config.tokenize.vocab_size, path)
        console.print(f"a tokenizer of {size:,} tokens is in {path}", soft_wrap=True)
        return 0
