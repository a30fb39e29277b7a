"""What is wrong with a YAML file of the user's, where composing would pass over it or not name it.

`compose` asks `refuse_useless` of every file that took part, and `unusable` where Hydra gave up.
The project's own files are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from launcher.config.errors import ConfigError
from launcher.config.keys import collections, text_keys
from launcher.config.origin import Source, node_of, short

_ODD = re.compile(r"[+-]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")  # octal, base 60
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def refuse_useless(source: Source) -> None:
    """Raises ConfigError for what the file says and what would not be followed, or not as meant."""
    if problem := _problem(source.path):
        raise _no_settings(source.path, problem)
    section = source.package.partition(".")[0]
    for key, node in _scalars(node_of(source.path), source.package):
        top = key.partition(".")[0]
        if section == "hydra" or top == "hydra" or _is_hydras_group(key, node):
            raise ConfigError(
                "hydra is Hydra's own section, which has no effect here",
                "Runs are placed by run.dir and run.id; sweeps are asked for with -m.",
                where=_place(source.path, node),
            )
        if top == "allow_modules":
            raise ConfigError(
                "allow_modules is for the command line alone: a file that allows itself would "
                "protect from nothing",
                "Write allow_modules=[…] on the command line.",
                where=_place(source.path, node),
            )
        is_number = node.style is None and node.tag in _NUMBERS
        if is_number and key not in text_keys() and _ODD.fullmatch(node.value):
            read = yaml.safe_load(node.value)
            raise ConfigError(
                f"{key}: {node.value} is read as {read}",
                "Write numbers with decimal digits, and without a 0 in front.",
                where=_place(source.path, node),
            )


def unusable(folders: Sequence[Path]) -> ConfigError | None:
    """The first file below `folders` that cannot hold settings at all, as an error."""
    for file in (file for folder in folders for file in sorted(folder.rglob("*.yaml"))):
        if problem := _problem(file):
            return _no_settings(file, problem)
    return None


def misshapen(sources: Sequence[Source]) -> ConfigError | None:
    """The first list where a table belongs, or the reverse: Hydra merges neither, nor names it."""
    wanted: dict[type, tuple[type, str]] = {
        yaml.MappingNode: (list, "a list, not a table"),
        yaml.SequenceNode: (dict, "a table, not a list"),
    }
    for source in sources:
        for key, node in _nodes(node_of(source.path), source.package):
            kind, words = wanted.get(type(node), (None, ""))
            if kind and collections().get(key) is kind:
                return ConfigError(f"{key} must be {words}", where=_place(source.path, node))
    return None


def _no_settings(file: Path, problem: str) -> ConfigError:
    return ConfigError(f"{short(file)} {problem}", "It has to hold names and values.")


def _problem(file: Path) -> str:
    try:
        root = node_of(file)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return "is not text in UTF-8"
    except yaml.YAMLError as error:
        return f"is not YAML: {' '.join(str(error).split())}"
    except RecursionError:
        return "has an anchor inside what it stands for, which has no end"
    if root is None:
        return ""
    if not isinstance(root, yaml.MappingNode):
        return "is no table of settings"
    said = (value for name, value in reversed(root.value) if name.value == "defaults")
    defaults = next(said, None)
    if defaults is None:
        return ""
    if not isinstance(defaults, yaml.SequenceNode):
        return "has defaults that are no list, such as [override /model: gpt]"
    for entry in defaults.value:
        fine = isinstance(entry, yaml.ScalarNode) and entry.tag.endswith(":str")
        if not fine and not (isinstance(entry, yaml.MappingNode) and len(entry.value) == 1):
            return "has defaults with an entry that is not 'group: option'"
    return ""


def _scalars(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Every value below `node` with its dotted key; those of a list all have the list's."""
    for inner, found in _nodes(node, key):
        if isinstance(found, yaml.ScalarNode):
            yield inner, found


def _nodes(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.Node]]:
    """`node` and everything below it, likewise."""
    if node is not None:
        yield key, node
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item, key)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _nodes(value, f"{key}.{name.value}" if key else str(name.value))


def _is_hydras_group(key: str, node: yaml.ScalarNode) -> bool:
    word = key.removeprefix("defaults.").removeprefix("override ").lstrip("/")
    return key.startswith("defaults.") and word.partition("/")[0] == "hydra"


def _place(path: Path, node: yaml.Node) -> str:
    return f"in {short(path)}:{node.start_mark.line + 1}"
