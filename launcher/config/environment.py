"""Values from the environment (`${oc.env:X}`), which may be secret, and settings that run code.

A setting from the environment is written as the interpolation, which a job resolves again where it
reads its settings; the value is used and never written. Of some settings the value itself is handed
on, to Weights & Biases, to a file's name or to a batch script: those a variable may not fill.

A settings file may come from anywhere. It may set what runs code only with `allow_commands` on the
command line; `allow_modules` is the like for modules.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from launcher.config.cluster import SlurmCluster
from launcher.config.errors import ConfigError
from launcher.config.fields import FromEnvironment, Place
from launcher.config.reader import setting_keys
from launcher.config.schema import Config

_VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")
_SHOWN = ("run.id", *(f"wandb.{name}" for name in ("project", "entity", "group", "name", "tags")))
_IN_SCRIPT = ("cluster.hosts", "cluster.gpus", "cluster.slurm")
# Settings of the job that its script does not hold; of `env` it holds the name of the variable.
_NOT_IN_SCRIPT = tuple(
    f"cluster.slurm.{name}"
    for name in ("env", "network_interface", "start_timeout", "dry_run", "wait")
)

# Settings that a file cannot set, each with a value.
COMMAND_LINE_ONLY = {"allow_modules": "[…]", "allow_commands": "true"}

# Shell lines, programs and their folders, and variables that programs load code by.
_COMMANDS = (
    *("cluster.slurm.setup", "cluster.slurm.env", "cluster.slurm.python"),
    *("cluster.slurm.container", "cluster.slurm.srun_args", "cluster.slurm.extra"),
)


def resolved(settings: DictConfig) -> tuple[dict[str, Any], dict[Place, str]]:
    """Return the settings resolved, and by place the text of those that ask the environment.

    Raises what OmegaConf does.
    """
    texts = dict(_interpolations(OmegaConf.to_container(settings, resolve=False)))
    found = {}
    with _noted_variables() as names:
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
    """Return the values of `tree` that are written as interpolations, with these."""
    return {place: (text, value) for place, text in texts.items() for value in _values(tree, place)}


def unresolved(tree: Mapping[str, Any], environment: FromEnvironment) -> dict[str, Any]:
    """Return `tree` with interpolations in place of values from the environment.

    A value that has changed since stays. Any other text is escaped, so that it is read as it is.
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
    """Return the value at a place in a list; an empty list if there is none."""
    for name in place:
        try:
            tree = tree[name]
        except (KeyError, IndexError, TypeError):
            return []
    return [tree]


def _is_list(tree: Any) -> bool:
    return isinstance(tree, list | tuple)


def check_sizes(texts: Mapping[Place, str]) -> None:
    """Raise ConfigError for an entry of the table of sizes that a variable fills.

    This comes before anything that would print its value or copy it to the model's dimensions.
    """
    for key in map(dotted, texts):
        if below(key, ("model.sizes",)):
            raise _refused(key, "is a table of sizes, not one model's", "Set the model's own.")


def check_environment(config: Config, texts: Mapping[Place, str]) -> None:
    """Raise ConfigError for a setting of those at `texts` that a variable may not fill."""
    for place, text in texts.items():
        key = dotted(place)
        if not below(key, setting_keys()):
            raise _refused(key, "is a whole section, which no variable can hold", "Write it out.")
        if below(key, _SHOWN):
            raise _refused(key, "is shown and sent to others", _by_the_shell(key))
        if not isinstance(config.cluster, SlurmCluster):
            continue
        if below(key, _IN_SCRIPT) and not below(key, _NOT_IN_SCRIPT):
            raise _refused(key, "is written into the job's script", _by_the_shell(key))
        if below(key, ("cluster.slurm.env",)) and (len(place) == 3 or in_shell(text) is None):
            raise _refused(key, "is more than a job's script can ask for", "Write ${oc.env:NAME}.")


def below(key: str, keys: Iterable[str]) -> bool:
    """Return whether a setting is one of `keys` or within one of these sections."""
    return any(f"{key}.".startswith(f"{name}.") for name in keys)


def _refused(key: str, why: str, remedy: str) -> ConfigError:
    problem = f"{key} {why}, and takes its value from a variable of the environment"
    return ConfigError(problem, remedy, [key])


def _by_the_shell(key: str) -> str:
    return f"Have the shell put it in, on the command line: {key}=$NAME."


def command_at(key: str, value: str) -> str | None:
    """Return the setting that runs code and that a file's `value` at `key` would set."""
    if below(key, _COMMANDS):
        return key
    within = (command for command in _COMMANDS if command.startswith(f"{key}."))
    return next(within, None) if "${" in value else None  # a section from somewhere else


def not_allowed(command: str, where: str = "") -> ConfigError:
    """Return the error for a file that decides `command`."""
    return ConfigError(
        f"{command} runs code, so no file may set it",
        "If you trust the file, add allow_commands=true on the command line.",
        [command],
        where,
        code="not_allowed",
    )


def commands_in(config: Config) -> Iterator[str]:
    """Yield the settings that run code and that `config` sets, with those within tables."""
    tree, untouched = dataclasses.asdict(config), dataclasses.asdict(Config(cluster=SlurmCluster()))
    for command in _COMMANDS:
        place = tuple(command.split("."))
        values, defaults = (
            {key: value for found in _values(one, place) for key, value in leaves(command, found)}
            for one in (tree, untouched)
        )
        yield from (key for key, value in values.items() if value != defaults.get(key))


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a value sets, with those within tables, and their values."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, inner in value.items():
        yield from leaves(f"{key}.{name}", inner)
