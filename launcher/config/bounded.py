"""Read YAML that anybody may have written, within bounds of size, depth and expanded anchors.

A few lines of anchors may stand for any amount of data, so it is counted as if written out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from launcher.base.files import DamagedError, read_text

_LARGEST = 2**18  # bytes; PyYAML reads as many in a second
_MOST = 20_000  # names and values
_DEEPEST = 64  # levels; fewer than JSON may have, which checkpoints keep them as
_INTERPOLATION = 20  # names and values that take as long as one to parse
_INNERMOST = 32  # levels inside an interpolation; its parser takes a hundred at most
_DIGITS = 1000  # of a whole number; Python itself reads no more than 4300
_WHOLE = "tag:yaml.org,2002:int"


def node_of(path: Path) -> yaml.Node | None:
    """Return what the YAML file holds, with its places; None for an empty one.

    Merge keys (`<<`) are followed: what they bring in stands before a table's own names, which win.

    Raises OSError, DamagedError and yaml.YAMLError.
    """
    loader = yaml.SafeLoader(read_text(path, _LARGEST))
    try:
        node = _composed(loader)
        _follow_merges(loader, node)
        return node
    finally:
        loader.dispose()


def tree_of(path: Path) -> Any:
    """Return what the YAML file stands for; raises like `node_of`."""
    loader = yaml.SafeLoader(read_text(path, _LARGEST))
    try:
        node = _composed(loader)
        return None if node is None else loader.construct_document(node)
    except (ValueError, TypeError) as error:  # such as a date that there is not
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"it is not YAML: {error}") from None
    finally:
        loader.dispose()


def is_too_deep(tree: Any) -> bool:
    """Return whether tables and lists that were not read from a file are beyond the bounds."""
    level = [tree]
    for _ in range(_DEEPEST):
        tables = [one for one in level if isinstance(one, dict)]
        lists = [one for one in level if isinstance(one, list)]
        if any(isinstance(one, str) and _is_too_deep_inside(one) for one in level):
            return True
        level = [value for table in tables for value in table.values()]
        level += [value for one in lists for value in one]
        if not level:
            return False
    return True


def _composed(loader: yaml.SafeLoader) -> yaml.Node | None:
    try:
        node: yaml.Node | None = loader.get_single_node()
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    if node is not None:
        _measure(node, {}, [])
    return node


def _measure(
    node: yaml.Node, known: dict[int, tuple[int, int]], above: list[int]
) -> tuple[int, int]:
    """Return how many names and values a node stands for, and on how many levels."""
    if id(node) in known:
        return known[id(node)]
    if id(node) in above:
        raise DamagedError("it has an anchor inside what it stands for, which has no end")
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [one for pair in node.value for one in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif _is_too_deep_inside(node.value):
        raise DamagedError(f"it has an interpolation nested more than {_INNERMOST} levels deep")
    elif node.tag == _WHOLE and len(node.value) > _DIGITS:
        raise DamagedError(f"it holds a number of {len(node.value)} digits")
    if len(above) == _DEEPEST:
        raise DamagedError(f"it is nested more than {_DEEPEST} levels deep")
    found = [_measure(one, known, [*above, id(node)]) for one in inner]
    size = 1 + sum(size for size, _ in found)
    if isinstance(node, yaml.ScalarNode):
        size += _INTERPOLATION * node.value.count("${")
    levels = 1 + max((levels for _, levels in found), default=0)
    if size > _MOST:
        raise DamagedError(
            f"it stands for more than {_MOST:,} names and values, of which an interpolation counts "
            f"as {_INTERPOLATION}"
        )
    if len(above) + levels > _DEEPEST:
        raise DamagedError(f"it is nested more than {_DEEPEST} levels deep")
    known[id(node)] = size, levels
    return size, levels


def _is_too_deep_inside(text: str) -> bool:
    """Return whether a text nests interpolations deeper than their parser can follow."""
    level = 0
    for bracket in re.findall(r"[][{}]", text) if "${" in text else ():
        level = level + 1 if bracket in "[{" else max(level - 1, 0)
        if level > _INNERMOST:
            return True
    return False


def _follow_merges(loader: yaml.SafeLoader, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        for _, value in node.value:
            _follow_merges(loader, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _follow_merges(loader, item)
