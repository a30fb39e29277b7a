"""Settings as YAML, with the place in which each was said: `--cfg job --sources`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from launcher.config.origin import Origin

_COLUMN = 50  # where comments begin, if a line is no longer


def annotated(tree: Mapping[str, Any], origin: Origin, section: str = "") -> str:
    """Return a tree of settings as YAML, with a comment a setting.

    Args:
        tree: the settings, or a section of them.
        origin: where they were said.
        section: the dotted name of the section; "" for all settings.
    """
    return "".join(f"{line}\n" for line in _lines(tree, origin, section, ""))


def _lines(tree: Mapping[str, Any], origin: Origin, section: str, indent: str) -> Iterator[str]:
    for name, value in tree.items():
        key = f"{section}.{name}" if section else str(name)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, origin, key, indent + "  ")
            continue
        where = origin.of([key]).removeprefix("in ") or "default"
        yield f"{f'{indent}{_text(name)}: {_text(value)}':<{_COLUMN}}  # {where}"


def _text(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").rstrip()
