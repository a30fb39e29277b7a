"""The batch script of a run: `render` makes it from the settings, a pure function.

The script asks for the nodes, starts one task on each, and puts the job back into the queue where
it is to come back. `slurm/train.sbatch` is the same script to be edited and submitted by hand.
`launcher.submit` is the user; submitting is `slurm_commands`' part.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.machines import Cluster, Slurm

SCRIPT = "job.sbatch"  # what it is called in a run's folder

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
    """What is known of a job beside its settings.

    Attributes:
        name: as the queue shows it. folder: where it is submitted and runs.
        output: the file for its output; %j is the job's id, %A and %a an array's and its element's.
        command: the words of the command of each task, as the shell is to read them.
        array: the elements of a job array, such as 0-2%1; None for a job of one run.
    """

    name: str
    folder: Path
    output: str
    command: Sequence[str]
    array: str | None = None


def render(cluster: Cluster, job: Job) -> str:
    """The text of the batch script for `job` with the settings of `cluster`."""
    slurm = cluster.slurm
    lines = ["#!/usr/bin/env bash"]
    lines += [f"#SBATCH --{option}" for option in _options(cluster, job)]
    lines += ["", "set -eo pipefail"]
    if slurm.setup:
        lines += ["", "# cluster.slurm.setup", *slurm.setup]
    if slurm.env:
        lines += ["", "# cluster.slurm.env"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in slurm.env.items()]
    srun = " ".join(_quoted(word) for word in _srun_arguments(slurm))
    lines += [
        "",
        f"max_requeues={slurm.max_requeues}",
        f"srun_args=({srun})",
        f"launcher=({' '.join(job.command)})",
    ]
    return "\n".join(lines) + "\n" + TAIL


def duration(text: str) -> str:
    """`2d12h`, `4h` or `90m` in the one form of Slurm's that has only one reading: D-HH:MM:SS."""
    parts = {unit: int(number) for number, unit in re.findall(r"(\d+)([dhm])", text)}
    minutes = (parts.get("d", 0) * 24 + parts.get("h", 0)) * 60 + parts.get("m", 0)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _options(cluster: Cluster, job: Job) -> Iterator[str]:
    """The options of sbatch, without their dashes."""
    slurm = cluster.slurm
    yield f"job-name={slurm.job_name or job.name}"
    yield f"chdir={_word(str(job.folder))}"
    yield f"output={_word(job.output)}"
    yield "open-mode=append"
    if job.array:
        yield f"array={job.array}"
    yield f"nodes={cluster.hosts}"
    yield "ntasks-per-node=1"
    if not slurm.emulated:
        assert cluster.gpus is not None
        per_node = cluster.gpus // cluster.hosts
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        yield f"gres={slurm.gres}" if slurm.gres else f"gpus-per-node={kind}{per_node}"
    if slurm.cpus:
        yield f"cpus-per-task={slurm.cpus}"
    if mem := slurm.mem or ("0" if slurm.exclusive else None):
        yield f"mem={mem}"
    if slurm.exclusive:
        yield "exclusive"
    if slurm.time:
        yield f"time={duration(slurm.time)}"
    plain = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude")
    for name in (*plain, "dependency"):
        if (value := getattr(slurm, name)) is not None:
            yield f"{name}={_word(value)}"
    yield f"signal={slurm.signal}"
    yield "requeue" if slurm.max_requeues else "no-requeue"
    for name, value in slurm.extra.items():
        yield name.lstrip("-") + (f"={_word(value)}" if value else "")


def _word(value: str) -> str:
    """`value` as sbatch reads it from an #SBATCH line: in quotes only where it needs them."""
    if not re.search(r"[\s\"'#\\]", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
    """`word` for an array of bash; also one with commas, which shellcheck takes for separators."""
    return f"'{word}'" if shlex.quote(word) == word and "," in word else shlex.quote(word)
