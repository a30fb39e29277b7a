"""Call Slurm's commands, and tolerate an unavailable controller.

A controller that is down or busy is asked again, with longer and longer pauses; a job is never
considered lost because of it.
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
from launcher.config.cluster import Slurm
from launcher.config.errors import ConfigError, advice

# Messages of Slurm's commands when the controller, and not the request, is at fault.
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
    """An error raised when a Slurm command fails; the message is Slurm's."""


@dataclass(frozen=True)
class JobState:
    """The state of a job, by Slurm's name, and its exit code once it has ended."""

    state: str
    exit_code: int

    @property
    def is_live(self) -> bool:
        """Whether the job runs or will run."""
        return self.state not in ENDED


def check_installed() -> None:
    """Check that Slurm's commands are on this machine.

    Raises:
        ConfigError: they are not.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "cluster=slurm needs Slurm's commands, and sbatch is not on this machine",
            "Submit from a login node, or use cluster=local.",
            ["cluster.kind"],
        )


def check_partition(slurm: Slurm) -> None:
    """Check that Slurm has the partition, before a plan is made for nothing.

    Raises:
        ConfigError: Slurm has no such partition.
        SlurmError: the controller does not answer.
    """
    elsewhere = {"clusters", "M"} & {option.lstrip("-") for option in slurm.extra}
    if slurm.partition is None or elsewhere or "SBATCH_CLUSTERS" in os.environ:
        return  # a partition of another cluster
    try:
        known = set(_call(["sinfo", "--all", "--noheader", "--format=%R"]).split())
    except (SlurmRefusal, FileNotFoundError):
        return  # sbatch will report it
    for name in slurm.partition.split(","):
        if known and name not in known:
            raise ConfigError(
                f"cluster.slurm.partition={slurm.partition}: Slurm has no partition {name}",
                advice(name, sorted(known), "It has"),
                ["cluster.slurm.partition"],
            )


def sbatch(script: Path, sleep: Callable[[float], None] = time.sleep) -> str:
    """Submit a batch script and return the job's id.

    Args:
        script: the batch script.
        sleep: called between two attempts; an exception that it raises ends them.

    Raises:
        ConfigError: Slurm refuses the job.
        SlurmError: the controller did not answer for a quarter of an hour.
    """
    try:
        output = _call(["sbatch", "--parsable", str(script)], sleep)
    except SlurmRefusal as refusal:
        raise ConfigError(
            f"Slurm refuses the job: {refusal}",
            "cluster.slurm holds the request; cluster.slurm.dry_run=true shows the script.",
            ["cluster.slurm"],
        ) from None
    return output.split(";")[0].strip()  # <id>;<cluster>


class SlurmRefusal(SlurmError):
    """An error raised when Slurm's controller refuses a command."""


def job_state(job_id: str) -> JobState | None:
    """Return the state of one job, or None if Slurm no longer knows it."""
    try:
        output = _call(["scontrol", "--oneliner", "show", "job", job_id])
    except SlurmRefusal:
        return None
    fields = dict(word.partition("=")[::2] for word in output.split())
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    return JobState(fields["JobState"], int(code) or (128 + int(signal) if int(signal) else 0))


def job_states() -> dict[str, str]:
    """Return the states of this user's jobs that Slurm still knows, by id; arrays by element."""
    output = _call(["squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", "%i %T"])
    return dict(line.split(maxsplit=1) for line in output.splitlines() if line.strip())


def _call(command: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> str:
    """Return the output of a command once the controller answers.

    Ctrl-C in the terminal does not reach the command.
    """
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
    """Yield the seconds between two attempts: they double, up to `total` in all."""
    pause = 1.0
    while total > 0:
        yield pause
        total, pause = total - pause, min(2 * pause, _LONGEST_PAUSE)
