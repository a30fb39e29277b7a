"""Render the batch script of a run from its settings, and call Slurm's commands.

The script asks for the nodes, starts one task on each, and requeues the job when the run asks for
it. `slurm/train.sbatch` is the same script, to be edited and submitted by hand.

A controller that is down or busy is asked again, with longer and longer pauses; a job is never
considered lost because of it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.cluster.errors import ClusterError
from launcher.config.errors import ConfigError, advice
from launcher.config.machines import Slurm, SlurmCluster, minutes

SCRIPT = "job.sbatch"  # its name in a run's folder

# From here on the script is the same in every job, and in slurm/train.sbatch.
TAIL = r"""
# One task on each node: the first one drives the run, the others lend their node to it.
LAUNCHER_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
LAUNCHER_MAX_REQUEUES=$max_requeues
export LAUNCHER_NODES LAUNCHER_MAX_REQUEUES PYTHONUNBUFFERED=1
ulimit -Sn hard
attempt=${SLURM_RESTART_COUNT:-0}
echo "job $SLURM_JOB_ID, attempt $attempt, on ${LAUNCHER_NODES//$'\n'/ }"
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpu-bind=none --no-kill --kill-on-bad-exit=0 --input=none \
    "${srun_args[@]}" "${launcher[@]}" &
step=$!

# What reaches this shell alone is handed on: the run saves its state and ends.
signalled=
trap 'signalled=yes; kill -s USR2 "$step" 2>/dev/null || true' TERM USR1 USR2
code=0
wait "$step" || code=$?
while [[ $signalled ]]; do
    signalled=
    code=0
    wait "$step" || code=$?
done

# 0: done, 1: failed for good, 2: a setting is wrong, 130: interrupted. With 75 the run asks to come
# back; above 128 it was killed. A job that Slurm itself is ending or moving is left to Slurm.
if ((code == 75 || (code > 128 && code != 130))) && ((attempt < max_requeues)); then
    for pause in 1 2 4 8 16 32 64 128; do
        job=$(scontrol --oneliner show job "$SLURM_JOB_ID" || true)
        if [[ $job == *JobState=* && $job != *JobState=RUNNING* ]]; then
            break
        elif [[ $job ]] && scontrol requeue "$SLURM_JOB_ID"; then
            echo "job $SLURM_JOB_ID goes back into the queue"
            break
        fi
        sleep "$pause"
    done
fi
exit "$code"
"""


@dataclass(frozen=True)
class Job:
    """A job, apart from its settings.

    Attributes:
        name: the name in the queue.
        folder: the folder in which the job is submitted and runs.
        output: the file for its output; %j is the job's id, %A and %a the ids of an array and its
            element.
        command: the words of each task's command, quoted for the shell.
        array: the elements of a job array, such as 0-2%1; None for a job of one run.
        variables: for each variable of `cluster.slurm.env` whose value must not appear in the
            script, a word of bash that stands for it.
    """

    name: str
    folder: Path
    output: str
    command: Sequence[str]
    array: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def render(cluster: SlurmCluster, job: Job) -> str:
    """Return the text of the batch script for `job` with the settings of `cluster`.

    Raises:
        ConfigError: a value cannot be written in a batch script.
    """
    slurm = cluster.slurm
    lines = ["#!/usr/bin/env bash"]
    lines += [_line(name, value) for name, value in _options(cluster, job)]
    lines += ["", "set -eo pipefail"]
    if slurm.setup:
        lines += ["", "# cluster.slurm.setup", *slurm.setup]
    if slurm.env:
        lines += ["", "# cluster.slurm.env"]
        words = {name: shlex.quote(value) for name, value in slurm.env.items()}
        lines += [f"export {name}={job.variables.get(name, words[name])}" for name in words]
    srun = " ".join(_quoted(word) for word in _srun_arguments(slurm))
    lines += [
        "",
        f"max_requeues={slurm.max_requeues}",
        f"srun_args=({srun})",
        f"launcher=({' '.join(job.command)})",
    ]
    return "\n".join(lines) + "\n" + TAIL


def duration(text: str) -> str:
    """Return `2d12h`, `4h` or `90m` in Slurm's one unambiguous form, D-HH:MM:SS."""
    total = minutes(text)
    return f"{total // 1440}-{total // 60 % 24:02}:{total % 60:02}:00"


def _options(cluster: SlurmCluster, job: Job) -> Iterator[tuple[str, str | int | None]]:
    """Yield the options of sbatch, without their dashes, and their values; None for a flag."""
    slurm = cluster.slurm
    yield "job-name", slurm.job_name or job.name
    yield "chdir", str(job.folder)
    yield "output", job.output
    yield "open-mode", "append"
    if job.array:
        yield "array", job.array
    yield "nodes", cluster.hosts
    yield "ntasks-per-node", 1
    if not slurm.emulated:
        assert cluster.gpus is not None
        per_node = cluster.gpus // cluster.hosts
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        yield ("gres", slurm.gres) if slurm.gres else ("gpus-per-node", f"{kind}{per_node}")
    if slurm.cpus:
        yield "cpus-per-task", slurm.cpus
    if mem := slurm.mem or ("0" if slurm.exclusive else None):
        yield "mem", mem
    if slurm.exclusive:
        yield "exclusive", None
    if slurm.time:
        yield "time", duration(slurm.time)
    plain = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude")
    for name in (*plain, "dependency"):
        if (value := getattr(slurm, name)) is not None:
            yield name, value
    yield "signal", slurm.signal
    yield "requeue" if slurm.max_requeues else "no-requeue", None
    for name, value in slurm.extra.items():
        yield name.lstrip("-"), value or None


def _line(name: str, value: str | int | None) -> str:
    """Return an option as a line of the script; the value is quoted only if it has to be."""
    text = "" if value is None else f"={value}"
    if not text.isprintable():  # of a folder; settings are always printable
        raise ConfigError(
            f"{str(value)!r} cannot stand in a batch script",
            "Submit from a folder whose name is one line of plain text.",
        )
    if re.search(r"[\s\"'#\\]", text):
        text = '="' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{name}{text}"


def _srun_arguments(slurm: Slurm) -> Iterator[str]:
    container = slurm.container
    if container.image:
        yield f"--container-image={container.image}"
    if container.mounts:
        yield f"--container-mounts={','.join(container.mounts)}"
    if container.workdir:
        yield f"--container-workdir={container.workdir}"
    yield from slurm.srun_args


def _quoted(word: str) -> str:
    """Quote `word` for an array of bash; also a comma, which shellcheck reads as a separator."""
    return f"'{word}'" if shlex.quote(word) == word and "," in word else shlex.quote(word)


# -- Commands -------------------------------------------------------------------------------------

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
