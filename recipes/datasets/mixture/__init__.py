"""The settings of a mixture of corpora."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.config.errors import ConfigError
from launcher.config.families import ModelOptions, register
from launcher.config.fields import choice, number
from launcher.recipes.datasets.tokens import IS_PACKED, IS_STORED, TokenRows


@register
@dataclass(frozen=True, kw_only=True)
class Mixture(TokenRows):
    """Several corpora of tokens, of which rows are taken by their weights."""

    name: str = "mixture"
    parts: dict[str, Any]  # of each its path and weight
    dtype: str = choice("auto", "auto", "uint16", "uint32")
    end_token: int | None = number(None, minimum=0)
    cache_gib: float = number(10.0, minimum=0.0)

    switches = (IS_PACKED, IS_STORED)

    @property
    def paths(self) -> dict[str, str]:
        """What names files, by its setting."""
        return {f"dataset.parts.{name}.path": part["path"] for name, part in self.parts.items()}

    def check(self, model: ModelOptions) -> Iterator[ConfigError]:
        """Yield an error also for a part without a path, or with a weight that is none."""
        yield from super().check(model)
        example = "Write {books: {path: /data/books, weight: 3}, web: {path: /data/web}}."
        if not self.parts:
            yield ConfigError("dataset.parts names nothing", example, ["dataset.parts"])
        for name, part in self.parts.items():
            where = f"dataset.parts.{name}"
            if not isinstance(part, dict) or not isinstance(part.get("path"), str):
                yield ConfigError(f"{where} names no path", example, [where])
            elif others := sorted(set(part) - {"path", "weight"}):
                yield ConfigError(
                    f"{where}.{others[0]} is not a setting; a part has a path and a weight",
                    example,
                    [where],
                )
            else:
                weight = part.get("weight", 1)
                if type(weight) not in (int, float) or not 0 < weight < float("inf"):
                    yield ConfigError(
                        f"{where}.weight={weight} must be a number above 0", example, [where]
                    )
