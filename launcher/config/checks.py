"""The rules that no single setting can state: settings that do not go together.

Each check is a pure function that yields the errors it finds; `check` raises the first. Those of
`cluster.slurm` and `parallel` have modules of their own; those of a model or dataset are methods of
its settings. What needs this machine's devices or files is checked where they are known, not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.config.check_parallel import check_parallel
from launcher.config.check_slurm import check_slurm
from launcher.config.check_trackers import check_trackers
from launcher.config.errors import ConfigError
from launcher.config.machines import (
    Described,
    Hosts,
    Local,
    Machines,
    RayCluster,
    SlurmCluster,
    ray_address_problem,
)
from launcher.config.optimizers import CustomOptimizer, Scheduled
from launcher.config.schema import Config, CustomDataset, CustomModel

_LONGEST_NAME = 255  # bytes, of a folder


def check(config: Config) -> None:
    """Raise the first contradiction in `config` as a ConfigError."""
    for rule in _RULES:
        for error in rule(config):
            raise error


def _check_modules(config: Config) -> Iterator[ConfigError]:
    """Check that the user allows the code that settings name: a file may come from anywhere."""
    named = [("hooks", module) for module in config.hooks]
    for key in ("model", "dataset", "optimizer"):
        section = getattr(config, key)
        if not isinstance(section, CustomModel | CustomDataset | CustomOptimizer):
            continue
        named.append((f"{key}.module", section.module))
        if "name" in section.options:
            yield ConfigError(
                f"{key}.options.name is reserved for {key}.module",
                "Give it another name.",
                [f"{key}.options.name"],
            )
    for key, module in named:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
            yield ConfigError(
                f"{key}={module!r} is not the name of a module",
                "Write it as import does, such as my_pkg.models.",
                [key],
            )
        if not any(f"{module}.".startswith(f"{allowed}.") for allowed in config.allow_modules):
            yield ConfigError(
                f"{key}={module} is code that this run is not allowed to load",
                f"If you trust it, add allow_modules=[{module}] on the command line.",
                [key],
            )


def _check_run(config: Config) -> Iterator[ConfigError]:
    run = config.run
    if run.id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.id):
        yield ConfigError(
            f"run.id={run.id!r} cannot name a folder and a Weights & Biases run",
            "Use letters, digits, '.', '_' and '-'.",
            ["run.id"],
        )
    if run.id is not None and len(run.id) > _LONGEST_NAME:
        yield ConfigError(
            f"run.id={run.id[:20]}… has {len(run.id)} characters; a folder's name has at most "
            f"{_LONGEST_NAME}",
            "Choose a shorter one.",
            ["run.id"],
        )
    if run.resume == "must" and run.id is None:
        yield ConfigError(
            "run.resume=must does not say which run", "Give run.id=VALUE.", ["run.resume"]
        )


def _check_recipe(config: Config) -> Iterator[ConfigError]:
    yield from config.model.check()
    yield from config.dataset.check(config.model)


def _check_optimizer(config: Config) -> Iterator[ConfigError]:
    optimizer = config.optimizer
    if optimizer.ema == 1:
        yield ConfigError(
            "optimizer.ema=1 would keep the first parameters forever",
            "Use a number below 1, such as 0.999.",
            ["optimizer.ema"],
        )
    if not isinstance(optimizer, Scheduled):
        return
    if optimizer.clip_norm == 0:
        yield ConfigError(
            "optimizer.clip_norm=0 would make every gradient zero",
            "Use null for no clipping.",
            ["optimizer.clip_norm"],
        )
    if optimizer.final_learning_rate > optimizer.learning_rate:
        yield ConfigError(
            f"optimizer.final_learning_rate={optimizer.final_learning_rate:g} is above "
            f"optimizer.learning_rate={optimizer.learning_rate:g}",
            "The rate decays from the second to the first.",
            ["optimizer.final_learning_rate", "optimizer.learning_rate"],
        )


def _check_best(config: Config) -> Iterator[ConfigError]:
    metric = config.train.keep_best
    if metric is not None and not metric.startswith("eval_"):
        yield ConfigError(
            f"train.keep_best={metric} is not a metric of an evaluation",
            "Name one as eval_loss, with eval_ before its name.",
            ["train.keep_best"],
        )


def _check_rollback(config: Config) -> Iterator[ConfigError]:
    """Check that a rollback, which is a restart, is allowed one."""
    cluster, asked = config.cluster, config.train.non_finite == "rollback"
    if asked and isinstance(cluster, Machines) and cluster.max_restarts == 0:
        yield ConfigError(
            "train.non_finite=rollback is a restart, and cluster.max_restarts=0 allows none",
            "Use train.non_finite=stop or skip, or allow restarts.",
            ["train.non_finite", "cluster.max_restarts"],
        )


def _check_cluster(config: Config) -> Iterator[ConfigError]:
    cluster = config.cluster
    if isinstance(cluster, Local) and cluster.hosts > 1:
        yield ConfigError(
            f"cluster=local is this one machine, not cluster.hosts={cluster.hosts}",
            "Use cluster=emulated to emulate several hosts on it.",
            ["cluster.hosts"],
        )
    if cluster.gpus is not None and cluster.gpus % cluster.hosts:
        yield ConfigError(
            f"cluster.gpus={cluster.gpus} cannot be shared evenly by "
            f"cluster.hosts={cluster.hosts} hosts",
            "cluster.gpus is the total over all hosts: make it a multiple.",
            ["cluster.gpus", "cluster.hosts"],
        )
    if isinstance(cluster, Hosts) and cluster.transport != "auto" and cluster.hosts == 1:
        yield ConfigError(
            f"cluster.transport={cluster.transport} is a way between processes, and "
            "cluster.hosts=1 is one",
            "Leave it at auto.",
            ["cluster.transport", "cluster.hosts"],
        )


def _check_ray(config: Config) -> Iterator[ConfigError]:
    """Check the address of a Ray, and what workers demand of it."""
    cluster = config.cluster
    if not isinstance(cluster, RayCluster):
        return
    if problem := ray_address_problem(cluster.address):
        address = f"cluster.address={cluster.address}"
        yield ConfigError(f"{address} is not a usable address", problem, ["cluster.address"])
    for name, amount in cluster.resources.items():
        if name in ("CPU", "GPU"):
            setting = {"CPU": "cluster.num_cpus", "GPU": "cluster.gpus"}[name]
            yield ConfigError(
                f"cluster.resources.{name} cannot be set here",
                f"Use {setting}.",
                ["cluster.resources"],
            )
        if amount <= 0:
            yield ConfigError(
                f"cluster.resources.{name}={amount:g} demands nothing",
                "Give an amount above 0, or leave it out.",
                ["cluster.resources"],
            )


def _check_described(config: Config) -> Iterator[ConfigError]:
    """Check that a described cluster has the figures that a plan for it rests on."""
    cluster = config.cluster
    if not isinstance(cluster, Described):
        return
    device, links = cluster.device, cluster.links
    needed = {
        "cluster.gpus": cluster.gpus,
        "cluster.device.name": device.name,
        "cluster.device.peak_tflops": device.peak_tflops,
        "cluster.device.memory_gib": device.memory_gib,
        "cluster.device.memory_gb_per_second": device.memory_gb_per_second,
        "cluster.links.intra_host_gb_per_second": links.intra_host_gb_per_second,
    }
    if cluster.hosts > 1:
        needed["cluster.links.inter_host_gb_per_second"] = links.inter_host_gb_per_second
    for key, value in needed.items():
        if not value:
            yield ConfigError(
                f"{key} is not set, and a described cluster needs it",
                "Fill it in from the datasheet; conf/device/h100.yaml is an example.",
                [key],
            )


def _check_task(config: Config) -> Iterator[ConfigError]:
    cluster = config.cluster
    if config.task == "submit" and not isinstance(cluster, SlurmCluster):
        yield ConfigError(
            f"task=submit submits to Slurm, not to cluster={cluster.title}",
            "Use cluster=slurm.",
            ["task", "cluster.kind"],
        )
    if config.task in ("export", "generate", "evaluate") and config.run.id is None:
        yield ConfigError(
            f"task={config.task} does not say which run", "Give run.id=VALUE.", ["task", "run.id"]
        )
    for section in ("export", "generate", "evaluate"):
        asked = getattr(config, section)
        if asked.best and asked.step is not None:
            yield ConfigError(
                f"{section}.best=true and {section}.step={asked.step} name two checkpoints",
                "Leave one of them out.",
                [f"{section}.best", f"{section}.step"],
            )
    if config.task == "sweep_status" and config.sweep.dir is None:
        yield ConfigError(
            "task=sweep_status does not say which sweep",
            "Give sweep.dir=multirun/ID.",
            ["task"],
        )
    if config.task == "calibrate" and isinstance(cluster, SlurmCluster | RayCluster):
        yield ConfigError(
            "task=calibrate measures the devices that are here, and those of "
            f"cluster={cluster.title} are not",
            "Run it on a node, with cluster=local.",
            ["task", "cluster.kind"],
        )


_RULES = (
    *(_check_modules, _check_run, _check_recipe, _check_optimizer),
    *(_check_best, _check_rollback, _check_cluster, _check_ray, _check_described, _check_task),
    *(check_slurm, check_parallel, check_trackers),
)
