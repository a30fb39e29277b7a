"""Slurm's own commands, as patient as a batch system needs.

A controller that is down or busy is asked again, with longer and longer pauses; a job is never
taken for lost because of it. `launcher.submit.job` is the user.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.errors import ClusterError
from launcher.config.errors import ConfigError, advice
from launcher.config.machines import Slurm

# What Slurm's commands say when the controller, and not the request, is at fault.
_OUTAGE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Connection timed out"
    r"|Zero Bytes were transmitted|Transport endpoint is not connected|Slurm backup controller"
    r"|Resource temporarily unavailable|Unexpected message received",
    re.IGNORECASE,
)
_LONGEST_PAUSE = 60.0
ENDED = frozenset(
    [
        *("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PREEMPTED", "DEADLINE", "BOOT_FAIL", "REVOKED"),
    ]
)


class SlurmError(ClusterError):
    """Slurm refused a command: its own words."""


@dataclass(frozen=True)
class JobState:
    """Where a job is: Slurm's word for it, and its exit code once it has ended."""

    state: str
    exit_code: int

    @property
    def is_live(self) -> bool:
        """Whether the job still runs, or will."""
        return self.state not in ENDED


def check_installed() -> None:
    """Raises ConfigError where this machine has no Slurm to submit to."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "cluster=slurm needs Slurm's commands, and sbatch is not on this machine",
            "Submit from a login node, or use cluster=local.",
            ["cluster.kind"],
        )


def check_partition(slurm: Slurm) -> None:
    """Raise ConfigError where Slurm has no such partition, before a plan is made for nothing.

    Raises SlurmError where the controller does not answer.
    """
    elsewhere = {"clusters", "M"} & {option.lstrip("-") for option in slurm.extra}
    if slurm.partition is None or elsewhere or "SBATCH_CLUSTERS" in os.environ:
        return  # another cluster's
    try:
        known = set(_call(["sinfo", "--all", "--noheader", "--format=%R"]).split())
    except (SlurmRefusal, FileNotFoundError):
        return  # sbatch will say
    for name in slurm.partition.split(","):
        if known and name not in known:
            raise ConfigError(
                f"cluster.slurm.partition={slurm.partition}: Slurm has no partition {name}",
                advice(name, sorted(known), "It has"),
                ["cluster.slurm.partition"],
            )


def sbatch(
    script: Path, array: str | None = None, sleep: Callable[[float], None] = time.sleep
) -> str:
    """Submit a batch script; returns the job's id.

    Args:
        array: the elements to run of a job array, in place of those that the script names.
        sleep: called between two tries; what it raises ends them.

    Raises:
        ConfigError: Slurm refuses the job.
        SlurmError: the controller did not answer for a quarter of an hour.
    """
    elements = [f"--array={array}"] if array else []
    try:
        told = _call(["sbatch", "--parsable", *elements, str(script)], sleep)
    except SlurmRefusal as refusal:
        raise ConfigError(
            f"Slurm refuses the job: {refusal}",
            "cluster.slurm holds what it asks for; cluster.slurm.dry_run=true shows the script.",
            ["cluster.slurm"],
        ) from None
    return told.split(";")[0].strip()  # <id>;<cluster>


class SlurmRefusal(SlurmError):
    """What Slurm said against a command that reached it."""


def job_state(job_id: str) -> JobState | None:
    """The state of one job, or None where Slurm has forgotten it."""
    try:
        told = _call(["scontrol", "--oneliner", "show", "job", job_id])
    except SlurmRefusal:
        return None
    fields = dict(word.partition("=")[::2] for word in told.split())
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    return JobState(fields["JobState"], int(code) or (128 + int(signal) if int(signal) else 0))


def job_states() -> dict[str, str]:
    """The state of every job of this user that Slurm still remembers, an array's by element."""
    told = _call(["squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", "%i %T"])
    return dict(line.split(maxsplit=1) for line in told.splitlines() if line.strip())


def _call(command: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> str:
    """The output of a command, once the controller answers. The terminal's Ctrl-C is not for it."""
    for pause in (*_pauses(), None):
        result = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, process_group=0
        )
        if not result.returncode:
            return result.stdout
        problem = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        if not _OUTAGE.search(problem):
            raise SlurmRefusal(problem)
        if pause is not None:
            print(
                f"{command[0]}: Slurm's controller does not answer; again in {pause:g} s",
                file=sys.stderr,
            )
            sleep(pause)
    raise SlurmError(f"Slurm's controller does not answer: {problem}")


def _pauses(total: float = 900.0) -> Iterator[float]:
    """Seconds between one try and the next, doubling, `total` in all."""
    pause = 1.0
    while total > 0:
        yield pause
        total, pause = total - pause, min(2 * pause, _LONGEST_PAUSE)
