"""How a field of the settings says which values it takes; `schema` and its sections use it.

A field's `metadata` may hold `choices` (the words it accepts), `minimum`/`maximum` (inclusive),
`auto` (the word stands for null, which leaves the choice to the launcher) and
`variants` (a section of several kinds: the class for each `name`). A field that is `internal` is
no setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any

# Where a setting is in the tree; and, of what in the tree comes from the environment, the text that
# asks for it and the value that it had.
Place = tuple[str | int, ...]
FromEnvironment = Mapping[Place, tuple[str, Any]]


def settings_of(cls: Any) -> list[Field[Any]]:
    """The fields of a section that are settings."""
    return [found for found in fields(cls) if "internal" not in found.metadata]


def choice(default: str, *choices: str) -> Any:
    """A text field that accepts only `choices`."""
    return field(default=default, metadata={"choices": choices})


def number(default: Any, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A number field with inclusive bounds; `None` leaves a side open."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def automatic(minimum: float) -> Any:
    """A number field that may be left to the launcher: `auto`, or null."""
    return field(default=None, metadata={"minimum": minimum, "maximum": None, "auto": True})
