"""What files of settings say of a sweep: `hydra/sweeper` and `hydra.sweeper`, as Hydra users do.

    # @package _global_
    defaults:
      - override /hydra/sweeper: optuna
    hydra:
      sweeper:
        n_trials: 20
        params:
          optimizer.learning_rate: interval(1e-4, 1e-2)

Nothing that runs code may come from there: a sweeper is made of whatever classes its settings name.
"""

from __future__ import annotations

import re

import yaml

from launcher.config.commands import COMMAND_LINE_ONLY, command_at, not_allowed
from launcher.config.errors import ConfigError

SECTION, GROUP = "hydra.sweeper", "hydra/sweeper"
PARAMS = f"{SECTION}.params"
_NAME = re.compile(r"[\w./]+")
# What may be text; any other text may name a class, a function or a file.
_TEXTS = (f"{SECTION}.direction", f"{SECTION}.study_name")


def is_of_sweeper(key: str, group: str) -> bool:
    """Return whether a value of a file, or the group it chooses from, is the sweeper's."""
    return f"{key}.".startswith(f"{SECTION}.") or f"{group}/".startswith(f"{GROUP}/")


def check_value(key: str, node: yaml.ScalarNode, commands_allowed: bool, where: str) -> None:
    """Check a value of `hydra.sweeper` in a file.

    Args:
        key: its dotted key.
        node: the value.
        commands_allowed: whether files may set what runs code.
        where: where it stands, in words.

    Raises:
        ConfigError: it may run code, or its meaning depends on something else.
    """
    if "${" in node.value:
        raise ConfigError(
            f"{key}: {node.value} asks for another value, which has no effect here",
            "Write the value itself.",
            where=where,
        )
    if key.startswith(f"{PARAMS}."):
        _check_param(key.removeprefix(f"{PARAMS}."), node.value, commands_allowed, where)
    elif node.tag.endswith(":str") and key not in _TEXTS and not commands_allowed:
        raise not_allowed(key, where)


def _check_param(name: str, value: str, commands_allowed: bool, where: str) -> None:
    """Check what is swept: its values are typed for each point, where a file may say less."""
    if not _NAME.fullmatch(name) or name.partition(".")[0].partition("/")[0] == "hydra":
        raise ConfigError(
            f"{PARAMS}: {name} is not the name of a setting",
            "Write KEY: VALUES, such as train.steps: 1,2.",
            where=where,
        )
    if name.partition(".")[0] in COMMAND_LINE_ONLY:
        raise ConfigError(
            f"{name} can be set only on the command line", "Set it there.", where=where
        )
    # A table may hold a command further below.
    command = command_at(name, "${" if "{" in value else value)
    if command is not None and not commands_allowed:
        raise not_allowed(command, where)
