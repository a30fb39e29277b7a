"""Check users' YAML files for what composing would ignore, or report without a place.

`compose` asks `refuse_useless` of every file that took part, and `unusable` where Hydra gave up.
The project's own files are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.base.files import DamagedError
from launcher.config.bounded import node_of
from launcher.config.commands import COMMAND_LINE_ONLY, command_at, not_allowed
from launcher.config.errors import ConfigError
from launcher.config.keys import collections, text_keys
from launcher.config.origin import Source, short
from launcher.config.sweep_files import check_value, is_of_sweeper

_ODD = re.compile(r"[+-]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")  # octal, base 60
_NEEDED = ("model", "dataset", "optimizer", "parallel", "cluster")  # groups
_NULL, _BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def refuse_useless(source: Source, commands_allowed: bool) -> None:
    """Check that the settings of a file have an effect, and the one that was meant.

    Args:
        source: the file.
        commands_allowed: whether its settings may run code.

    Raises:
        ConfigError: a setting would be ignored, or not mean what it seems to.
    """
    if problem := _problem(source.path):
        raise _no_settings(source.path, problem)
    section = source.package.partition(".")[0]
    for key, node in _scalars(node_of(source.path), source.package):
        top = key.partition(".")[0]
        if section == "hydra" or top == "hydra" or _is_hydras_group(key, node):
            if is_of_sweeper(key, group := _group(key)):
                if group or key == f"{source.package}.defaults":
                    continue  # the file that it chooses is looked at itself
                check_value(key, node, commands_allowed, _place(source.path, node))
                continue
            raise ConfigError(
                "hydra is Hydra's own section, of which only hydra.sweeper has an effect here",
                "Runs are placed by run.dir and run.id; sweeps are asked for with -m.",
                where=_place(source.path, node),
            )
        if group := _switched_off(key.removeprefix(f"{source.package}."), node):
            raise ConfigError(
                f"{group}: null chooses nothing, and every run needs a {group}",
                "Name an option, or leave the line out.",
                where=_place(source.path, node),
            )
        if top in COMMAND_LINE_ONLY and node.value != "false":  # as `--cfg` prints it
            raise ConfigError(
                f"{top} can be set only on the command line: a file that allows itself would "
                "protect from nothing",
                f"Write {top}={COMMAND_LINE_ONLY[top]} on the command line.",
                where=_place(source.path, node),
            )
        command = None if commands_allowed or _is_nothing(node) else command_at(key, node.value)
        if command is not None:
            raise not_allowed(command, _place(source.path, node))
        is_number = node.style is None and node.tag in _NUMBERS
        if is_number and key not in text_keys() and _ODD.fullmatch(node.value):
            read = yaml.safe_load(node.value)
            raise ConfigError(
                f"{key}: {node.value} is read as {read}",
                "Write numbers with decimal digits, and without a 0 in front.",
                where=_place(source.path, node),
            )


def refuse_unreadable(path: Path) -> None:
    """Raise ConfigError for a file that cannot hold settings at all, before anything loads it."""
    try:
        node_of(path)
    except OSError as error:
        raise _no_settings(path, f"cannot be read: {error.strerror}") from None
    except DamagedError as error:
        raise _no_settings(path, str(error).removeprefix("it ")) from None
    except yaml.YAMLError:
        pass  # which the loading itself says, with its line


def unusable(chosen: Sequence[str], folders: Sequence[Path]) -> ConfigError | None:
    """Return the first file that cannot hold settings at all, as an error.

    Args:
        chosen: the files that are looked at, by their names below `folders` (`recipe/mine`); those
            that these choose in turn are, too.
        folders: the folders of settings, in the order in which they are searched.
    """
    waiting, seen = list(chosen), set()
    while waiting:
        name = waiting.pop(0)
        file = next((f for folder in folders if (f := folder / f"{name}.yaml").is_file()), None)
        if file is None or file in seen:
            continue
        seen.add(file)
        if problem := _problem(file):
            return _no_settings(file, problem)
        waiting += _chosen_by(node_of(file), name.rpartition("/")[0])
    return None


def _chosen_by(root: yaml.Node | None, group: str) -> Iterator[str]:
    """Yield the files that the defaults list of a file in `group` names, without their folders."""
    for key, node in _scalars(root, ""):
        said, _, within = key.partition(".")
        if said != "defaults":
            continue
        words = [within, node.value] if within else [node.value]
        name = "/".join(re.sub(r"^(override|optional)\s+|@.*", "", word) for word in words)
        yield name.lstrip("/") if name.startswith("/") or not group else f"{group}/{name}"


def misshapen(sources: Sequence[Source]) -> ConfigError | None:
    """Return the first list where a table belongs, or the reverse, as an error.

    Hydra merges neither, nor names it.
    """
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


def choices(content: Any) -> dict[str, str]:
    """Return the options that a file's defaults list chooses, by group.

    They stand there as `group: option` or `override /group: option`. `content` is the file's, as
    plain data.
    """
    defaults = content.get("defaults") if isinstance(content, dict) else None
    return {
        str(name).removeprefix("override ").lstrip("/").partition("@")[0]: str(choice)
        for entry in defaults or ()
        if isinstance(entry, dict)
        for name, choice in entry.items()
    }


def _no_settings(file: Path, problem: str) -> ConfigError:
    return ConfigError(f"{short(file)} {problem}", "It must hold names and values.")


def _problem(file: Path) -> str:
    try:
        root = node_of(file)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except DamagedError as error:
        return str(error).removeprefix("it ")
    except yaml.YAMLError as error:
        return f"is not YAML: {' '.join(str(error).split())}"
    if root is None:
        return ""
    if not isinstance(root, yaml.MappingNode):
        return "does not hold settings"
    said = (value for name, value in reversed(root.value) if name.value == "defaults")
    defaults = next(said, None)
    if defaults is None:
        return ""
    if not isinstance(defaults, yaml.SequenceNode):
        return "has defaults that are not a list, such as [override /model: gpt]"
    for entry in defaults.value:
        fine = isinstance(entry, yaml.ScalarNode) and entry.tag.endswith(":str")
        if not fine and not (isinstance(entry, yaml.MappingNode) and len(entry.value) == 1):
            return "has defaults with an entry that is not 'group: option'"
    return ""


def scalars(source: Source) -> Iterator[tuple[str, str, yaml.ScalarNode]]:
    """Yield every value of a file with its dotted key, and the group that it chooses from."""
    for key, node in _scalars(source.node, source.package):
        yield key, _group(key), node


def _scalars(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Yield every value below `node` with its dotted key; those of a list have the list's."""
    for inner, found in _nodes(node, key):
        if isinstance(found, yaml.ScalarNode):
            yield inner, found


def _nodes(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yield `node` and everything below it, likewise."""
    if node is not None:
        yield key, node
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item, key)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _nodes(value, f"{key}.{name.value}" if key else str(name.value))


def _is_nothing(node: yaml.ScalarNode) -> bool:
    """Return whether a value is null or false."""
    return node.tag == _NULL or (node.tag == _BOOL and not yaml.safe_load(node.value))


def _is_hydras_group(key: str, node: yaml.ScalarNode) -> bool:
    return _group(key).partition("/")[0] == "hydra"


def _switched_off(key: str, node: yaml.ScalarNode) -> str:
    """Return the group of which a defaults list chooses no option, though each run needs one.

    It is "" if there is none. Hydra leaves out what was chosen before, and the schema would fill it
    in again.
    """
    return group if node.tag == _NULL and (group := _group(key)) in _NEEDED else ""


def _group(key: str) -> str:
    """Return which group an entry of a defaults list chooses from; "" for any other value."""
    said, _, word = key.partition(".")
    return (
        word.removeprefix("override ").lstrip("/").partition("@")[0] if said == "defaults" else ""
    )


def _place(path: Path, node: yaml.Node) -> str:
    return f"in {short(path)}:{node.start_mark.line + 1}"
