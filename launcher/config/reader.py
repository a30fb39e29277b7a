"""Strict reader of settings: from a plain tree to the dataclasses of `schema`.

Unknown names, wrong types and values out of bounds are refused, with the nearest right name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from launcher.base.reading import TYPE_NAMES, Reader, join_key
from launcher.config.errors import ConfigError, Fix, closest, listed, shown
from launcher.config.fields import LARGEST, Variants, key_of, settings_of
from launcher.config.schema import Config, check

T = TypeVar("T")

_UNSET = "???"  # YAML's marker of a mandatory value
_LARGEST_FLOAT = 3e38  # float32 ends a little above
_EXPONENT = r"[+-]?[1-9][0-9]*(\.[0-9]+)?[eE]\+?[0-9]+"
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?:(%)|x|[a-z]{4,})?")  # no 64k
_SWITCHED = ("true", "false")
_MEANING = {**TYPE_NAMES, dict: "a table of names and values"}


def build(cls: type[T], tree: Any, key: str = "") -> T:
    """Return a `cls` from `tree`; missing names take the fields' defaults.

    In `parallel` a setting of another method is allowed if it is null,
    or `auto` where that method knows the word. A sweep over methods needs that.

    Args:
        cls: a dataclass of `launcher.config.schema`.
        tree: a mapping of field names to values, nested as the schema is.
        key: the dotted name of this section, for messages.

    Raises:
        ConfigError: an unknown name, a wrong type, a value out of bounds, a value not given.
    """
    return _SettingsReader().read(cls, tree, key)


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Return the configuration of a tree by `to_dict`, as strictly as `load`.

    Workers call it, so this module is quick to import: it does not know Hydra.
    """
    config = build(Config, tree)
    config = dataclasses.replace(config, model=config.model.filled())
    check(config)
    return config


