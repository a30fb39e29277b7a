"""From a plain tree to the schema's dataclasses, strictly: no unknown name, no wrong type.

`build` is generic over the dataclasses of `schema` and reads their annotations and metadata only.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from launcher.config.errors import ConfigError, closest, listed, shown
from launcher.config.fields import LARGEST, Variants, key_of, settings_of
from launcher.config.keys import setting_keys
from launcher.config.schema import Config

T = TypeVar("T")

_UNSET = "???"  # YAML's word for "the user must say"
_LARGEST_FLOAT = 3e38  # of any number that is not whole: float32 ends a little above
_EXPONENT = r"[+-]?[1-9][0-9]*(\.[0-9]+)?[eE]\+?[0-9]+"
_MEANING = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table of names and values",
}


def build(cls: type[T], tree: Any, key: str = "") -> T:
    """Make a `cls` from `tree`; what the tree leaves out takes the field's default.

    In `parallel`, whose settings know `auto`, a setting of another method may stand where it says
    nothing: where it is null, or `auto` if it knows that word. A sweep over methods needs that.

    Args:
        cls: a dataclass of `launcher.config.schema`.
        tree: what was said: a mapping of field names to values, nested as the schema is.
        key: the dotted name of this section, for messages.

    Raises:
        ConfigError: an unknown name, a wrong type, a value out of bounds, a value not given.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{key or 'The whole'} must be a section of settings, not {shown(tree)}",
            _section_remedy(cls, key),
            [key],
        )
    hints = typing.get_type_hints(cls)
    fields = {key_of(field): field for field in settings_of(cls)}
    for name, value in tree.items():
        if name not in fields and not _says_nothing(cls, key, name, value):
            raise _unknown(cls, key, str(name), value)
    values = {}
    for name, field in fields.items():
        needed = field.default is field.default_factory is dataclasses.MISSING
        if tree[name] == _UNSET if name in tree else needed:
            dotted = _join(key, name)
            raise ConfigError(f"{dotted} is not set", f"Give {dotted}=VALUE.", [dotted])
        if name in tree:
            value = _field_value(field, hints[field.name], tree[name], _join(key, name))
            values[field.name] = value
    return cls(**values)


def _field_value(field: dataclasses.Field[Any], hint: Any, value: Any, key: str) -> Any:
    variants = field.metadata.get("variants")
    if variants is not None:
        return build(_variant(variants, value, key), value, key)
    if field.metadata.get("auto") and value in ("auto", None):
        return field.default
    if field.metadata.get("one_or_several") and isinstance(value, str | bool | int | float):
        value = [value]
    converted = _convert(hint, value, key, bool(field.metadata.get("lines")))
    _check_bounds(field.metadata, converted, key)
    return converted


def _variant(variants: Variants, tree: Any, key: str) -> type:
    """Return the class of the kind that the section `tree` names."""
    kinds, named = variants.classes, f"{key}.{variants.key}"
    kind = tree.get(variants.key) if isinstance(tree, Mapping) else tree
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    if kind is None:
        remedy = f"It says which kind of {key} this is: {', '.join(kinds)}."
        raise ConfigError(f"{named} is not set", remedy)
    problem = f"{named} must be one of {', '.join(kinds)}, not {shown(kind)}"
    raise ConfigError(problem, f"Choose one with {key}=OPTION.", [named])


def _convert(hint: Any, value: Any, key: str, lines: bool = False) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _convert(inner[0], value, key, lines)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, key)  # type: ignore[arg-type]
    if hint is Any:
        return _plain_data(value, key)
    kind = typing.get_origin(hint) or hint
    if kind is dict and isinstance(value, Mapping):
        _, inner_hint = typing.get_args(hint)
        return {
            _name(name, key): _convert(inner_hint, value[name], f"{key}.{name}") for name in value
        }
    if kind is list and isinstance(value, Sequence) and not isinstance(value, str):
        return [_convert(typing.get_args(hint)[0], item, key, lines) for item in value]
    if kind in _SCALARS:
        try:
            converted = _SCALARS[kind](value)
        except ValueError:
            raise _wrong_type(kind, value, key) from None
        if kind is str:
            _check_line(re.sub(r"[\n\t]", " ", converted) if lines else converted, key)
        return converted
    raise _wrong_type(kind, value, key)


def _name(name: Any, key: str) -> str:
    """Return a name in the table `key`."""
    if isinstance(name, str) and not name.isprintable():
        _check_line(name, f"A name in {key}")
    text: str = _convert(str, name, _join(key, str(name)))
    return text


def _plain_data(value: Any, key: str) -> Any:
    """Return `value`, for a user's own module: whatever JSON can hold, as checkpoints keep it."""
    if isinstance(value, Mapping):
        return {_name(name, key): _plain_data(value[name], f"{key}.{name}") for name in value}
    if isinstance(value, list):
        return [_plain_data(item, key) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} must be a finite number, not {shown(value)}", keys=[key])
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(
        f"{key} must be text, a number, true, false, null, a list or a table, not {shown(value)}",
        keys=[key],
    )


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError


def _to_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # Text comes from ${oc.env:…}. Octal or a stray blank is more likely a slip than meant.
    if isinstance(value, str) and re.fullmatch(r"[+-]?(0|[1-9](_?[0-9])*)", value):
        return int(value)
    if isinstance(value, str) and re.fullmatch(_EXPONENT, value):
        value = float(value)
    if isinstance(value, float) and value.is_integer():  # 1e3
        return int(value)
    raise ValueError


