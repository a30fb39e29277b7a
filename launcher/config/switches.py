"""Settings that mean nothing while another one is as it is: said all the same, they are refused.

A setting counts as said on the command line, or in a file of the user's that gives it another value
than the default. What a file says below the place that turns the switch (a recipe's `eval_batches`
under `train.eval_every=0` on the command line) is no contradiction and is passed over.
Models and datasets have switches of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from launcher.config.errors import ConfigError
from launcher.config.fields import Switch
from launcher.config.keys import setting_keys
from launcher.config.machines import Described, SlurmCluster, slurm_of
from launcher.config.origin import ON_COMMAND_LINE, Origin
from launcher.config.schema import Config


def _is_slurm(config: Config) -> bool:
    return isinstance(config.cluster, SlurmCluster)


def _samples(config: Config) -> bool:
    every = config.train.sample_every
    return bool(config.train.eval_every if every is None else every)


def _decay(config: Config) -> str | None:
    """Return how the learning rate decays; None: an optimizer of the user's own decides that."""
    return getattr(config.optimizer, "decay", None)


SWITCHES = (
    Switch(
        ("train.eval_batches", "train.keep_best", "train.stop_early"),
        ("train.eval_every",),
        lambda c: c.train.eval_every > 0,
        "train.eval_every=0 never evaluates",
        "set train.eval_every",
    ),
    Switch(
        ("train.checkpoint.keep",),
        ("train.checkpoint.every_minutes",),
        lambda c: c.train.checkpoint.every_minutes > 0,
        "only what train.checkpoint.every_minutes saves is ever deleted, and it is 0",
        "set train.checkpoint.every_minutes",
    ),
    Switch(
        ("train.checkpoint.on_error",),
        ("train.checkpoint.every_steps", "train.checkpoint.every_minutes"),
        lambda c: bool(c.train.checkpoint.every_steps or c.train.checkpoint.every_minutes),
        "nothing is saved before the end, where a save that fails is an error in any case",
        "set train.checkpoint.every_steps or every_minutes",
    ),
    Switch(
        ("optimizer.final_learning_rate",),
        ("optimizer.decay",),
        lambda c: _decay(c) != "constant",
        "optimizer.decay=constant ends at the rate where it begins",
        "use optimizer.decay=cosine or linear",
    ),
    Switch(
        ("optimizer.decay_fraction",),
        ("optimizer.decay",),
        lambda c: _decay(c) in ("wsd", None),
        "that is the decay of optimizer.decay=wsd",
        "use that",
    ),
    Switch(
        ("optimizer.restarts",),
        ("optimizer.decay",),
        lambda c: _decay(c) in ("cosine_restarts", None),
        "there are restarts with optimizer.decay=cosine_restarts",
        "use that",
    ),
    Switch(
        ("optimizer.lora.alpha", "optimizer.lora.pattern"),
        ("optimizer.lora.rank",),
        lambda c: c.optimizer.lora.rank > 0,
        "optimizer.lora.rank=0 makes no adapters",
        "set optimizer.lora.rank",
    ),
    Switch(
        tuple(f"wandb.{name}" for name in ("project", "entity", "group", "name", "tags")),
        ("wandb.mode",),
        lambda c: c.wandb.mode != "disabled",
        "wandb.mode=disabled records nothing there",
        "use another wandb.mode",
    ),
    Switch(
        tuple(f"wandb.{name}" for name in ("mode", "project", "entity", "group", "name", "tags")),
        ("report.trackers",),
        lambda c: "wandb" in (c.report.trackers or ()),
        "report.trackers does not name wandb",
        "add it there",
    ),
    Switch(
        ("export",),
        ("task",),
        lambda c: c.task == "export",
        "that is for task=export",
        "use that task",
    ),
    Switch(
        ("export.dtype",),
        ("export.format",),
        lambda c: c.export.format == "hf",
        "an .npz file keeps the types of the checkpoint",
        "set export.format=hf",
    ),
    Switch(
        ("evaluate",),
        ("task",),
        lambda c: c.task == "evaluate",
        "that is for task=evaluate",
        "use that task",
    ),
    Switch(
        tuple(f"generate.{name}" for name in ("step", "best", "ema", "prompts")),
        ("task",),
        lambda c: c.task == "generate",
        "that is for task=generate",
        "use that task",
    ),
    Switch(
        ("generate", "prompt"),
        ("task", "train.sample_every"),
        lambda c: c.task == "generate" or _samples(c),
        "that is for task=generate and the samples of a training",
        "use that task, or set train.sample_every",
    ),
    Switch(
        ("prompt",),
        ("generate.prompts",),
        lambda c: c.generate.prompts is None,
        "generate.prompts names a file of them",
        "leave that out",
    ),
    Switch(
        ("generate.top_k", "generate.top_p", "generate.seed"),
        ("generate.temperature",),
        lambda c: c.generate.temperature > 0,
        "generate.temperature=0 always takes the likeliest token",
        "set generate.temperature",
    ),
    Switch(
        ("prepare",),
        ("task",),
        lambda c: c.task in ("prepare_data", "train"),
        "that is for task=prepare_data, and for a training, which prepares its data first",
        "use that task",
    ),
    Switch(
        ("tokenize",),
        ("task",),
        lambda c: c.task == "tokenize",
        "that is for task=tokenize",
        "use that task",
    ),
    Switch(
        ("sweep.dir",),
        ("task",),
        lambda c: c.task == "sweep_status",
        "that is for task=sweep_status",
        "use that task",
    ),
    Switch(
        ("cluster.links.inter_host_gb_per_second",),
        ("cluster.hosts",),
        lambda c: not isinstance(c.cluster, Described) or c.cluster.hosts > 1,
        "cluster.hosts=1 has no link to another host",
        "set cluster.hosts",
    ),
    Switch(
        ("cluster.slurm.container.mounts", "cluster.slurm.container.workdir"),
        ("cluster.slurm.container.image",),
        lambda c: not _is_slurm(c) or slurm_of(c.cluster).container.image is not None,
        "without cluster.slurm.container.image there is no container",
        "name an image",
    ),
    Switch(
        ("cluster.slurm.gpu_type", "cluster.slurm.gres"),
        ("cluster.slurm.emulated",),
        lambda c: not _is_slurm(c) or not slurm_of(c.cluster).emulated,
        "cluster.slurm.emulated=true asks for no GPUs",
        "leave that out",
    ),
)


