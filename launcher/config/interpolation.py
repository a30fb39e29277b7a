"""Interpolations: resolved within bounds, and how settings from the environment are written down.

What comes from the environment is written as `${oc.env:X}`: a variable may hold a secret. What is
written of a setting that depends on one is the text that asks for it, which a job resolves again
where it reads its settings; the value is used and never written.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from omegaconf.grammar_visitor import GrammarVisitor
from omegaconf.resolvers import oc

from launcher.config.fields import FromEnvironment, Place

_MOST = 2_000  # interpolations to follow; a second's work
_LARGEST = 2**20  # characters that these may bring in
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")


def resolved(settings: DictConfig) -> tuple[dict[str, Any], dict[Place, str]]:
    """Return the settings resolved, and by place the text of those that ask the environment.

    Raises what OmegaConf does.
    """
    texts = dict(_interpolations(OmegaConf.to_container(settings, resolve=False)))
    found = {}
    with bounded(), _noted_variables() as names:
        for place, text in texts.items():
            names.clear()
            node: Any = settings
            for name in place:
                node = node[name]
            if OmegaConf.is_config(node):
                OmegaConf.to_container(node, resolve=True)
            if names:
                found[place] = text
        return cast(dict[str, Any], OmegaConf.to_container(settings, resolve=True)), found


def noted(tree: Mapping[str, Any], texts: Mapping[Place, str]) -> FromEnvironment:
    """Return what of `tree`, which holds the values, is to be written as one of `texts`."""
    return {place: (text, value) for place, text in texts.items() for value in _values(tree, place)}


def unresolved(tree: Mapping[str, Any], environment: FromEnvironment) -> dict[str, Any]:
    """Return `tree` as it is written down, to be resolved when it is read.

    What still is as it came from the environment becomes the text that asks for it; any other text
    is escaped, so that it is read as it is.
    """
    result: dict[str, Any] = _escaped(tree)
    for place, (text, value) in environment.items():
        if _values(tree, place) == [value]:
            *sections, name = place
            node: Any = result
            for section in sections:
                node = node[section]
            node[name] = text
    return result


def dotted(place: Place) -> str:
    """Return the name of the setting at a place; in a list, the list's own."""
    return ".".join(map(str, itertools.takewhile(lambda name: isinstance(name, str), place)))


def in_shell(text: str) -> str | None:
    """Return the interpolation `text` as a word of bash that asks for the same variables.

    None if bash has no such word.
    """
    plain, names = _VARIABLE.split(text)[::2], _VARIABLE.split(text)[1::2]
    if any("${" in part or "\\" in part for part in plain):
        return None
    quoted = [shlex.quote(part) if part else "" for part in plain]
    asked = [f'"${{{name}?the run takes it from the environment}}"' for name in names]
    return "".join(part + word for part, word in zip(quoted, [*asked, ""], strict=True))


@contextmanager
def bounded() -> Iterator[None]:
    """Limit what the interpolations that are resolved inside may come to, all of them together.

    A few lines in which each asks twice for the next may stand for any number of characters. Beyond
    the limit they raise InterpolationResolutionError.
    """
    follow = GrammarVisitor.visitInterpolation
    followed = brought_in = 0

    def visit(visitor: GrammarVisitor, context: Any) -> Any:
        nonlocal followed, brought_in
        followed += 1
        if followed <= _MOST:
            value = follow(visitor, context)
            brought_in += len(str(value))
            if brought_in <= _LARGEST:
                return value
        raise InterpolationResolutionError(
            f"with the others its interpolations come to more than {_LARGEST:,} characters or "
            f"{_MOST:,} references"
        )

    # OmegaConf has a hook for its resolvers only, and none for `${name}`.
    GrammarVisitor.visitInterpolation = visit  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GrammarVisitor.visitInterpolation = follow  # type: ignore[method-assign]


@contextmanager
def _noted_variables() -> Iterator[list[str]]:
    """Yield a list that grows by the variables that interpolations ask for inside."""
    names: list[str] = []

    def env(key: str, *default: Any) -> Any:
        names.append(key)
        return oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield names
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _interpolations(tree: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    if isinstance(tree, str) and "${" in tree:
        yield place, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if _is_list(tree) else ()
    for name, item in items:
        yield from _interpolations(item, (*place, name))


def _escaped(tree: Any) -> Any:
    """Return `tree` with every text so that OmegaConf reads it as it is."""
    if isinstance(tree, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", tree)
    if isinstance(tree, Mapping):
        return {name: _escaped(item) for name, item in tree.items()}
    return [_escaped(item) for item in tree] if _is_list(tree) else tree


def _values(tree: Any, place: Place) -> list[Any]:
    """Return what is at a place: one value, or none."""
    for name in place:
        try:
            tree = tree[name]
        except (KeyError, IndexError, TypeError):
            return []
    return [tree]


def _is_list(tree: Any) -> bool:
    return isinstance(tree, list | tuple)
