"""What a file says of an option of its own choice counts only while that option is chosen.

A recipe picks `parallel: manual` and says how many stages; with `parallel=data` on the command line
the stages mean nothing. Pure but for reading files that have been read before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from launcher.config.files import choices
from launcher.config.origin import Source

Tree = dict[str, Any]


def without_leftovers(
    tree: Tree, sources: Sequence[Source], overrides: Sequence[Override], groups: Mapping[str, Any]
) -> Tree:
    """`tree`, composed of `sources` and `overrides` and not yet resolved, without what a file says
    of a group of which the command line has chosen another option than that file."""
    sections = groups.keys() & tree.keys()
    chosen = {
        o.key_or_group: str(o.value())
        for o in overrides
        if o.key_or_group in sections and not isinstance(o.value(), dict)
    }
    files = [(source, _content(source)) for source in sources] if chosen else []
    for group, option in chosen.items():
        kept = [
            _part(source, content, group)
            for source, content in files
            if choices(content).get(group, option) == option or source.package == group
        ]
        if len(kept) == len(files):
            continue
        section: Tree = {}
        for part in kept:
            section = _merged(section, part)
        for key in _said(overrides, group):
            section = _merged(section, _only(tree[group], key))
        tree = {**tree, group: section}
    return tree


def _content(source: Source) -> Any:
    return OmegaConf.to_container(OmegaConf.load(source.path))


def _part(source: Source, content: Any, group: str) -> Tree:
    """What a file says of the section `group`."""
    part = {name: value for name, value in content.items() if name != "defaults"}
    for name in reversed(source.package.split(".") if source.package else ()):
        part = {name: part}
    return part.get(group) or {}


def _said(overrides: Sequence[Override], group: str) -> Iterator[list[str]]:
    """The settings of the section that the command line sets, without the section's name."""
    for override in overrides:
        section, _, key = override.key_or_group.partition(".")
        if section != group:
            continue
        if key:
            yield key.split(".")
        elif isinstance(table := override.value(), dict):
            yield from ([str(name)] for name in table)


def _only(tree: Any, names: Sequence[str]) -> Any:
    """`tree` with nothing in it but what these names lead to."""
    return {names[0]: _only(tree[names[0]], names[1:])} if names else tree


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    both = {name: _merged(below[name], above[name]) for name in below.keys() & above.keys()}
    return {**below, **above, **both}
