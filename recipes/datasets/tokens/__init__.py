"""The settings of token files, one corpus or a mixture of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from launcher.base import stores
from launcher.config.errors import ConfigError
from launcher.config.families import HOLDS_OUT, DatasetOptions, ModelOptions, register, taken_by
from launcher.config.fields import Switch, choice, number

IS_PACKED = Switch(
    ("dataset.end_token",),
    ("dataset.packing",),
    lambda config: config.dataset.packing == "documents",
    "dataset.packing=stream takes no notice of documents",
    "use dataset.packing=documents",
)
_NAMING = ("path", "validation_path", "parts")  # settings that name files
IS_STORED = Switch(
    ("dataset.objects", "dataset.cache_gib"),
    ("dataset.path", "dataset.validation_path", "dataset.parts"),
    lambda config: any(map(stores.is_stored, config.dataset.paths.values())),
    "no path of dataset is a URL of an object store",
    "name one, such as dataset.path=s3://bucket/tokens",
)


@dataclass(frozen=True, kw_only=True)
class TokenRows(DatasetOptions):
    """Rows of tokens: what they ask of a model, and how they are made."""

    holds = ("text",)
    packing: str = choice("stream", "stream", "documents")
    bad: str = choice("refuse", "refuse", "skip")
    validation_fraction: float = number(0.05, minimum=0.0, maximum=0.9)
    objects: list[str] | None = None  # null: what the object store has now
    cache_gib = 0.0  # documents are read once

    @property
    def reads(self) -> tuple[str, ...]:
        """How the names of files end that are read, in small letters; empty: as they like."""
        return (".bin", ".npy", ".ends", ".mask", ".bytes", "meta.json")

    @property
    def paths(self) -> dict[str, str]:
        """What names files, by its setting."""
        return {}

    @property
    def patience(self) -> float:
        """How many seconds a batch may be waited for: a store is asked again for most of them."""
        return 1.5 * stores.PATIENCE if self.objects else 0.0

    def pinned(self, before: Callable[[], Mapping[str, Any]]) -> Self:
        """Return the settings with the objects that they name, those of a run that is resumed."""
        stored = {key: path for key, path in self.paths.items() if stores.is_stored(path)}
        if not stored:
            return self
        from launcher.recipes.data.stored_files import pinned  # here: it is seldom needed

        known, resumed = self.objects, before()
        same = (resumed.get(name) == getattr(self, name, None) for name in _NAMING)
        if known is None and all(same):
            known = resumed.get("objects")
        return replace(self, objects=pinned(stored, self.reads, known))

    def check(self, model: ModelOptions) -> Iterator[ConfigError]:
        """Yield an error for a model that takes no text, or one that attends across documents."""
        yield from super().check(model)
        if taken_by(model) == "text" and self.packing == "documents" and not model.keeps_documents:
            yield ConfigError(
                f"model={model.name} attends to all of a row, also where "
                "dataset.packing=documents packs several documents into one",
                "Use dataset.packing=stream, or model=gpt, llama or moe.",
                ["dataset.packing", "model.name"],
            )


@register
@dataclass(frozen=True, kw_only=True)
class Tokens(TokenRows):
    """Tokens: a folder that `task=prepare_data` wrote, or `.bin` and `.npy` files."""

    name: str = "tokens"
    path: str
    dtype: str = choice("auto", "auto", "uint16", "uint32")
    end_token: int | None = number(None, minimum=0)
    validation_path: str | None = None
    cache_gib: float = number(10.0, minimum=0.0)

    switches = (IS_PACKED, HOLDS_OUT, IS_STORED)

    @property
    def paths(self) -> dict[str, str]:
        """What names files, by its setting."""
        named = {"dataset.path": self.path, "dataset.validation_path": self.validation_path}
        return {key: path for key, path in named.items() if path is not None}