def _to_float(value: Any) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number of some hundred digits
            raise ValueError from None
        if math.isfinite(number):
            return number
    raise ValueError


def _to_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError


_SCALARS: Mapping[type, typing.Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
}


def _wrong_type(kind: type, value: Any, key: str) -> ConfigError:
    if kind is str and isinstance(value, bool | int | float):
        # YAML 1.1 reads an unquoted no as false, 1_000 as 1000 and 12:30:00 as 45000.
        problem = f"{key} must be text, but the unquoted value is read as {shown(value)}"
        return ConfigError(problem, "Put it in quotes.", [key])
    return ConfigError(f"{key} must be {_MEANING[kind]}, not {shown(value)}", keys=[key])


def _check_bounds(metadata: Mapping[str, Any], value: Any, key: str) -> None:
    if isinstance(value, list):
        for item in value:
            if isinstance(item, int):
                _check_bounds(metadata, item, key)
        return
    if value is None:
        return
    if isinstance(value, str) and not value.strip():
        raise ConfigError(f"{key} is empty", "Give it a value, or leave it out.", [key])
    _check_choice(metadata, value, key)
    if not isinstance(value, int | float):
        return
    minimum, maximum = metadata.get("minimum"), metadata.get("maximum")
    if maximum is None:
        maximum = LARGEST if isinstance(value, int) else _LARGEST_FLOAT
    if minimum is not None and value < minimum:
        raise ConfigError(
            f"{key} must be at least {_plain(minimum)}, not {shown(value)}", keys=[key]
        )
    if value > maximum:
        raise ConfigError(
            f"{key} must be at most {_plain(maximum)}, not {shown(value)}", keys=[key]
        )


def _check_choice(metadata: Mapping[str, Any], value: Any, key: str) -> None:
    """Raise ConfigError for what is none of the words that a field accepts."""
    choices, parse = metadata.get("choices"), metadata.get("parse")
    if not choices or value in choices:
        return
    if not parse or not re.search("[/:]", value):
        words = [str(choice) for choice in choices]
        raise ConfigError(
            f"{key} must be one of {', '.join(words)}, not {shown(value)}",
            f"Did you mean {match}?" if (match := closest(str(value), words)) else "",
            [key],
        )
    try:
        parse(value)
    except ValueError as error:
        raise ConfigError(f"{key}={error}", keys=[key]) from error


def _check_line(value: str, key: str) -> None:
    """Raise ConfigError for text, also in lists and tables, that cannot be a line of a script."""
    if not value.isprintable():
        raise ConfigError(f"{key} must be one line of plain text, not {shown(value)}", keys=[key])


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _unknown(cls: type, section: str, name: str, value: Any) -> ConfigError:
    """Return the error for a name that `cls` lacks, with where it belongs or the nearest name."""
    key = _join(section, name)
    variants = _variants(cls, section)
    siblings = variants.classes
    option = next((option for option, one in siblings.items() if one is cls), None)
    # What chooses a kind: the option of its name, but for clusters, whose files have their own.
    choice = f"{section}.{variants.key}" if variants.key == "kind" else section
    homes = _homes(siblings, name)
    while homes and isinstance(value, Mapping) and value:  # a section: by the first that is set
        inner, value = next(iter(value.items()))
        key = _join(key, str(inner))
    problem = f"{key} is not a setting{f' of {choice}={option}' if option else ''}"
    if homes:
        clause = getattr(cls, "clause", "")
        belongs = f"It belongs to {choice}={listed(homes)}."
        return ConfigError(f"{problem}, {clause}" if clause else problem, belongs, [key])
    here = closest(name, [key_of(field) for field in settings_of(cls)])
    beside = closest(
        name, [key_of(field) for one in siblings.values() for field in settings_of(one)]
    )
    top = section.partition(".")[0]
    elsewhere = [known for known in setting_keys() if known.partition(".")[0] != top]
    match = (
        next((known for known in elsewhere if known.rpartition(".")[2] == name), None)
        or (_join(section, here) if here else None)
        or (
            f"{_join(section, beside)}, of {choice}={listed(_homes(siblings, beside))}"
            if beside
            else None
        )
        or closest(key, elsewhere)
    )
    remedy = f"Did you mean {match}?" if match else _section_remedy(cls, section)
    return ConfigError(problem, remedy, [key])


def _says_nothing(cls: type, section: str, name: Any, value: Any) -> bool:
    """Return whether a setting of another kind of the section leaves that at its default."""
    classes = _variants(cls, section).classes.values()
    fields = [field for one in classes for field in settings_of(one)]
    automatic = {key_of(field) for field in fields if "auto" in field.metadata}
    if value is None:
        return bool(automatic) and any(key_of(field) == name for field in fields)
    return bool(value == "auto") and name in automatic


def _variants(cls: type, section: str) -> Variants:
    """Return all kinds of a section that `cls` is one kind of; none for any other class."""
    for field in dataclasses.fields(Config):
        variants: Variants | None = field.metadata.get("variants")
        if field.name == section and variants and cls in variants.classes.values():
            return variants
    return Variants("", {})


def _homes(siblings: Mapping[str, type], name: str) -> list[str]:
    """Return the kinds that have the setting."""
    return [
        option
        for option, one in siblings.items()
        if any(key_of(field) == name for field in settings_of(one))
    ]


def _section_remedy(cls: type, section: str) -> str:
    names = ", ".join(key_of(field) for field in settings_of(cls))
    return f"{section or 'The top level'} has: {names}."


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
