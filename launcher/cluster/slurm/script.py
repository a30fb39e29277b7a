"""Render the batch script of a run from its settings.

The script asks for the nodes, starts one task on each, and requeues the job when the run asks for
it. `slurm/train.sbatch` is the same script, to be edited and submitted by hand.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.config.cluster import Slurm, SlurmCluster, minutes
from launcher.config.errors import ConfigError

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
