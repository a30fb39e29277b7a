"""The settings that run code, which no file may set unless the command line says so.

A settings file may come from anywhere. What it says of these is refused without `allow_commands`;
what the command line says itself never is. `allow_modules` is the like for modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from launcher.config.errors import ConfigError
from launcher.config.machines import SlurmCluster
from launcher.config.origin import leaves
from launcher.config.schema import Config

# Settings of which a file can say nothing, each with a value.
COMMAND_LINE_ONLY = {"allow_modules": "[…]", "allow_commands": "true"}

# Shell lines, programs and their folders, and variables that programs load code by.
_COMMANDS = (
    *("cluster.slurm.setup", "cluster.slurm.env", "cluster.slurm.python"),
    *("cluster.slurm.container", "cluster.slurm.srun_args", "cluster.slurm.extra"),
)


def command_at(key: str, value: str) -> str | None:
    """Return the setting that runs code and that `value`, at `key` of a file, would decide."""
    for command in _COMMANDS:
        if f"{key}.".startswith(f"{command}."):
            return key
        if command.startswith(f"{key}.") and "${" in value:  # a section from somewhere else
            return command
    return None


def not_allowed(command: str, where: str = "") -> ConfigError:
    """Return the error for a file that decides `command`."""
    return ConfigError(
        f"{command} runs code, so no file may set it",
        "If you trust the file, add allow_commands=true on the command line.",
        [command],
        where,
    )


def commands_in(config: Config) -> Iterator[str]:
    """Yield the settings that run code and that `config` sets; of a table those in it."""
    tree, untouched = dataclasses.asdict(config), dataclasses.asdict(Config(cluster=SlurmCluster()))
    for command in _COMMANDS:
        values, defaults = (dict(_leaves_at(one, command)) for one in (tree, untouched))
        yield from (key for key, value in values.items() if value != defaults.get(key))


def _leaves_at(tree: Any, key: str) -> Iterator[tuple[str, Any]]:
    for name in key.split("."):
        if name not in tree:
            return iter(())
        tree = tree[name]
    return leaves(key, tree)
