"""Where a setting was said: the command line, or a file and its line. For error messages only.

`node_of` reads a file as YAML nodes, which know their lines; `files` looks at them, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.override_parser.types import Override

from launcher.config.overrides import COMMAND_LINE


@dataclass(frozen=True)
class Source:
    """A YAML file that took part, and the dotted section that its top level fills ("" for all)."""

    path: Path
    package: str


@dataclass(frozen=True)
class Origin:
    """Everything that was said, in the order in which it was merged: later beats earlier."""

    sources: Sequence[Source]
    overrides: Sequence[Override]
    groups: Collection[str]

    def of(self, keys: Sequence[str]) -> str:
        """Where `keys` were said, in words; "" for what no one said (a default of the schema)."""
        found = {key: place for key in keys if (place := self._of_one(key))}
        if len(keys) == 1 or len(set(found.values())) == 1 == len(found) / len(keys):
            return next(iter(found.values()), "")
        return ", ".join(f"{key} {place}" for key, place in found.items())

    def _of_one(self, key: str) -> str:
        for override in reversed(self.overrides):
            said = override.key_or_group
            if said in self.groups and key in (said, f"{said}.name"):
                return COMMAND_LINE
            if said not in self.groups and _related(said, key):
                return COMMAND_LINE
        for source in reversed(self.sources):
            line = _line(source, key)
            if line:
                return f"in {short(source.path)}:{line}"
        return ""


def short(path: Path) -> str:
    """`path` from the working directory where it lies below it, otherwise in full."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def node_of(path: Path) -> yaml.Node | None:
    """What the YAML file holds, with its places; None of an empty one. Merge keys (`<<`) are
    followed: what they bring in stands before a table's own names, which win.

    Raises OSError, UnicodeDecodeError and yaml.YAMLError.
    """
    loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    try:
        node: yaml.Node | None = loader.get_single_node()
        _follow_merges(loader, node)
        return node
    finally:
        loader.dispose()


def _follow_merges(loader: yaml.SafeLoader, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        for _, value in node.value:
            _follow_merges(loader, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _follow_merges(loader, item)


def _related(said: str, key: str) -> bool:
    return said == key or said.startswith(key + ".") or key.startswith(said + ".")


def _line(source: Source, key: str) -> int:
    """The line (from 1) at which `source` sets `key`; 0 where it does not."""
    prefix = source.package.split(".") if source.package else []
    path = key.split(".")
    if path[: len(prefix)] != prefix:
        return 0
    node = node_of(source.path)
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
