"""The settings of documents that a tokenizer turns into tokens before the training."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as _field  # a setting is called so, too
from pathlib import Path

from launcher.base import hub, stores
from launcher.config.errors import ConfigError
from launcher.config.families import ModelOptions, register
from launcher.config.fields import choice
from launcher.recipes.datasets.tokens import IS_STORED, TokenRows


@register
@dataclass(frozen=True, kw_only=True)
class Documents(TokenRows):
    """Documents in text, JSON lines, Parquet or Arrow files, tokenised by `task=prepare_data`."""

    name: str = "documents"
    path: str = _field(metadata={"hub": "data"})
    format: str = choice("jsonl", "jsonl", "parquet", "arrow", "text")
    pattern: str | None = None  # null: by the endings of the format
    field: str = "text"
    tokenizer: str = _field(default="bytes", metadata={"hub": "model"})
    chat_template: str | None = None
    tokens: str | None = None  # null: <path>.tokens, of a repository here

    switches = (IS_STORED,)

    @property
    def reads(self) -> tuple[str, ...]:
        """How the names of files end that are read, in small letters; empty: as they like."""
        return () if self.pattern else (".parquet",)

    @property
    def paths(self) -> dict[str, str]:
        """What names files, by its setting."""
        return {"dataset.path": self.path}

    @property
    def folder(self) -> str:
        """The folder of tokens."""
        path = self.path.rstrip("/")
        if hub.is_name(path):  # here, not in the cache
            name = hub.HubName.of(path)
            path = re.sub(r"[^\w.-]+", "-", f"{name.repo}/{name.below}").strip("-")
        return self.tokens or f"{path}.tokens"

    def check(self, model: ModelOptions) -> Iterator[ConfigError]:
        """Yield an error also for a glob without a folder of tokens."""
        yield from super().check(model)
        is_remote = stores.is_stored(self.path)
        if is_remote and self.format != "parquet":
            yield ConfigError(
                f"dataset.path={self.path} is in an object store, from which documents are read in "
                f"Parquet, not in dataset.format={self.format}",
                "Copy the files and name the copy, or use dataset=parquet.",
                ["dataset.path", "dataset.format"],
            )
        if stores.is_stored(self.tokens or ""):
            yield ConfigError(
                f"dataset.tokens={self.tokens} is a URL, and tokens are written to a folder",
                "Name one, such as dataset.tokens=talks.tokens, and copy it afterwards.",
                ["dataset.tokens"],
            )
        is_glob = glob.has_magic(self.path) and not Path(self.path).expanduser().exists()
        if self.tokens is None and (is_remote or (is_glob and not hub.is_name(self.path))):
            yield ConfigError(
                f"dataset.path={self.path} is {'a URL' if is_remote else 'a glob'}, which implies "
                "no folder for its tokens",
                "Name one, such as dataset.tokens=talks.tokens.",
                ["dataset.path"],
            )
