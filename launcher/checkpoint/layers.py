"""Match arrays between models that stack their layers and models that do not.

A model that scans its layers has `layers.kernel`, with a row a layer, where the same model that
runs them one after the other has `layers_0.kernel`, `layers_1.kernel` and so on. Each starts from
what the other has saved. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
# A name; the names of all rows, in order; or a name and the number of its row.
Source: TypeAlias = "str | tuple[str, ...] | tuple[str, int]"

_NUMBERED = re.compile(r"(?:(.+)_)?(\d+)")


def sources(wanted: Shapes, stored: Shapes) -> dict[str, Source]:
    """Return for each wanted array where it is stored; nothing for those that are not.

    Args:
        wanted: the shapes of a model's arrays, by flat names such as `params.layers_0.kernel`.
        stored: the shapes of what is stored.
    """
    found: dict[str, Source] = {}
    for name, shape in wanted.items():
        if name in stored:
            found[name] = name
        elif source := _rows(name, shape, stored) or _row(name, shape, stored):
            found[name] = source
    return found


def names_of(source: Source) -> tuple[str, ...]:
    """Return the names of the stored arrays of a source."""
    if isinstance(source, str):
        return (source,)
    return tuple(name for name in source if isinstance(name, str))


def _rows(name: str, shape: tuple[int, ...], stored: Shapes) -> tuple[str, ...] | None:
    """Return the names of the rows of a stacked array, if each is stored apart."""
    for numbered in _with_numbers(name):
        rows = tuple(numbered.format(i) for i in range(shape[0] if shape else 0))
        further = numbered.format(len(rows))
        if rows and further not in stored and all(stored.get(row) == shape[1:] for row in rows):
            return rows
    return None


def _with_numbers(name: str) -> Iterator[str]:
    """Yield a name with a place for a number behind each of its parts but the first and last.

    It is the end of the part, as in Flax, or a part of its own, as in lists.
    """
    parts = name.replace("{", "{{").replace("}", "}}").split(".")
    for i in range(1, len(parts) - 1):
        for mark in "_.":
            yield ".".join([*parts[:i], f"{parts[i]}{mark}{{}}", *parts[i + 1 :]])


def _row(name: str, shape: tuple[int, ...], stored: Shapes) -> tuple[str, int] | None:
    """Return the stacked array of which an array is a row, and the row's number."""
    parts = name.split(".")
    for i in range(1, len(parts) - 1):
        if found := _NUMBERED.fullmatch(parts[i]):
            before = [found[1]] if found[1] else []
            stacked = ".".join([*parts[:i], *before, *parts[i + 1 :]])
            count, *of_row = stored.get(stacked) or (0,)
            if int(found[2]) < count and tuple(of_row) == shape:
                return stacked, int(found[2])
    return None
