"""List all settings by their dotted names, over all models and datasets."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.config.fields import key_of, settings_of
from launcher.config.schema import Config


def _leaves(cls: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the annotation of every setting below `cls`, of all variants."""
    hints = typing.get_type_hints(cls)
    for field in settings_of(cls):
        name = key_of(field)
        key = f"{section}.{name}" if section else name
        if "variants" in field.metadata:
            for variant in field.metadata["variants"].classes.values():
                yield from _leaves(variant, key)
        elif dataclasses.is_dataclass(hints[field.name]):
            yield from _leaves(hints[field.name], key)
        else:
            yield key, hints[field.name]


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
