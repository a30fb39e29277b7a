"""A run inside a Slurm job: the first task, which drives it. `__main__` calls `run_allocated`.

What it adds to `run` is the meeting with the job's other tasks, and the decision whether a run
that failed is to come back.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from launcher.cluster.devices import visible_gpus
from launcher.cluster.errors import ClusterError
from launcher.cluster.session import secret
from launcher.cluster.slurm_allocation import Allocation
from launcher.cluster.slurm_attempts import read_attempts, worth_retrying
from launcher.cluster.slurm_meeting import hold
from launcher.config.schema import Config
from launcher.train import folder
from launcher.train.run import run

COME_BACK = 75


def run_allocated(config: Config, allocation: Allocation) -> int:
    """Do the run as task 0 of its job; returns the exit code, 75 where the job is to come back.

    Raises ConfigError for what the settings and the nodes do not agree on.
    """
    if allocation.restarts == 0:
        folder.check(config)
    if config.run.resume == "never":  # it was this job that made the folder
        config = replace(config, run=replace(config.run, resume="auto"))
    if not config.cluster.slurm.emulated:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(config.cluster, os.environ)
    assert config.run.id is not None
    home = Path(config.run.dir, config.run.id)
    try:
        with hold(home, allocation, config.cluster.slurm, secret()) as meeting:
            code = run(config, meeting)
    except (ClusterError, OSError) as error:
        print(f"launcher: {error}", file=sys.stderr)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    if code == 1 and worth_retrying(read_attempts(home), allocation):
        print("launcher: the run is to come back and try again", file=sys.stderr)
        return COME_BACK
    return code
