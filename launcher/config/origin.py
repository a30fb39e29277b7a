"""Find where a setting was given, the command line or a file's line, for error messages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override

from launcher.config.bounded import node_of
from launcher.config.overrides import COMMAND_LINE

ON_COMMAND_LINE = sys.maxsize  # a rank above that of every file


@dataclass(frozen=True)
class Source:
    """A YAML file that took part, and the dotted section that its top level fills ("" for all).

    `is_own`: it is the project's.
    """

    path: Path
    package: str
    is_own: bool = False

    @functools.cached_property
    def node(self) -> yaml.Node | None:
        """Returns what the file holds, read once; raises like `node_of`."""
        return node_of(self.path)


@dataclass(frozen=True)
class Origin:
    """Everything that was said, in the order in which it was merged: later beats earlier."""

    sources: Sequence[Source]
    overrides: Sequence[Override]
    groups: Collection[str]

    def of(self, keys: Sequence[str]) -> str:
        """Return where `keys` were said, in words; "" for defaults of the schema."""
        found = {key: place for key in keys if (place := self._of_one(key))}
        if len(keys) == 1 or len(set(found.values())) == 1 == len(found) / len(keys):
            return next(iter(found.values()), "")
        return ", ".join(f"{key} {place}" for key, place in found.items())

    def _of_one(self, key: str) -> str:
        rank = self.rank(key)
        if rank == ON_COMMAND_LINE:
            return COMMAND_LINE
        if rank < 0:
            return ""
        source = self.sources[rank]
        return f"in {short(source.path)}:{_line(source, key)}"

    def rank(self, key: str) -> int:
        """Return how late `key` was said: `ON_COMMAND_LINE`, the place in `sources`, or -1."""
        for override in self.overrides:
            said, value = override.key_or_group, override.value()
            is_option = said in self.groups and not isinstance(value, dict)
            if is_option and key in (said, f"{said}.name") and key != "cluster.name":
                return ON_COMMAND_LINE  # that one is no option's name
            if not is_option and any(_related(one, key) for one, _ in leaves(said, value)):
                return ON_COMMAND_LINE
        places = reversed(list(enumerate(self.sources)))
        return next((place for place, source in places if _line(source, key)), -1)

    def is_users(self, key: str) -> bool:
        """Return whether `key` was said in a user's file, and not after that in one of ours."""
        rank = self.rank(key)
        return 0 <= rank < len(self.sources) and not self.sources[rank].is_own


def short(path: Path) -> str:
    """Return `path` relative to the working directory if it is below it, otherwise in full."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a value sets, with their values; of a table those in it."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, inner in value.items():
        yield from leaves(f"{key}.{name}", inner)


def _related(said: str, key: str) -> bool:
    return said == key or said.startswith(key + ".") or key.startswith(said + ".")


def _line(source: Source, key: str) -> int:
    """Return the line (from 1) at which `source` sets `key`; 0 if it does not."""
    prefix = source.package.split(".") if source.package else []
    path = key.split(".")
    if path[: len(prefix)] != prefix:
        return 0
    node = source.node
    line = 0
    for name in path[len(prefix) :]:
        if not isinstance(node, yaml.MappingNode):
            return 0
        for name_node, value_node in reversed(node.value):
            if name_node.value == name:
                line, node = name_node.start_mark.line + 1, value_node
                break
        else:
            return 0
    return line
