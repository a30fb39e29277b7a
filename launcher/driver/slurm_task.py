"""A run inside a Slurm job: the job's first task, which is the driver.

It adds to `run` the rendezvous with the job's other tasks, and the decision whether a run that
failed or was preempted is requeued.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from pathlib import Path

from launcher.base import complain, lines_to
from launcher.cluster.devices import visible_gpus
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.private_ray import secret
from launcher.cluster.slurm.allocation import Allocation
from launcher.cluster.slurm.attempts import (
    PREEMPTED,
    preempted_for_nothing,
    read_attempts,
    worth_retrying,
)
from launcher.cluster.slurm.rendezvous import open_rendezvous
from launcher.config.cluster import slurm_of
from launcher.config.schema import Config
from launcher.driver.folder import folder
from launcher.driver.folder.make_folder import make_folder
from launcher.driver.folder.private_files import private_files
from launcher.driver.run import run
from launcher.stop import Stop

_FOR_NOTHING = (
    "the run was preempted twice in a row before its first step, so it is not requeued. Give the "
    "job more time than it takes to start (cluster.slurm.time), or let cluster.slurm.signal come "
    "later; {logs} shows how far it got."
)


def run_allocated(config: Config, allocation: Allocation, stop: Stop) -> int:
    """Run as task 0 of a Slurm job.

    Returns:
        The exit code: 75 if the job is to be requeued.

    Raises:
        ConfigError: the settings do not fit the job's nodes.
    """
    if allocation.restarts == 0:
        folder.check(config)
    if config.run.resume == "never":  # this job made the folder itself
        config = replace(config, run=replace(config.run, resume="auto"))
    if not slurm_of(config.cluster).emulated:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(config.cluster, os.environ)
    try:
        home = make_folder(config)
    except OSError as error:
        complain(str(error))
        return 1
    with private_files(config.run), lines_to(complain):
        return _drive(home, config, allocation, stop)


def _drive(home: Path, config: Config, allocation: Allocation, stop: Stop) -> int:
    """Run in the run's folder; return the exit code."""
    try:
        with open_rendezvous(home, allocation, slurm_of(config.cluster), secret()) as rendezvous:
            code = run(config, stop, rendezvous)
    except (ClusterError, OSError) as error:
        complain(str(error))
        code = 1
    except KeyboardInterrupt:  # a signal before it trained
        if stop.ending[0] == PREEMPTED and _is_in_vain(home, allocation):
            complain(_FOR_NOTHING.format(logs=home / "logs"))
            return 1
        raise
    except Exception:
        traceback.print_exc()
        code = 1
    if code == 1 and _may_come_back(home, allocation):
        complain("the run is requeued to try again")
        return PREEMPTED
    if code == PREEMPTED and _is_in_vain(home, allocation):
        complain(_FOR_NOTHING.format(logs=home / "logs"))
        return 1
    return code


def _is_in_vain(home: Path, allocation: Allocation) -> bool:
    try:
        return preempted_for_nothing(home, allocation)
    except OSError as error:
        complain(f"the records of earlier attempts cannot be read: {error}")
        return False


def _may_come_back(home: Path, allocation: Allocation) -> bool:
    try:
        return worth_retrying(read_attempts(home), allocation)
    except OSError as error:
        complain(f"the run is not requeued: {error}")
        return False
