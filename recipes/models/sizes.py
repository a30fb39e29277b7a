"""Sizes of a model family: a name stands for a row of settings, `hf:<folder>` for a model's there.

It imports neither JAX nor Flax: settings are checked with it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from launcher.config.errors import ConfigError, advice
from launcher.config.families import ModelOptions
from launcher.config.fields import LARGEST, choice
from launcher.recipes.models.hugging_face import PREFIX, dimensions_in, padded

_REQUIRED = object()  # of a setting that has no value unless it is given
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def dimension(minimum: float = 1, maximum: float | None = None, **more: Any) -> Any:
    """Make a whole number that a size, or else the user, must give."""
    return feature(_REQUIRED, minimum, maximum, **more)


def feature(
    otherwise: Any, minimum: float | None = None, maximum: float | None = None, **more: Any
) -> Any:
    """Make a setting that a size may give; it is `otherwise` where neither does nor the user."""
    bounds = {"minimum": minimum, "maximum": maximum, "otherwise": otherwise}
    return field(default=None, metadata={**bounds, **more})


@dataclass(frozen=True)
class SizedOptions(ModelOptions):
    """The settings of a family whose `size` names a row of `sizes`, which fills what is not set.

    The settings of a row are fields made by `dimension` and `feature`. They are null until
    `filled`, which loading a configuration calls; then all are set and `sizes` is empty.

    Attributes:
        size: a row of `sizes`, `hf:<folder>`, or `hf://org/name`.
        sizes: rows by their names.
        row: the settings of a row.
        optional: those of them that may stay None.
    """

    name: str = ""
    size: str | None = field(default="nano", metadata={"hub": "model"})
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    row: ClassVar[Mapping[str, Any]] = {}
    optional: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Let a size stand for all that its row may hold."""
        own = {name: one for name, one in vars(cls).items() if isinstance(one, dataclasses.Field)}
        more = {
            name: one.metadata["otherwise"]
            for name, one in own.items()
            if "otherwise" in one.metadata
        }
        cls.row = {**cls.row, **more}
        cls.shorthands = {"size": ("sizes", *cls.row)}

    @property
    def layers(self) -> int:
        """The number of pipeline layers: one more than the model's marks."""
        return int(self.num_layers)  # type: ignore[attr-defined]

    def filled(self) -> Self:
        """Return the settings with every one of a row set; one that was set stays.

        Raises:
            ConfigError: a size that `sizes` lacks, a row with a name that is none of a row's, a
                dimension that neither the user nor the size gives, a value of the wrong type.
        """
        needed = [name for name in self.row if name not in self.optional]
        is_full = all(getattr(self, name) is not None for name in needed)
        row = {} if is_full and self._from_files() else self._row()
        filled: dict[str, Any] = {}
        for name, otherwise in self.row.items():
            filled[name] = getattr(self, name)
            if filled[name] is not None:
                continue
            filled[name] = row.get(name, otherwise)
            if name in row:
                self._check_value(name, row[name])
            elif otherwise is _REQUIRED:
                raise ConfigError(
                    f"model.{name} is not set",
                    f"Choose a model.size, or give model.{name}=VALUE.",
                    keys=(),
                    code="missing_value",
                )
        return dataclasses.replace(self, sizes={}, **filled)

    def _from_files(self) -> bool:
        return (self.size or "").startswith(PREFIX)

    def _row(self) -> Mapping[str, Any]:
        """Return the settings that the size gives."""
        if self.size is None:
            return {}
        if self._from_files():
            return dimensions_in(self.size, self.name)
        if not self.sizes:
            return {}
        if self.size not in self.sizes:
            raise ConfigError(
                f"There is no model.size={self.size}",
                advice(self.size, list(self.sizes), "Sizes"),
                ["model.size"],
                code="unknown_option",
            )
        row = self.sizes[self.size]
        for name in row:
            if name not in self.row:
                raise ConfigError(
                    f"model.sizes.{self.size}.{name} is not a dimension",
                    advice(name, list(self.row)),
                    [f"model.sizes.{self.size}.{name}"],
                )
        return row

    def _check_value(self, name: str, value: Any) -> None:
        """Refuse a value of a row that its setting could not have."""
        hint = typing.get_type_hints(type(self))[name]
        kind, *_ = typing.get_args(hint) or (hint,)
        key = "model.size" if self._from_files() else f"model.sizes.{self.size}.{name}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)) and not (
            kind is float and is_number
        ):
            raise ConfigError(f"{key} must be {_KINDS[kind]}, not {value!r}", keys=[key])
        bounds = next(f.metadata for f in dataclasses.fields(self) if f.name == name)
        least = bounds.get("minimum")
        most = bounds.get("maximum") or LARGEST
        if least is not None and value < least:
            raise ConfigError(f"model.{name} must be at least {least:g}, not {value}", keys=[key])
        if is_number and value > most:
            raise ConfigError(f"model.{name} must be at most {most}, not {value}", keys=[key])
        if "choices" in bounds and value not in bounds["choices"]:
            words = ", ".join(map(str, bounds["choices"]))
            raise ConfigError(f"model.{name} must be one of {words}, not {value}", keys=[key])


@dataclass(frozen=True)
class TransformerOptions(SizedOptions):
    """The settings that all transformers have."""

    # Each is traced by itself: more than the deepest published (DeepNet, 2022) would take hours.
    num_layers: int = dimension(maximum=1000)
    num_heads: int = dimension()
    hidden_size: int = dimension()
    scan_layers: bool = False
    attention: str = choice("auto", "auto", "xla", "cudnn")

    @property
    def vocabulary_rows(self) -> int:
        """How many rows the vocabulary's arrays have, with their padding; 0: there are none."""
        return padded(getattr(self, "vocab_size", 0))

    def notes(self, devices: int) -> Iterator[str]:
        """Yield how the vocabulary is padded, and which dimensions are not cut."""
        sizes = {name: getattr(self, name, 0) for name in ("num_heads", "num_kv_heads")}
        sizes["vocab_size"] = rows = self.vocabulary_rows
        if rows and rows > (own := self.vocab_size):  # type: ignore[attr-defined]
            yield f"vocabulary padded from {own:,} to {rows:,}, so that devices divide it"
        if whole := [f"model.{name}" for name, size in sizes.items() if size % devices]:
            more = "" if whole == ["model.vocab_size"] else "; heads are not padded"
            yield f"not cut: {' and '.join(whole)}, which {devices} devices do not divide{more}"


def uneven(options: ModelOptions, *pairs: tuple[str, str]) -> Iterator[ConfigError]:
    """Yield an error for each pair of settings whose first is not a multiple of its second."""
    for whole, part in pairs:
        a, b = getattr(options, whole), getattr(options, part)
        if a and b and a % b:
            yield ConfigError(
                f"model.{whole}={a} must be a multiple of model.{part}={b}",
                keys=[f"model.{whole}", f"model.{part}"],
            )
