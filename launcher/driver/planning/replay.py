"""Checks of a plan to be replayed that need no tracing.

It imports no JAX, so that `task=check` can use it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.base.files import DamagedError, read_json
from launcher.config.compose import to_dict
from launcher.config.errors import ConfigError
from launcher.config.replayed import differences, in_common, resolved_beside
from launcher.config.schema import Config

_MOST_NAMED = 4

_log = logging.getLogger(__name__)


def check_program(config: Config, path: str) -> None:
    """Log the settings that `config` takes from the replayed run or shares with it.

    Args:
        config: the settings now.
        path: the plan to replay.

    Raises:
        ConfigError: that run, by the `config.yaml` beside its plan, had other settings that make
            another program.
    """
    if there := resolved_beside(path):
        here = to_dict(config)
        differing = list(differences(here, there))
        if differing:
            raise another_program(path, differing)
        beside = Path(path).with_name("config.yaml")
        _log.info(f"as in {beside}, beside the plan: {', '.join(in_common(here, there))}")


def read_plan(path: str) -> Any:
    """Read the JSON tree of a plan.

    Raises:
        ConfigError: the file cannot be read, or is not JSON.
    """
    try:
        return read_json(Path(path))
    except OSError as error:
        raise no_plan(path, str(error.strerror)) from error
    except DamagedError as error:
        raise no_plan(path, str(error)) from error


def check_replay_devices(path: str, plan: Any, hosts: int, devices_per_host: int) -> None:
    """Check that a plan is for these devices.

    Args:
        path: the plan's file, for the message.
        plan: its JSON tree. A tree that is no plan passes: reading it as one reports that.
        hosts: the number of hosts here.
        devices_per_host: the number of devices of each.

    Raises:
        ConfigError: the plan is for other devices.
    """
    cluster = plan.get("cluster") if isinstance(plan, dict) else None
    if not isinstance(cluster, dict):
        return  # no plan: `Plan.from_dict` reports that
    there = cluster.get("hosts"), cluster.get("devices_per_host")
    here = hosts, devices_per_host
    if here != there:
        raise ConfigError(
            f"parallel.plan={path} is for {there[0]} hosts × {there[1]} devices; here are "
            f"{here[0]} × {here[1]}",
            "Set cluster.hosts and cluster.gpus as they were.",
            ["parallel.plan", "cluster.gpus", "cluster.hosts"],
        )


def no_plan(path: str, reason: str) -> ConfigError:
    """Return the error for a file that does not hold a plan."""
    return ConfigError(
        f"parallel.plan={path} cannot be read as a plan: {reason}",
        "Name a plan.json of an earlier run.",
        ["parallel.plan"],
    )


def another_program(
    path: str, differing: Sequence[str] = (), made_by: str = "", here: str = ""
) -> ConfigError:
    """Return the error for a plan of another program.

    Args:
        path: the plan's file.
        differing: the settings of its run that differ from those here; empty if they are not known.
        made_by: the JAX that traced the plan's program; "" if that is not known.
        here: this JAX.
    """
    if made_by not in ("", here):
        return ConfigError(
            f"parallel.plan={path} was made with JAX {made_by}; here is JAX {here}, which traces a "
            "step to other equations",
            "Plan again, or install that JAX.",
            ["parallel.plan"],
        )
    words = ", ".join(differing[:_MOST_NAMED]) + (", …" if differing[_MOST_NAMED:] else "")
    remedy = "Use the model, data, optimizer, batch size and precision that it was made for"
    return ConfigError(
        f"parallel.plan={path} was made for another program" + (f": with {words}" if words else ""),
        f"{'Set that as it was' if words else remedy}, or plan again.",
        ["parallel.plan"],
    )
