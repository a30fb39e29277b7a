"""The checkpoint of a run that a task reads, with the run's settings and plan."""

from __future__ import annotations

import logging
from pathlib import Path

from launcher import checkpoint
from launcher.base import read_json
from launcher.config.compose import load_frozen
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.plan import Plan

_log = logging.getLogger(__name__)


def stored_model(config: Config, step: int | None, best: bool, section: str) -> tuple[Path, Path]:
    """Return an intact checkpoint of the run `run.id`, and the run's folder.

    Args:
        config: the settings.
        step: after how many steps; None: the newest.
        best: whether to take the one that `train.keep_best` has kept.
        section: the section of settings that `step` and `best` are of.

    Raises:
        ConfigError: there is none.
    """
    assert config.run.id is not None
    home = Path(config.run.dir, config.run.id)
    if best:
        step = checkpoint.best_step(home / "checkpoints")
        if step is None:
            raise refused(config, "has no best checkpoint, as train.keep_best makes one", section)
    named = home if step is None else home / "checkpoints" / str(step)
    try:
        path, damaged = checkpoint.resolve(named)
    except checkpoint.InitError as error:
        verb = {"export": "exported", "evaluate": "evaluated"}.get(section, "used")
        raise refused(config, f"cannot be {verb}: {named} {error}", section) from None
    for line in damaged:
        _log.warning(line)
    return path, home


def stored_plan(home: Path) -> Plan | None:
    """Return the plan in a run's folder, or None if it is not there or of another version."""
    try:
        return Plan.from_dict(read_json(home / "plan.json"))
    except (OSError, ValueError):  # DamagedError and PlanError are one
        return None


def run_settings(config: Config, home: Path) -> Config:
    """Return the settings of the run in the folder `home`, which are read here, and not run.

    Modules that they name may be loaded if this task's command line allows them.

    Raises:
        ConfigError: they cannot be read, or name a module that is not allowed.
    """
    allowed = f"allow_modules=[{','.join(config.allow_modules)}]"
    return load_frozen(home / "config.yaml", [allowed, "allow_commands=true"])


def refused(config: Config, problem: str, section: str) -> ConfigError:
    """Return the error for a run that a task cannot use."""
    return ConfigError(
        f"run.id={config.run.id} {problem}", f"Check run.id, run.dir and {section}.step."
    )
