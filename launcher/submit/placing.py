"""Place the runs of a sweep in a folder, and check that they can be submitted together."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from launcher.base import answer, complain
from launcher.cluster.kinds import kind_of
from launcher.config.cluster import slurm_of
from launcher.config.compose import Point
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.config.sections import Run
from launcher.driver.planning.check import check

_FOLDER = "multirun"  # unless run.dir says otherwise


def place_sweep(points: Sequence[Point]) -> tuple[str, Path]:
    """Return the sweep's id and folder, from run.id and run.dir if they are set.

    Raises:
        ConfigError: run.id or run.dir is swept.
    """
    runs = {(point.config.run.id, point.config.run.dir) for point in points}
    if len(runs) > 1:
        raise ConfigError(
            "run.id and run.dir cannot be swept",
            "In a sweep run.id names the whole sweep; its runs are <run.id>-0, -1, ….",
        )
    [(run_id, run_dir)] = runs
    sweep_id = run_id or f"sweep-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return sweep_id, Path(_FOLDER if run_dir == Run().dir else run_dir) / sweep_id


def members(points: Sequence[Point], sweep_id: str, folder: Path) -> list[Config]:
    """Return the settings of the runs of a sweep, each with a folder of its own."""
    return [
        replace(
            point.config,
            run=replace(point.config.run, id=f"{sweep_id}-{number}", dir=str(folder)),
            wandb=replace(point.config.wandb, group=point.config.wandb.group or sweep_id),
        )
        for number, point in enumerate(points)
    ]


def check_jobs(configs: Sequence[Config]) -> None:
    """Check that the runs of a sweep can be submitted to Slurm together.

    Raises:
        ConfigError: they cannot.
    """
    if any(not kind_of(config.cluster).is_batch for config in configs):
        raise ConfigError(
            "cluster is swept, and some of its options are not slurm",
            "Submit those runs in a sweep of their own.",
            ["cluster.kind"],
        )
    if any(slurm_of(config.cluster).wait for config in configs):
        raise ConfigError(
            "cluster.slurm.wait=true follows one run, but this is a sweep",
            "Leave it out; task=sweep_status shows how they are doing.",
            ["cluster.slurm.wait"],
        )
    is_array = slurm_of(configs[0].cluster).array is not None
    # An array has one script with one command line.
    if is_array and any(config.allow_modules != configs[0].allow_modules for config in configs):
        raise ConfigError(
            "The runs of a job array cannot be allowed different modules",
            "Allow every run all of them, or set cluster.slurm.array=null for a job each.",
            ["allow_modules", "cluster.slurm.array"],
        )
    if is_array and any(config.cluster != configs[0].cluster for config in configs):
        raise ConfigError(
            "The runs of a job array cannot have different settings of the cluster",
            "Set cluster.slurm.array=null for a job each.",
            ["cluster.slurm.array"],
        )


def check_sweep(points: Sequence[Point], wrong: Mapping[str, ConfigError]) -> int:
    """Check every run of a sweep as `task=check` does, and print all problems.

    Args:
        points: the runs whose settings could be composed.
        wrong: the errors of the others, by label.

    Returns:
        The exit code, 2 if any setting is wrong.
    """
    configs = members(points, *place_sweep(points))
    if any(kind_of(config.cluster).is_batch for config in configs):
        check_jobs(configs)
    verdicts = [check(config, os.environ) for config in configs]
    problems = {label: str(error) for label, error in wrong.items()}
    problems |= {
        point.label: verdict.problem
        for point, verdict in zip(points, verdicts, strict=True)
        if verdict.problem
    }
    for label, problem in problems.items():
        complain(f"{label}: {problem}")
    if problems:
        return max([2 for _ in wrong] + [verdict.code for verdict in verdicts])
    lines = dict.fromkeys(line for verdict in verdicts for line in verdict.lines)
    return answer("\n".join([f"The settings of all {len(points)} runs are fine.", *lines]))