# What only a sweep heeds: a file may say it all the same, for its settings serve single runs, too.
_OF_SWEEPS = ("sweep.objective", "sweep.jobs")


def check_switches(config: Config, origin: Origin, in_sweep: bool = False) -> None:
    """Raise ConfigError for the first setting that was said and has no effect."""
    for key in () if in_sweep else _OF_SWEEPS:
        if origin.rank(key) == ON_COMMAND_LINE:
            raise ConfigError(
                f"{key} has no effect: this is one run", "Leave it out, or add -m.", [key]
            )
    for switch in (*SWITCHES, *config.model.switches, *config.dataset.switches):
        if switch.is_on(config):
            continue
        turned = max(origin.rank(key) for key in switch.by)
        for key in _below(switch.keys):
            said = origin.rank(key)
            is_said = said == ON_COMMAND_LINE or (
                origin.is_users(key) and _value(config, key) not in (None, _default(config, key))
            )
            if is_said and said >= turned:
                raise ConfigError(
                    f"{key} has no effect: {switch.off}",
                    f"Leave it out, or {switch.remedy}.",
                    [key],
                )


def _below(keys: tuple[str, ...]) -> Iterator[str]:
    return (
        known
        for known in setting_keys()
        if any(known == key or known.startswith(f"{key}.") for key in keys)
    )


def _value(config: Config, key: str) -> Any:
    """Return the value of a setting; None if the variant at hand has none such."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def _default(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    for field in dataclasses.fields(_value(config, section) if section else config):
        if field.name == name:
            made = field.default_factory
            return field.default if made is dataclasses.MISSING else made()
    return None
