"""Check what a Slurm job asks for: the rules of `cluster.slurm`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.config.errors import ConfigError
from launcher.config.machines import Slurm, SlurmCluster, minutes
from launcher.config.schema import Config

# What a text setting must look like, and what to say where it does not.
_TEXTS = {
    "time": (
        r"(?=\d)(\d+d)?(\d+h)?(\d+m)?",
        "Write days, hours and minutes, such as 2d12h, 4h or 90m.",
    ),
    "mem": (r"\d+[KMGT]?", "Write it as Slurm does, such as 64G."),
    "signal": (
        r"(TERM|USR1|USR2)@\d{1,5}",
        "Write TERM, USR1 or USR2, @ and the seconds before the time limit, such as USR2@120.",
    ),
    "job_name": (r"[\w.+-]+", "Use letters, digits, '.', '_', '+' and '-'."),
}
# Options of sbatch that `extra` may not set, and the setting that does.
_SBATCH_OPTIONS = {
    name.replace("_", "-"): f"cluster.slurm.{name}"
    for name in (
        *("partition", "account", "qos", "time", "mem", "gres", "exclusive", "constraint"),
        *("reservation", "nodelist", "exclude", "dependency", "job_name", "signal", "array"),
    )
} | {
    "nodes": "cluster.hosts",
    "cpus-per-task": "cluster.slurm.cpus",
    "gpus": "cluster.gpus",
    "gpus-per-node": "cluster.gpus",
    "requeue": "cluster.slurm.max_requeues",
    "no-requeue": "cluster.slurm.max_requeues",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "output", "error", "open-mode", "chdir", "parsable", "wait"),
        "",
    ),
}


def check_slurm(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with `cluster.slurm`, and with the devices that a job asks for."""
    if not isinstance(config.cluster, SlurmCluster):
        return
    if config.cluster.gpus is None:
        yield ConfigError(
            "cluster.gpus is not set, and cluster=slurm must know how many to ask for",
            "Give the number in total, over all nodes.",
            ["cluster.gpus"],
        )
    yield from _misspelt(config.cluster.slurm)
    yield from _too_short(config.cluster.slurm)
    yield from _set_twice(config.cluster.slurm)


def _misspelt(slurm: Slurm) -> Iterator[ConfigError]:
    for name, (pattern, remedy) in _TEXTS.items():
        value = getattr(slurm, name)
        if value is not None and not re.fullmatch(pattern, value):
            yield ConfigError(
                f"cluster.slurm.{name}={value!r} cannot be understood",
                remedy,
                [f"cluster.slurm.{name}"],
            )
    for name in slurm.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield ConfigError(
                f"cluster.slurm.env: {name!r} cannot name an environment variable",
                "Use letters, digits and '_'.",
                ["cluster.slurm.env"],
            )


def _too_short(slurm: Slurm) -> Iterator[ConfigError]:
    """Check that a job is not told to save and end before it could train a step."""
    lead = int(slurm.signal.rpartition("@")[2])
    if slurm.time and 60 * minutes(slurm.time) <= lead:
        yield ConfigError(
            f"cluster.slurm.time={slurm.time} is not above the {lead} s before its end at which "
            f"cluster.slurm.signal={slurm.signal} has the run save and end",
            "Give the job more time, or the signal fewer seconds.",
            ["cluster.slurm.time", "cluster.slurm.signal"],
        )


def _set_twice(slurm: Slurm) -> Iterator[ConfigError]:
    if slurm.gres and slurm.gpu_type:
        yield ConfigError(
            f"cluster.slurm.gres={slurm.gres} and cluster.slurm.gpu_type={slurm.gpu_type} both "
            "ask for GPUs",
            "Leave one out.",
            ["cluster.slurm.gres", "cluster.slurm.gpu_type"],
        )
    yield from _extra(slurm)


def _extra(slurm: Slurm) -> Iterator[ConfigError]:
    for option in slurm.extra:
        name = option.lstrip("-")
        known = [word for word in _SBATCH_OPTIONS if word.startswith(name)]
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
            problem = f"cluster.slurm.extra: {option!r} cannot name an option of sbatch"
            remedy = "Write its name alone, such as mail-type, and its value behind it."
        elif name in _SBATCH_OPTIONS:
            setting = _SBATCH_OPTIONS[name]
            problem = f"cluster.slurm.extra.{option} cannot be set here"
            remedy = f"Use {setting}." if setting else "The launcher sets it itself."
        elif known:  # which sbatch takes it for
            problem = f"cluster.slurm.extra.{option} is short for {known[0]}"
            remedy = "Write options in full."
        else:
            continue
        yield ConfigError(problem, remedy, ["cluster.slurm.extra"])
