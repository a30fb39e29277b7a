"""Settings and plan in a run's folder: `config.yaml` and `plan.json`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import yaml

from launcher.base import aside, complain, write_whole
from launcher.config.compose import to_written
from launcher.config.schema import Config
from launcher.driver.folder.folder import LOCK, LostFolderError, RunFolder
from launcher.plan import Plan


def write_plan(home: RunFolder, config: Config, plan: Plan) -> None:
    """Write `config.yaml`, resolved except for environment variables, and `plan.json`."""
    tree = to_written(replace(config, run=replace(config.run, id=home.id)))
    tree["run"]["dir"] = config.run.dir  # resolved: a job's variables may differ
    # Atomic, because another task of a Slurm job may be reading them.
    text = yaml.safe_dump(tree, sort_keys=False)
    write_whole(home.path / "config.yaml", text, config.cluster.holds_secrets)
    write_plan_alone(home, plan)


def write_plan_alone(home: RunFolder, plan: Plan) -> None:
    """Write `plan.json`."""
    write_whole(home.path / "plan.json", json.dumps(plan.to_dict(), indent=2) + "\n")


def current_folder(home: RunFolder, config: Config, plan: Plan) -> Path:
    """Return the folder's present path; recreate a deleted folder from this process's memory.

    Then at least the metrics survive a command that was meant for another folder.
    """
    if home.handle is None:
        return home.path
    try:
        home.check()
        return home.path
    except LostFolderError:
        if (path := home.handle.current_path()) is not None:
            return path
    path = home.path if not (home.path / LOCK).exists() else aside(home.path)  # another run's
    path.mkdir(parents=True, exist_ok=True)
    write_plan(replace(home, path=path), config, plan)
    complain(f"settings, plan and metrics of the run are written again, to {path}")
    return path
