"""How a field of the settings says which values it takes; `schema` and its sections use it.

A field's `metadata` may hold `choices` (the words it accepts), `minimum`/`maximum` (inclusive),
`auto` (the word stands for null, which leaves the choice to the launcher) and
`variants` (a section of several kinds: the class for each `name`).
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def choice(default: str, *choices: str) -> Any:
    """A text field that accepts only `choices`."""
    return field(default=default, metadata={"choices": choices})


def number(default: Any, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A number field with inclusive bounds; `None` leaves a side open."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def automatic(minimum: float) -> Any:
    """A number field that may be left to the launcher: `auto`, or null."""
    return field(default=None, metadata={"minimum": minimum, "maximum": None, "auto": True})