class _SettingsReader(Reader):
    """Reads what a user wrote. Numbers may be text, as variables of the environment are."""

    def __init__(self, lines: bool = False) -> None:
        self._lines = lines  # whether text may have several lines

    def fields(self, kind: Any) -> Mapping[str, dataclasses.Field[Any]]:
        return {key_of(field): field for field in settings_of(kind)}

    def is_given(
        self, name: str, field: dataclasses.Field[Any], tree: Mapping[str, Any], where: str
    ) -> bool:
        needed = field.default is field.default_factory is dataclasses.MISSING
        if tree[name] == _UNSET if name in tree else needed:
            dotted = join_key(where, name)
            remedy = f"Give {dotted}=VALUE."
            raise ConfigError(f"{dotted} is not set", remedy, [dotted], code="missing_value")
        return name in tree

    def field(self, field: dataclasses.Field[Any], hint: Any, value: Any, where: str) -> Any:
        metadata = field.metadata
        if "variants" in metadata:
            return self.read(_variant(metadata["variants"], value, where), value, where)
        if metadata.get("auto") and value in ("auto", None):
            return field.default
        if "off" in metadata and (value is False or value == "off"):  # YAML 1.1 reads off as false
            return metadata["off"]
        if value is None and field.default is None:
            return None
        if metadata.get("one_or_several") and isinstance(value, str | bool | int | float):
            value = [value]
        reader = _SettingsReader(lines=True) if metadata.get("lines") else self
        converted = reader.value(hint, value, where)
        _check_bounds(metadata, converted, where)
        return converted

    def name(self, name: Any, where: str) -> str:
        if isinstance(name, str) and not name.isprintable():
            _check_line(name, f"A name in {where}")
        text: str = self.value(str, name, join_key(where, name))
        return text

    def anything(self, value: Any, where: str) -> Any:
        """Return a value for a user's own module: anything that JSON can hold."""
        if isinstance(value, Mapping):
            return {
                self.name(name, where): self.anything(one, f"{where}.{name}")
                for name, one in value.items()
            }
        if isinstance(value, list):
            return [self.anything(item, where) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(f"{where} must be a finite number, not {shown(value)}", where)
        if value is None or isinstance(value, str | bool | int | float):
            return value
        kinds = "text, a number, true, false, null, a list or a table"
        raise _wrong(f"{where} must be {kinds}, not {shown(value)}", where)

    def scalar(self, kind: Any, value: Any, where: str) -> Any:
        if kind is int:
            return _to_int(value)
        if kind is float:
            return _to_float(value)
        if kind not in (bool, str) or not isinstance(value, kind):
            raise ValueError
        if kind is str:
            _check_line(re.sub(r"[\n\t]", " ", value) if self._lines else value, where)
        return value

    def refuse_tree(self, kind: Any, tree: Any, where: str) -> NoReturn:
        problem = f"{where or 'The whole'} must be a section of settings, not {shown(tree)}"
        raise _wrong(problem, where, _section_remedy(kind, where))

    def refuse_name(self, kind: Any, name: Any, value: Any, where: str) -> None:
        if not _says_nothing(kind, where, name, value):
            raise _unknown(kind, where, str(name), value)

    def refuse_value(self, kinds: list[Any], value: Any, where: str) -> NoReturn:
        if kinds[0] is str and isinstance(value, bool | int | float):
            # YAML 1.1 reads an unquoted no as false, 1_000 as 1000 and 12:30:00 as 45000.
            problem = f"{where} must be text, but the unquoted value is read as {shown(value)}"
            fixes = [] if isinstance(value, bool) else [{where: f'"{value}"'}]  # it was no or off
            raise _wrong(problem, where, "Put it in quotes.", fixes)
        problem = f"{where} must be {_MEANING[kinds[0]]}, not {shown(value)}"
        raise _wrong(problem, where, fixes=[{where: near} for near in _nearest(kinds[0], value)])


def _wrong(
    problem: str, key: str, remedy: str = "", fixes: Sequence[Fix] | None = None
) -> ConfigError:
    return ConfigError(problem, remedy, [key], code="wrong_value", fixes=fixes)


def _nearest(kind: Any, value: Any) -> Iterator[str]:
    """Yield the words that may stand for what was meant by a value of another type."""
    text = str(value).strip().casefold()
    if kind is bool:
        yes, no = ("1", "1.0", "yes", "y", "on"), ("0", "0.0", "no", "n", "off")
        found = "true" if text in yes else "false" if text in no else closest(text, _SWITCHED)
        yield from [found] if found else []
    elif kind is list and not isinstance(value, Mapping):
        yield from (f"[{value}]", f'["{value}"]')
    elif kind in (int, float) and (digits := _NUMBER.fullmatch(text.replace("_", ""))):
        number = float(digits[1])
        if kind is float:
            yield f"{number / 100 if digits[2] else number:g}"
        elif not digits[2]:  # a share of what is not known
            yield str(round(number))


def _variant(variants: Variants, tree: Any, key: str) -> type:
    """Return the class of the kind that the section `tree` names."""
    kinds, named = variants.classes, f"{key}.{variants.key}"
    kind = tree.get(variants.key) if isinstance(tree, Mapping) else tree
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    if kind is None:
        remedy = f"It says which kind of {key} this is: {', '.join(kinds)}."
        raise ConfigError(f"{named} is not set", remedy, keys=(), code="missing_value")
    problem = f"{named} must be one of {', '.join(kinds)}, not {shown(kind)}"
    near = closest(str(kind), kinds)
    fixes: list[Fix] = [{key: near}, {named: near}] if near else []
    raise _wrong(problem, named, f"Choose one with {key}=OPTION.", fixes)


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


def _check_bounds(metadata: Mapping[str, Any], value: Any, key: str) -> None:
    if isinstance(value, list):
        for item in value:
            if isinstance(item, int):
                _check_bounds(metadata, item, key)
        return
    if value is None:
        return
    if isinstance(value, str) and not value.strip():
        raise _wrong(f"{key} is empty", key, "Give it a value, or leave it out.")
    _check_choice(metadata, value, key)
    if not isinstance(value, int | float):
        return
    least, most = metadata.get("minimum"), metadata.get("maximum")
    if most is None:
        most = LARGEST if isinstance(value, int) else _LARGEST_FLOAT
    if (least is not None and value < least) or value > most:
        which, bound = ("most", most) if value > most else ("least", least)
        number = str(bound) if isinstance(bound, int) else f"{bound:g}"
        problem = f"{key} must be at {which} {number}, not {shown(value)}"
        raise _wrong(problem, key, fixes=[{key: number}])


def _check_choice(metadata: Mapping[str, Any], value: Any, key: str) -> None:
    """Raise ConfigError for a value that is not one of the field's choices."""
    choices, parse = metadata.get("choices"), metadata.get("parse")
    if not choices or value in choices:
        return
    if not parse or not re.search("[/:]", value):
        words = [str(choice) for choice in choices]
        problem = f"{key} must be one of {', '.join(words)}, not {shown(value)}"
        match = closest(str(value), words)
        raise _wrong(problem, key, f"Did you mean {match}?" if match else "")
    try:
        parse(value)
    except ValueError as error:
        near = re.findall(r"did you mean (\w+)|; give ([\w/:]+)", str(error))
        fixes = [{key: word} for found in near for word in found if word]
        raise _wrong(f"{key}={error}", key, fixes=fixes) from error


def _check_line(value: str, key: str) -> None:
    """Raise ConfigError for text that is not one printable line."""
    if not value.isprintable():
        raise _wrong(f"{key} must be one line of plain text, not {shown(value)}", key)


def _unknown(cls: type, section: str, name: str, value: Any) -> ConfigError:
    """Return the error for an unknown name, with the kind that has it or the nearest name."""
    key = join_key(section, name)
    variants = _variants(cls, section)
    siblings = variants.classes
    option = next((option for option, one in siblings.items() if one is cls), None)
    # A kind is chosen by the option of its name, except clusters, whose files have other names.
    choice = f"{section}.{variants.key}" if variants.key == "kind" else section
    homes = _homes(siblings, name)
    while homes and isinstance(value, Mapping) and value:  # a section: name its first setting
        inner, value = next(iter(value.items()))
        key = join_key(key, str(inner))
    problem = f"{key} is not a setting{f' of {choice}={option}' if option else ''}"
    if homes:
        clause = getattr(cls, "clause", "")
        belongs = f"It belongs to {choice}={listed(homes)}."
        problem = f"{problem}, {clause}" if clause else problem
        options: list[Fix] = [{section: home} for home in homes]
        return ConfigError(problem, belongs, [key], code="unknown_setting", fixes=options)
    here = closest(name, [key_of(field) for field in settings_of(cls)])
    beside = closest(
        name, [key_of(field) for one in siblings.values() for field in settings_of(one)]
    )
    top = section.partition(".")[0]
    elsewhere = [known for known in setting_keys() if known.partition(".")[0] != top]
    match = (
        next((known for known in elsewhere if known.rpartition(".")[2] == name), None)
        or (join_key(section, here) if here else None)
        or (join_key(section, beside) if beside else None)
        or next((known for known in elsewhere if known.endswith(f"_{name}")), None)
        or closest(key, elsewhere)
    )
    others = _homes(siblings, beside) if beside and match == join_key(section, beside) else []
    of = f", of {choice}={listed(others)}" if others and not here else ""
    remedy = f"Did you mean {match}{of}?" if match else _section_remedy(cls, section)
    fixes: list[Fix] = [{match: None}] if match else []
    return ConfigError(problem, remedy, [key], code="unknown_setting", fixes=fixes)


def _says_nothing(cls: type, section: str, name: Any, value: Any) -> bool:
    """Return whether a setting of another method of `parallel` has its default there."""
    if section != "parallel":
        return False
    classes = _variants(cls, section).classes.values()
    fields = [field for one in classes for field in settings_of(one)]
    known = [field for field in fields if value is None or "auto" in field.metadata]
    return bool(value in ("auto", None)) and any(key_of(field) == name for field in known)


def _variants(cls: type, section: str) -> Variants:
    """Return all kinds of the section of `cls`; none for a class without kinds."""
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


def _leaves(cls: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the annotation of every setting below `cls`, of all variants."""
    hints = typing.get_type_hints(cls)
    for field in settings_of(cls):
        name = key_of(field)
        key = join_key(section, name)
        if "variants" in field.metadata:
            for variant in field.metadata["variants"].classes.values():
                yield from _leaves(variant, key)
        elif dataclasses.is_dataclass(hints[field.name]):
            yield from _leaves(hints[field.name], key)
        else:
            yield key, hints[field.name]


def default_of(key: str) -> Any:
    """Return a setting's default, of the first kind that has it; None where it must be given."""
    classes: list[Any] = [Config]
    for name in key.split("."):
        found = [field for cls in classes for field in settings_of(cls) if key_of(field) == name]
        of = [f.metadata["variants"].classes.values() for f in found if "variants" in f.metadata]
        classes = [one for kinds in of for one in kinds]
        classes += [f.default_factory for f in found if dataclasses.is_dataclass(f.default_factory)]
        if found and not classes:
            default, factory = found[0].default, found[0].default_factory
            made = None if factory is dataclasses.MISSING else factory()
            return made if default is dataclasses.MISSING else default
    return None


@functools.cache
def setting_keys() -> tuple[str, ...]:
    """Return the dotted name of every setting, in order."""
    return tuple(dict.fromkeys(key for key, _ in _leaves(Config)))


@functools.cache
def text_keys() -> frozenset[str]:
    """Return the dotted names of the settings that hold text."""
    return frozenset(key for key, hint in _leaves(Config) if hint in (str, str | None))


@functools.cache
def collections() -> Mapping[str, type]:
    """Return the dotted names of all sections and tables (dict), and of all lists."""
    found: dict[str, type] = {}
    for key, hint in _leaves(Config):
        sections = key.split(".")[:-1]
        found |= {".".join(sections[: n + 1]): dict for n in range(len(sections))}
        if (kind := typing.get_origin(hint)) in (list, dict):
            found[key] = kind
    return found
