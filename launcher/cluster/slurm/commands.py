"""Render the batch script of a run (`job.sbatch.jinja`), and call Slurm's commands.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base import OF_SLURM, complain, from_template
from launcher.cluster.errors import ClusterError
from launcher.config.cluster import Slurm, SlurmCluster, minutes
from launcher.config.errors import ConfigError, advice

SCRIPT = "job.sbatch"  # its name in a run's folder


def render(
    cluster: SlurmCluster,
    name: str,
    folder: Path,
    output: Path,
    command: Sequence[str],
    array: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return the text of a batch script with the settings of `cluster`.

    Args:
        cluster: the settings.
        name: the job's name in the queue.
        folder: the folder in which the job is submitted and runs.
        output: the file for its output; %j is the job's id, %A and %a the ids of an array and its
            element.
        command: the words of each task's command, quoted for the shell.
        array: the elements of a job array, such as 0-2%1; None for a job of one run.
        variables: for each variable of `cluster.slurm.env` whose value must not appear in the
            script, a word of bash that stands for it.

    Raises:
        ConfigError: a value cannot be written in a batch script.
    """
    slurm = cluster.slurm
    own = {"job-name": slurm.job_name or name, "chdir": folder, "output": output}
    options = {**own, "open-mode": "append", "array": array, **_options(cluster)}
    return from_template(
        "launcher.cluster.slurm",
        "job.sbatch.jinja",
        slurm=slurm,
        options=[_line(name, value) for name, value in options.items() if value is not None],
        env={name: shlex.quote(value) for name, value in slurm.env.items()} | dict(variables or {}),
        srun=map(_quoted, _srun_arguments(slurm)),
        command=command,
    )


def duration(text: str) -> str:
    """Return `2d12h`, `4h` or `90m` in Slurm's one unambiguous form, D-HH:MM:SS."""
    total = minutes(text)
    return f"{total // 1440}-{total // 60 % 24:02}:{total % 60:02}:00"


def _options(cluster: SlurmCluster) -> dict[str, Any]:
    """Return options of sbatch, without their dashes; True for a flag, None for one left out."""
    slurm = cluster.slurm
    assert cluster.gpus is not None
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    gpus: dict[str, Any] = {"gpus-per-node": f"{kind}{cluster.gpus // cluster.hosts}"}
    if slurm.gres or slurm.emulated:
        gpus = {} if slurm.emulated else {"gres": slurm.gres}
    plain = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude")
    return {
        "nodes": cluster.hosts,
        "ntasks-per-node": 1,
        "no-kill": bool(cluster.hosts > 1 and cluster.host_wait) or None,
        **gpus,
        "cpus-per-task": slurm.cpus,
        "mem": slurm.node_memory,
        "exclusive": slurm.exclusive or None,
        "time": slurm.time and duration(slurm.time),
        **{name: getattr(slurm, name) for name in (*plain, "dependency")},
        "signal": slurm.signal,
        "requeue" if slurm.max_requeues else "no-requeue": True,
        **{name.lstrip("-"): value or True for name, value in slurm.extra.items()},
    }


def _line(name: str, value: Any) -> str:
    """Return an option as the script has it; the value is quoted only if it has to be."""
    text = "" if value is True else f"={value}"
    if not text.isprintable():  # of a folder; settings are always printable
        raise ConfigError(
            f"{str(value)!r} cannot stand in a batch script",
            "Submit from a folder whose name is one line of plain text.",
        )
    if re.search(r"[\s\"'#\\]", text):
        text = '="' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{name}{text}"


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

_CLUSTERS = frozenset(["SBATCH_CLUSTERS", "SLURM_CLUSTERS"])
# Slurm's variables that say which controller is asked, and prove who asks.
_KEPT = _CLUSTERS | {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}
# Those that would change a job, by sbatch's manual, or the step that srun starts in it.
_CHANGING = re.compile(
    "SBATCH_(?!DEBUG$)|(SLURM|SRUN)_(ACCTG|BCAST|COMPRESS|CONTAINER|CORE_SPEC|CPU_FREQ|CPUS_PER"
    "|DIST|EPILOG|EXACT|EXCLUSIVE|EXPORT|GPU_|GPUS$|GPUS_PER|GRES|HINT|HOSTFILE|LABELIO|MEM_"
    "|MPI_TYPE|NETWORK|NTASKS_PER_[CGST]|OOMKILL|OPEN_MODE|OVER|PROFILE|PROLOG|REMOTE_CWD|RESV"
    "|SEND_LIBS|SIGNAL|SPREAD|STD(ERR|OUT)|STEP_GRES|TASK_(EPI|PRO)LOG|THREAD|TIMELIMIT|TRES_"
    "|UMASK|UNBUFFERED|USE_MIN|WAIT|WORKING_DIR)"
)
# Messages of Slurm's commands when the controller, and not the request, is at fault.
_OUTAGE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Connection timed out"
    r"|Zero Bytes were transmitted|Transport endpoint is not connected|Slurm backup controller"
    r"|Resource temporarily unavailable|Unexpected message received",
    re.IGNORECASE,
)
_PAUSES = (1, 2, 4, 8, 16, 32, *[60] * 14)  # seconds; a quarter of an hour in all
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
    """Check that Slurm's commands are on this machine, and name variables that a job does not get.

    Raises:
        ConfigError: they are not.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "cluster=slurm needs Slurm's commands, and sbatch is not on this machine",
            "Submit from a login node, or use cluster=local.",
        )
    if names := unheeded(os.environ):
        complain(f"not passed on to the job: {', '.join(names)}; cluster.slurm says what it needs")


def check_partition(slurm: Slurm) -> None:
    """Check that Slurm has the partition, before a plan is made for nothing.

    Raises:
        ConfigError: Slurm has no such partition.
        SlurmError: the controller does not answer.
    """
    elsewhere = "clusters" in {option.lstrip("-") for option in slurm.extra}
    if slurm.partition is None or elsewhere or not _CLUSTERS.isdisjoint(os.environ):
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
            )


def surroundings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which to call Slurm: `environ` without any job's state.

    A job inherits it from sbatch. Variables of sbatch would win over the lines of its script, and
    those of another job over what this one asks for.
    """
    return {k: v for k, v in environ.items() if k in _KEPT or not OF_SLURM.match(k)}


def unheeded(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that would change a job if `surroundings` kept them."""
    return sorted(filter(_CHANGING.match, environ.keys() - surroundings(environ).keys()))


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


def job_states(sleep: Callable[[float], None] = time.sleep) -> dict[str, str]:
    """Return the states of this user's jobs that Slurm still knows, by id; arrays by element.

    Args:
        sleep: as of `sbatch`.
    """
    command = ["squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", "%i %T"]
    output = _call(command, sleep)
    return dict(line.split(maxsplit=1) for line in output.splitlines() if line.strip())


def _call(command: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> str:
    """Return the output of a command once the controller answers.

    Ctrl-C in the terminal does not reach the command.
    """
    for pause in (*_PAUSES, None):
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            process_group=0,
            env=surroundings(os.environ),
        )
        if not result.returncode:
            return result.stdout
        problem = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        if not _OUTAGE.search(problem):
            raise SlurmRefusal(problem)
        if pause is not None:
            print(
                f"{command[0]}: Slurm's controller does not answer; again in {pause} s",
                file=sys.stderr,
            )
            sleep(pause)
    raise SlurmError(f"Slurm's controller does not answer: {problem}")
