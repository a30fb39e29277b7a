"""Drop what a file says of an option that it chose when another option is chosen.

A recipe picks `parallel: manual` and says how many stages; with `parallel=data` on the command line
the stages mean nothing. With `parallel.method=data` neither do those of `conf/parallel/auto.yaml`.
Pure but for reading files that have been read before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from launcher.config.files import choices
from launcher.config.origin import Source
from launcher.config.schema import Config

Tree = dict[str, Any]


def without_leftovers(
    tree: Tree, sources: Sequence[Source], overrides: Sequence[Override], groups: Mapping[str, Any]
) -> Tree:
    """Return the tree without what files say of options that are not chosen.

    Args:
        tree: composed of `sources` and `overrides`, and not yet resolved.
        sources: the files that took part.
        overrides: what the command line says.
        groups: the groups of files, by their names.
    """
    sections = groups.keys() & tree.keys()
    chosen = {
        o.key_or_group: str(o.value())
        for o in overrides
        if o.key_or_group in sections and not isinstance(o.value(), dict)
    }
    content = functools.cache(_content)
    users = [(source, content(source)) for source in sources if not source.is_own]
    options = {
        name: content(source)
        for name in chosen
        for source in sources
        if source.package == name and source.path.stem == chosen[name]
    }
    kinds = _kinds(tree, users, overrides, options)
    for group in dict.fromkeys((*chosen, *kinds)):
        files = [one for one in sources if one.package.partition(".")[0] in ("", group)]
        parts = [(one, _part(one, content(one), group)) for one in files]
        kept = [
            part
            for source, part in parts
            if _is_chosen(source, content(source), group, chosen.get(group))
            and all(part.get(key, kind) == kind for key, kind in kinds.get(group, {}).items())
        ]
        if len(kept) == len(parts):
            continue
        section: Tree = {}
        for part in kept:
            section = _merged(section, part)
        for key in _said(overrides, group):
            section = _merged(section, _only(tree[group], key))
        tree = {**tree, group: section}
    return tree


def _kinds(
    tree: Tree,
    files: Sequence[tuple[Source, Any]],
    overrides: Sequence[Override],
    options: Mapping[str, Any],
) -> dict[str, Tree]:
    """Return the kinds of sections whose kind the user says; what another kind says is dropped.

    The command line comes first, then the option that it chose, then the user's files.

    Args:
        tree: all that was said.
        files: the user's files, and what is in them.
        overrides: what the command line says.
        options: by section, what the file says that the command line has chosen.

    Returns:
        By section a table of one: the setting that names the kind, and the kind.
    """
    found = {}
    for field in dataclasses.fields(Config):
        name, variants, section = field.name, field.metadata.get("variants"), tree.get(field.name)
        if variants is None or not isinstance(section, dict) or variants.key not in section:
            continue
        on_command_line = [variants.key] in _said(overrides, name)
        option = options.get(name)
        if not on_command_line and isinstance(option, dict) and variants.key in option:
            found[name] = {variants.key: option[variants.key]}
        elif on_command_line or any(variants.key in _part(*file, name) for file in files):
            found[name] = {variants.key: section[variants.key]}
    return found


def _is_chosen(source: Source, content: Any, group: str, option: str | None) -> bool:
    """Return whether a file is for the option that is chosen, where one is."""
    if option is None or source.package == group:
        return True
    return choices(content).get(group, option) == option


def _content(source: Source) -> Any:
    return OmegaConf.to_container(OmegaConf.load(source.path))


def _part(source: Source, content: Any, group: str) -> Tree:
    """Return what a file says of the section `group`."""
    if not isinstance(content, dict):
        return {}
    part: Any = {name: value for name, value in content.items() if name != "defaults"}
    for name in reversed(source.package.split(".") if source.package else ()):
        part = {name: part}
    found = part.get(group)
    return found if isinstance(found, dict) else {}


def _said(overrides: Sequence[Override], group: str) -> Iterator[list[str]]:
    """Yield the settings of the section that the command line sets, without the section's name."""
    for override in overrides:
        section, _, key = override.key_or_group.partition(".")
        if section != group:
            continue
        if key:
            yield key.split(".")
        elif isinstance(table := override.value(), dict):
            yield from ([str(name)] for name in table)


def _only(tree: Any, names: Sequence[str]) -> Any:
    """Return `tree` with nothing in it but what these names lead to."""
    return {names[0]: _only(tree[names[0]], names[1:])} if names else tree


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    both = {name: _merged(below[name], above[name]) for name in below.keys() & above.keys()}
    return {**below, **above, **both}
