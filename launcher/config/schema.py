"""The whole tree of settings: a frozen dataclass for each section of the YAML, and `check`.

`reader` fills the tree strictly from plain data. Each section is a module with its dataclasses, the
rules that no single field can state (`check`) and the settings that need another one (`switches`);
models and datasets have a class for each family in `recipes` (`families`). The defaults equal those
of the YAML files, as a test asserts; they serve files that leave a key out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.config.cluster import CLUSTERS, Cluster, Local, RayCluster, SlurmCluster
from launcher.config.errors import ConfigError
from launcher.config.families import DatasetOptions, ModelOptions, find_datasets, find_models
from launcher.config.fields import FromEnvironment, variants
from launcher.config.optimizer import OPTIMIZERS, AdamW, Optimizer
from launcher.config.parallel import METHODS, Auto, Parallel
from launcher.config.sections import (
    TASKS,
    Evaluate,
    Export,
    Generate,
    Planning,
    Prepare,
    Report,
    Run,
    Sweep,
    Tokenize,
    Train,
    Wandb,
    check_code,
)


@dataclass(frozen=True, kw_only=True)
class CustomModel(ModelOptions):
    """A custom model: a module with `build`, as `recipes` describes it, and its options.

    Its pipeline layers are counted when it is traced.
    """

    name: str = "custom"
    module: str
    options: dict[str, Any] = field(default_factory=dict)

    keeps_documents = True  # it is given them

    @property
    def sequence_length(self) -> int | None:
        """Tokens a sample, where its options say so."""
        length = self.options.get("sequence_length")
        return length if isinstance(length, int) else None


@dataclass(frozen=True, kw_only=True)
class CustomDataset(DatasetOptions):
    """A custom dataset: a module with `check` and `build`, as `recipes` describes it."""

    name: str = "custom"
    module: str
    options: dict[str, Any] = field(default_factory=dict)


MODELS: Mapping[str, type[ModelOptions]] = {**find_models(), "custom": CustomModel}
DATASETS: Mapping[str, type[DatasetOptions]] = {**find_datasets(), "custom": CustomDataset}


@dataclass(frozen=True)
class Config:
    """The whole tree.

    `model`, `dataset` and `optimizer` are of the class that their `name` picks, `parallel` of the
    one of its `method`, `cluster` of its `kind`.

    `allow_modules` and `allow_commands` are given on the command line only: what a file says of
    them does not count. `from_environment` is how the settings are to be written that took the
    value of a variable.
    """

    task: str = field(default="train", metadata={"choices": TASKS})
    allow_modules: list[str] = field(default_factory=list)
    allow_commands: bool = False
    hooks: list[str] = field(default_factory=list)
    prompt: list[str] | None = field(default=None, metadata={"one_or_several": True, "lines": True})
    run: Run = field(default_factory=Run)
    model: ModelOptions = field(default_factory=MODELS["gpt"], metadata=variants("name", MODELS))
    dataset: DatasetOptions = field(
        default_factory=DATASETS["stdlib_text"], metadata=variants("name", DATASETS)
    )
    optimizer: Optimizer = field(default_factory=AdamW, metadata=variants("name", OPTIMIZERS))
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Auto, metadata=variants("method", METHODS))
    cluster: Cluster = field(default_factory=Local, metadata=variants("kind", CLUSTERS))
    report: Report = field(default_factory=Report)
    wandb: Wandb = field(default_factory=Wandb)
    export: Export = field(default_factory=Export)
    evaluate: Evaluate = field(default_factory=Evaluate)
    generate: Generate = field(default_factory=Generate)
    plan: Planning = field(default_factory=Planning)
    prepare: Prepare = field(default_factory=Prepare)
    tokenize: Tokenize = field(default_factory=Tokenize)
    sweep: Sweep = field(default_factory=Sweep)
    from_environment: FromEnvironment = field(
        default_factory=dict, compare=False, repr=False, metadata={"internal": True}
    )

    @property
    def is_users(self) -> bool:
        """Whether the model or the data are a user's code."""
        return isinstance(self.model, CustomModel) or isinstance(self.dataset, CustomDataset)


def read_by(task: str) -> tuple[str, ...] | None:
    """Return the settings and sections that a task reads from the command line; None: all."""
    reads = TASKS.get(task)
    of_all = ("task", "allow_modules", "allow_commands", "sweep.jobs", "sweep.objective")
    return None if reads is None else (*reads, *of_all)


def check(config: Config) -> None:
    """Raise the first contradiction between settings as a ConfigError.

    Devices and files of this machine are checked where they are looked for, not here.
    """
    for error in _contradictions(config):
        raise error


def _contradictions(config: Config) -> Iterator[ConfigError]:
    model, cluster = config.model, config.cluster
    yield from _check_modules(config)
    yield from config.run.check()
    yield from model.check()
    yield from config.dataset.check(model)
    yield from config.optimizer.check()
    yield from config.train.check(cluster)
    yield from cluster.check()
    for section in ("export", "generate", "evaluate"):
        yield from getattr(config, section).check(section)
    yield from _check_task(config)
    yield from config.parallel.check(cluster, config.train.global_batch_size, model.layers)
    yield from config.report.check(config.allow_modules)


def _check_modules(config: Config) -> Iterator[ConfigError]:
    """Check that the command line allows the modules that settings name."""
    named = [("hooks", module) for module in config.hooks]
    for key in ("model", "dataset", "optimizer"):
        section = vars(getattr(config, key))
        if "module" not in section:
            continue
        named.append((f"{key}.module", section["module"]))
        if "name" in section["options"]:
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
        yield from check_code(key, f"{key}={module}", module, config.allow_modules)


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
            f"task={config.task} does not say which run",
            "Give run.id=VALUE.",
            ["task", "run.id"],
            code="missing_value",
        )
    if config.task == "sweep_status" and config.sweep.dir is None:
        yield ConfigError(
            "task=sweep_status does not say which sweep",
            "Give sweep.dir=multirun/ID.",
            ["task"],
            code="missing_value",
        )
    if config.task == "calibrate" and isinstance(cluster, SlurmCluster | RayCluster):
        yield ConfigError(
            "task=calibrate measures the devices that are here, and those of "
            f"cluster={cluster.title} are not",
            "Run it on a node, with cluster=local.",
            ["task", "cluster.kind"],
        )
