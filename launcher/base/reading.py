"""Reads dataclasses from JSON values that may have been edited by hand."""

from __future__ import annotations

import dataclasses
import reprlib
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from launcher.base.files import DamagedError

T = TypeVar("T")

_LARGEST = 2**63  # bound on whole numbers
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    tuple: "a list",
    dict: "a table",
}


def read(kind: type[T], tree: Any, where: str = "") -> T:
    """Return an object of a dataclass, after checking every value against its field's type.

    Lists become tuples.

    Raises:
        DamagedError: a field is missing, unknown or of another type; the message names it.
    """
    if not isinstance(tree, Mapping):
        raise DamagedError(f"{where or 'it'} is not a table")
    hints = get_type_hints(kind)
    prefix = f"{where}." if where else ""
    for unknown in tree.keys() - hints.keys():
        raise DamagedError(f"{prefix}{unknown} is not known")
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    for field in fields:
        optional = not field.default is field.default_factory is dataclasses.MISSING
        if field.name not in tree and not optional:
            raise DamagedError(f"{prefix}{field.name} is missing")
    return kind(**{name: _value(hints[name], tree[name], f"{prefix}{name}") for name in tree})


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return a value converted to its type hint."""
    origin, inner = get_origin(hint), get_args(hint)
    options = inner if origin in (Union, types.UnionType) else (hint,)
    for option in options:
        if option is Any:
            return value
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return read(option, value, where)
        origin, inner = get_origin(option), get_args(option)
        if origin is tuple and isinstance(value, list | tuple):
            return _items(inner, value, where)
        if origin is dict and isinstance(value, Mapping):
            return {key: _value(inner[1], one, f"{where}.{key}") for key, one in value.items()}
        if origin is None and _fits(option, value):
            return value
    expected = " or ".join(_WORDS[get_origin(option) or option] for option in options)
    raise DamagedError(f"{where} is {reprlib.repr(value)}, not {expected}")


def _items(inner: tuple[Any, ...], values: list[Any] | tuple[Any, ...], where: str) -> Any:
    if inner[-1] is Ellipsis:
        inner = inner[:1] * len(values)
    if len(values) != len(inner):
        raise DamagedError(f"{where} is {reprlib.repr(values)}, not a list of {len(inner)}")
    pairs = enumerate(zip(inner, values, strict=True))
    return tuple(_value(hint, value, f"{where}[{i}]") for i, (hint, value) in pairs)


def _fits(kind: type, value: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        return kind in (int, float) and abs(value) < _LARGEST
    return isinstance(value, kind)
