"""Files of the Hugging Face hub that a run needs, downloaded before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from rich.console import Console

from launcher.base import hub
from launcher.config.hub import naming
from launcher.config.schema import Config
from launcher.recipes import needs_preparing
from launcher.recipes.data.corpus.sources import wanted_files
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.text import Text
from launcher.report.console import status

_log = logging.getLogger(__name__)


def download(config: Config, console: Console, finished: int | None = None) -> None:
    """Download what a run needs of the hub and the cache lacks; log which commits it takes.

    Args:
        config: the settings.
        console: where the progress is shown.
        finished: how many steps the run has finished; None: only its data are needed.

    Raises:
        ConfigError: a file cannot be had, or the cache cannot be written.
    """
    for key, text, fits in hub_needs(config, finished):
        with naming(key, text):
            if hub.missing(text, fits):
                with status(console, f"downloading {hub.described(text, fits)}") as advance:
                    hub.fetch(text, fits, lambda n, of: advance(n >> 20, of >> 20, "MiB"))
            _log.info(f"{key}: {hub.described(text, fits)}")


def hub_needs(config: Config, finished: int | None) -> Iterator[tuple[str, str, hub.Fits]]:
    """Yield the settings by which a run needs large files of the hub: key, name, and which."""
    start, data = config.train.init_from or "", config.dataset
    if hub.is_name(start) and finished == 0 and config.run.fork is None:
        yield "train.init_from", start, hub.is_model
    if isinstance(data, Text) and hub.is_name(data.path):
        yield "dataset.path", data.path, wanted_files(data.pattern, "text")
    if isinstance(data, Documents) and hub.is_name(data.path) and needs_preparing(data):
        yield "dataset.path", data.path, wanted_files(data.pattern, data.format)
