"""The settings of text that is read as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.base import hub
from launcher.config.errors import ConfigError
from launcher.config.families import DatasetOptions, ModelOptions, register
from launcher.config.fields import Switch, number

VOCABULARY = 256  # the values of a byte


class Bytes(DatasetOptions):
    """Text as bytes: what it asks of a model."""

    holds = ("text",)

    def check(self, model: ModelOptions) -> Iterator[ConfigError]:
        """Yield an error for a model that takes no text, or one whose vocabulary is too small."""
        yield from super().check(model)
        rows = getattr(model, "vocab_size", None)
        if rows is not None and rows < VOCABULARY:
            yield ConfigError(
                f"model.vocab_size={rows} is too small for dataset={self.name}, which is bytes",
                f"Make it at least {VOCABULARY}.",
                ["model.vocab_size"],
            )

    def notes(self, model: ModelOptions) -> Iterator[str]:
        """Yield how many rows of the model's vocabulary bytes leave unused."""
        rows = getattr(model, "vocab_size", None) or VOCABULARY
        if rows > VOCABULARY:
            yield (
                f"dataset={self.name} is bytes: {rows - VOCABULARY:,} of the model's {rows:,} "
                f"vocabulary rows are unused; model.vocab_size={VOCABULARY} leaves them out"
            )


@register
@dataclass(frozen=True)
class StdlibText(Bytes):
    """The source files of this machine's Python standard library, as bytes."""

    name: str = "stdlib_text"
    validation_fraction: float = number(0.05, minimum=0.0, maximum=0.9)


@register
@dataclass(frozen=True, kw_only=True)
class Text(Bytes):
    """The user's own text: one file, or every file below a folder that fits `pattern`, as bytes."""

    name: str = "text"
    path: str = field(metadata={"hub": "data"})
    pattern: str = "**/*.txt"
    validation_fraction: float = number(0.05, minimum=0.0, maximum=0.9)

    switches = (
        Switch(
            ("dataset.pattern",),
            ("dataset.path",),
            lambda c: hub.is_name(c.dataset.path) or Path(c.dataset.path).expanduser().is_dir(),
            "dataset.path is no folder",
            "name a folder",
        ),
    )
