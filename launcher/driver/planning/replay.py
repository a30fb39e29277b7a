"""Checks of a plan to be replayed that need no tracing.

It imports no JAX, so that `task=check` can use it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.base import DamagedError, read_json
from launcher.config.compose import to_dict
from launcher.config.environment import resolved
from launcher.config.errors import ConfigError, shown
from launcher.config.schema import Config
from launcher.config.sources import OF_PROGRAM, OF_TRAIN, Tree, settings_beside, shorthands_of

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
    if there := _resolved_beside(path):
        here = to_dict(config)
        differing = list(_differences(here, there))
        if differing:
            raise another_program(path, differing)
        beside = Path(path).with_name("config.yaml")
        _log.info(f"as in {beside}, beside the plan: {', '.join(_in_common(here, there))}")


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
        )


def no_plan(path: str, reason: str) -> ConfigError:
    """Return the error for a file that does not hold a plan."""
    return ConfigError(
        f"parallel.plan={path} cannot be read as a plan: {reason}",
        "Name a plan.json of an earlier run.",
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
        )
    words = ", ".join(differing[:_MOST_NAMED]) + (", …" if differing[_MOST_NAMED:] else "")
    remedy = "Use the model, data, optimizer, batch size and precision that it was made for"
    return ConfigError(
        f"parallel.plan={path} was made for another program" + (f": with {words}" if words else ""),
        f"{'Set that as it was' if words else remedy}, or plan again.",
    )


def _resolved_beside(plan: str) -> Tree:
    """Return `settings_beside` with the values of its variables; nothing if one is not set here."""
    tree = settings_beside(plan)
    try:
        return resolved(OmegaConf.create(tree))[0] if "${" in str(tree) else tree
    except OmegaConfBaseException:
        return {}


def _in_common(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings taken from the run: "model (but for dropout)", "train.steps=4"."""
    for name in OF_PROGRAM:
        ours, theirs = here[name], there[name]
        if any(ours.get(key) != theirs.get(key) for key in ("name", "kind")):
            continue
        keys = _compared(name, ours)
        differing = [key for key in keys if ours[key] != theirs.get(key, ours[key])]
        yield name + (f" (but for {', '.join(differing)})" if differing else "")
    for key in OF_TRAIN:
        if there["train"].get(key) == here["train"][key]:
            yield f"train.{key}={_plain(here['train'][key])}"


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that make another program, such as "model.num_layers=4 and not 2"."""
    for name in ("model", "optimizer"):
        ours, theirs = here[name], there[name]
        if theirs.get("name") not in (None, ours["name"]):
            yield f"{name}={theirs['name']} and not {ours['name']}"
            continue
        yield from _differing(name, _compared(name, ours), ours, theirs)
    ours, theirs = here["train"], there["train"]
    yield from _differing("train", ("global_batch_size", "precision"), ours, theirs)
    if _decays_over(here) != _decays_over({**here, "train": {**ours, **theirs}}):
        yield from _differing("train", ("steps",), ours, theirs)
    if "skip" in (ours["non_finite"], theirs.get("non_finite")):
        yield from _differing("train", ("non_finite",), ours, theirs)
    watching = [tree.get("spikes", "off").replace("rollback", "warn") for tree in (ours, theirs)]
    if len({*watching}) > 1:
        yield from _differing("train", ("spikes",), ours, theirs)


def _compared(section: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of a section without shorthands, whose settings are compared."""
    shorthands = shorthands_of(settings) if section == "model" else {}
    return [key for key in settings if key not in shorthands]


def _differing(
    section: str, keys: Iterable[str], here: Mapping[str, Any], there: Mapping[str, Any]
) -> Iterator[str]:
    for key in keys:
        if key in there and there[key] != here[key]:
            yield f"{section}.{key}={_plain(there[key])} and not {_plain(here[key])}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _decays_over(settings: Mapping[str, Any]) -> int:
    """Return the number of steps over which the learning rate decays."""
    optimizer, steps = settings["optimizer"], settings["train"]["steps"]
    is_constant = optimizer.get("decay") == "constant"  # a custom one has no such setting
    return 0 if is_constant else max(1, steps - optimizer.get("warmup_steps", 0))
