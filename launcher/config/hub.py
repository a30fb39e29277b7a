"""Settings that name repositories of the Hugging Face hub, pinned to commits as they are composed.

A run's `config.yaml` thus holds the commits, and a run that resumes takes the files it began with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from launcher.base import hub
from launcher.config.errors import ConfigError
from launcher.config.fields import Place, key_of, settings_of
from launcher.config.schema import Config
from launcher.config.sources import Tree, plan_of_run, settings_beside


def hub_settings(tree: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings that may name a repository: the section, the name, and what it holds."""
    for section in dataclasses.fields(Config):
        kind: Any = section.default_factory
        if variants := section.metadata.get("variants"):
            chosen = _section(tree, section.name).get(variants.key)
            kind = variants.classes.get(chosen) if isinstance(chosen, str) else None
        if dataclasses.is_dataclass(kind):
            for one in settings_of(kind):
                if "hub" in one.metadata:
                    yield section.name, key_of(one), one.metadata["hub"]


def pins(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings that name a repository, and what they name."""
    for section, name, _ in hub_settings(dataclasses.asdict(config)):
        if hub.is_name(text := getattr(getattr(config, section), name)):
            yield f"{section}.{name}", text


@contextmanager
def naming(key: str, text: object) -> Iterator[None]:
    """Raise a ConfigError about a setting where its repository cannot be had inside."""
    try:
        yield
    except hub.HubError as error:
        problem = f"{key}={text} {error.problem}"
        raise ConfigError(problem, error.remedy, [key], code="input") from None


def with_commits(tree: Tree, texts: dict[Place, str]) -> Tree:
    """Return resolved settings with a commit for each revision of the hub that they name.

    A model's own settings and tokenizer are then in the cache. A run that is there already keeps
    the commit that it began with, unless the name has a revision.

    Args:
        tree: the settings.
        texts: those of values from the environment; what has a commit now is no longer one.

    Raises:
        ConfigError: a repository cannot be had.
    """
    for section, name, holds in hub_settings(tree):
        if hub.is_name(text := _section(tree, section).get(name)):
            key, plan = f"{section}.{name}", plan_of_run(tree)
            run = settings_beside(str(plan)) if plan else {}
            with naming(key, text):
                pinned = hub.pin(_as_before(text, _section(run, section).get(name)))
                if holds == "model":
                    hub.fetch(pinned, hub.is_small)
            tree = {**tree, section: {**tree[section], name: pinned}}
            texts.pop((section, name), None)
    return tree


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section as it was written; one that is none, which the reader refuses, is empty."""
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def _as_before(text: Any, before: Any) -> str:
    """Return the name with the commit that a run has, if the text says no revision."""
    same = hub.is_name(before) and hub.HubName.of(before).at(None)
    return str(before if same == hub.HubName.of(text) else text)
