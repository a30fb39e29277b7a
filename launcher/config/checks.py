"""The rules that no single setting can state: settings that do not go together.

Each check is a pure function that yields the errors it finds; `check` raises the first. What needs
this machine's devices or files is checked where they are known, not here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from launcher.config.errors import ConfigError
from launcher.config.schema import (
    GPT,
    MLP,
    Config,
    CustomDataset,
    CustomModel,
    Optimizer,
    Synthetic,
)

_BYTES = 256  # text is read as bytes: the vocabulary that it needs

# Settings that not every optimizer has, and those that do.
_OPTIMIZERS_WITH = {
    "momentum": ("sgd",),
    "b1": ("adamw", "adam", "lion"),
    "b2": ("adamw", "adam", "lion"),
    "eps": ("adamw", "adam"),
}

# What a text setting of `cluster.slurm` must look like, and what to say where it does not.
_SLURM_TEXTS = {
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
# Options of sbatch that `cluster.slurm.extra` may not set, and the setting that does.
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


def check(config: Config) -> None:
    """Raises the first contradiction in `config` as a ConfigError."""
    for rule in (_check_modules, _check_run, _check_model, _check_dataset, _check_optimizer):
        for error in rule(config):
            raise error
    for rule in (_check_cluster, _check_slurm, _check_parallel):
        for error in rule(config):
            raise error


def _check_modules(config: Config) -> Iterator[ConfigError]:
    """A settings file may come from anywhere: it names code only where the user allows that."""
    for key, section in (("model", config.model), ("dataset", config.dataset)):
        if not isinstance(section, CustomModel | CustomDataset):
            continue
        module = section.module
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
            yield ConfigError(
                f"{key}.module={module!r} is not the name of a module",
                "Write it as import does, such as my_pkg.models.",
                [f"{key}.module"],
            )
        if not any(f"{module}.".startswith(f"{allowed}.") for allowed in config.allow_modules):
            yield ConfigError(
                f"{key}.module={module} is code that this run is not allowed to load",
                f"If you trust it, add allow_modules=[{module}] on the command line.",
                [f"{key}.module"],
            )


def _check_run(config: Config) -> Iterator[ConfigError]:
    run = config.run
    if run.id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.id):
        yield ConfigError(
            f"run.id={run.id!r} cannot name a folder and a Weights & Biases run",
            "Use letters, digits, '.', '_' and '-'.",
            ["run.id"],
        )
    if run.resume == "must" and run.id is None:
        yield ConfigError(
            "run.resume=must does not say which run", "Give run.id=VALUE.", ["run.resume"]
        )


def _check_model(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if not isinstance(model, GPT):
        return
    if model.hidden_size and model.num_heads and model.hidden_size % model.num_heads:
        yield ConfigError(
            f"model.hidden_size={model.hidden_size} cannot be cut into "
            f"model.num_heads={model.num_heads} equal heads",
            "Make it a multiple.",
            ["model.hidden_size", "model.num_heads"],
        )


def _check_dataset(config: Config) -> Iterator[ConfigError]:
    model, dataset = config.model, config.dataset
    if isinstance(dataset, Synthetic | CustomDataset) or isinstance(model, CustomModel):
        return  # `recipes` knows whether these go together
    if isinstance(model, MLP):
        yield ConfigError(
            f"model=mlp cannot learn from dataset={dataset.name}: it takes vectors, not text",
            "Use dataset=synthetic or model=gpt.",
            ["model.name", "dataset.name"],
        )
    elif model.vocab_size is not None and model.vocab_size < _BYTES:
        yield ConfigError(
            f"model.vocab_size={model.vocab_size} is too small for dataset={dataset.name}, "
            f"which is bytes",
            f"Make it at least {_BYTES}.",
            ["model.vocab_size"],
        )


def _check_optimizer(config: Config) -> Iterator[ConfigError]:
    optimizer = config.optimizer
    for key, users in _OPTIMIZERS_WITH.items():
        value = getattr(optimizer, key)
        if optimizer.name not in users and value != getattr(Optimizer(), key):
            yield ConfigError(
                f"optimizer.{key}={value:g} has no meaning for optimizer={optimizer.name}",
                f"Leave it out, or use optimizer={users[0]}.",
                [f"optimizer.{key}"],
            )
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


def _check_cluster(config: Config) -> Iterator[ConfigError]:
    cluster = config.cluster
    if cluster.kind == "local" and cluster.hosts > 1:
        yield ConfigError(
            f"cluster=local is this one machine, not cluster.hosts={cluster.hosts}",
            "Use cluster=emulated to play several hosts on it.",
            ["cluster.hosts"],
        )
    if cluster.gpus is not None and cluster.gpus % cluster.hosts:
        yield ConfigError(
            f"cluster.gpus={cluster.gpus} cannot be shared evenly by "
            f"cluster.hosts={cluster.hosts} hosts",
            "cluster.gpus is the total over all hosts: make it a multiple.",
            ["cluster.gpus", "cluster.hosts"],
        )


def _check_slurm(config: Config) -> Iterator[ConfigError]:
    cluster, slurm = config.cluster, config.cluster.slurm
    if config.task == "submit" and cluster.kind != "slurm":
        yield ConfigError(
            f"task=submit submits to Slurm, not to cluster={cluster.kind}",
            "Use cluster=slurm.",
            ["task", "cluster.kind"],
        )
    if config.task == "sweep_status" and config.sweep.dir is None:
        yield ConfigError(
            "task=sweep_status does not say which sweep",
            "Give sweep.dir=multirun/ID.",
            ["task"],
        )
    if config.task == "calibrate" and cluster.kind == "slurm":
        yield ConfigError(
            "task=calibrate measures the devices that are here, and those of cluster=slurm are not",
            "Run it on a node, with cluster=local.",
            ["task", "cluster.kind"],
        )
    if cluster.kind != "slurm":
        return
    if cluster.gpus is None:
        yield ConfigError(
            "cluster.gpus is not set, and cluster=slurm must know how many to ask for",
            "Give the number in total, over all nodes.",
            ["cluster.gpus"],
        )
    for name, (pattern, remedy) in _SLURM_TEXTS.items():
        value = getattr(slurm, name)
        if value is not None and not re.fullmatch(pattern, value):
            yield ConfigError(
                f"cluster.slurm.{name}={value!r} cannot be understood",
                remedy,
                [f"cluster.slurm.{name}"],
            )
    if slurm.gres and slurm.gpu_type:
        yield ConfigError(
            f"cluster.slurm.gres={slurm.gres} and cluster.slurm.gpu_type={slurm.gpu_type} both "
            "ask for GPUs",
            "Leave one out.",
            ["cluster.slurm.gres", "cluster.slurm.gpu_type"],
        )
    for option in slurm.extra:
        if (setting := _SBATCH_OPTIONS.get(option.lstrip("-"))) is not None:
            yield ConfigError(
                f"cluster.slurm.extra.{option} is not for you to set that way",
                f"{setting} says it." if setting else "The launcher sets it itself.",
                ["cluster.slurm.extra"],
            )
    for name in slurm.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield ConfigError(
                f"cluster.slurm.env: {name!r} cannot name an environment variable",
                "Use letters, digits and '_'.",
                ["cluster.slurm.env"],
            )


def _check_parallel(config: Config) -> Iterator[ConfigError]:
    parallel, gpus = config.parallel, config.cluster.gpus
    layers = parallel.num_layers or config.model.layers
    batch, pieces = config.train.global_batch_size, parallel.num_micro_batches or 1
    if batch % pieces:
        yield ConfigError(
            f"train.global_batch_size={batch} cannot be cut into "
            f"parallel.num_micro_batches={pieces} equal microbatches",
            f"Use train.global_batch_size={_multiples(batch, pieces)}.",
            ["train.global_batch_size", "parallel.num_micro_batches"],
        )
    stages = parallel.num_stages or 1
    one_stage = parallel.method in ("data", "zero2", "zero3", "shard")
    if one_stage and stages > 1:
        yield ConfigError(
            f"parallel={parallel.method} is one stage, not parallel.num_stages={stages}",
            "Use parallel=manual for a pipeline.",
            ["parallel.num_stages"],
        )
    if parallel.num_layers and parallel.method not in ("auto", "manual", "three_d"):
        yield ConfigError(
            f"parallel.num_layers={parallel.num_layers} has no meaning for "
            f"parallel={parallel.method}",
            "Use parallel=auto, manual or three_d, which put layers into stages.",
            ["parallel.num_layers"],
        )
    yield from _check_mesh(config)
    yield from _check_cost(config)
    if parallel.method in ("data", "zero2", "zero3") and gpus and (batch // pieces) % gpus:
        yield ConfigError(
            f"A microbatch of {batch // pieces} samples (train.global_batch_size={batch} / "
            f"parallel.num_micro_batches={pieces}) cannot be shared evenly by "
            f"cluster.gpus={gpus} devices",
            f"Make train.global_batch_size a multiple of {pieces * gpus}.",
            ["train.global_batch_size", "parallel.num_micro_batches", "cluster.gpus"],
        )
    if layers is not None and stages > layers:
        yield ConfigError(
            f"parallel.num_stages={stages} is more than "
            + (
                f"parallel.num_layers={layers}"
                if parallel.num_layers
                else f"the model's {layers} layers"
            ),
            "A stage is at least one layer: ask for fewer stages, or raise "
            f"{'parallel' if parallel.num_layers else 'model'}.num_layers.",
            ["parallel.num_stages"],
        )
    if gpus is not None and stages > gpus and parallel.schedule != "interleaved_1f1b":
        yield ConfigError(
            f"parallel.num_stages={stages} is more than cluster.gpus={gpus}",
            "A stage needs a device of its own, except with parallel.schedule=interleaved_1f1b: "
            "ask for fewer stages or more devices.",
            ["parallel.num_stages", "cluster.gpus"],
        )
    for key, methods in (("num_stages", ("auto", "manual")), ("stages_per_mesh", ("manual",))):
        value = getattr(parallel, key)
        if value is not None and parallel.method not in methods:
            yield ConfigError(
                f"parallel.{key}={value} has no meaning for parallel={parallel.method}",
                f"Use parallel={methods[-1]}.",
                [f"parallel.{key}"],
            )
    if one_stage and parallel.schedule != "auto":
        yield ConfigError(
            f"parallel={parallel.method} is one stage and has no schedule such as "
            f"parallel.schedule={parallel.schedule}",
            "Use parallel=manual for a pipeline.",
            ["parallel.schedule"],
        )


def _check_cost(config: Config) -> Iterator[ConfigError]:
    """What is to be measured must be here."""
    parallel, cluster = config.parallel, config.cluster
    if parallel.cost == "model":
        return
    if cluster.kind == "described":
        yield ConfigError(
            f"parallel.cost=profile measures devices, and those of cluster={cluster.name} are not "
            "here",
            "Use parallel.cost=model.",
            ["parallel.cost", "cluster.kind"],
        )
    if parallel.method == "replay":
        yield ConfigError(
            "parallel.cost=profile has no meaning for parallel=replay, which keeps its predictions",
            "Leave it out.",
            ["parallel.cost"],
        )


def _check_mesh(config: Config) -> Iterator[ConfigError]:
    """The logical mesh, and which methods have one."""
    parallel, gpus = config.parallel, config.cluster.gpus
    of_method = {"shard": ("data", "model"), "three_d": ("data", "model", "pipeline")}
    known = of_method.get(parallel.method, ())
    sizes = {name: getattr(parallel, name) for name in ("data", "model", "pipeline")}
    for name, size in sizes.items():
        if size is not None and name not in known:
            yield ConfigError(
                f"parallel.{name}={size} has no meaning for parallel={parallel.method}",
                "Use parallel=three_d, or parallel=shard for data and model.",
                [f"parallel.{name}"],
            )
    product = math.prod(sizes[name] or 1 for name in known)
    complete = all(sizes[name] for name in known)
    if known and gpus and (gpus % product or (complete and gpus != product)):
        given = " × ".join(f"parallel.{name}={sizes[name]}" for name in known if sizes[name])
        yield ConfigError(
            f"{given} does not fit cluster.gpus={gpus}",
            "Make the product the number of devices, or leave one of them null.",
            [f"parallel.{name}" for name in known] + ["cluster.gpus"],
        )
    for name in ("schedule", "remat", "num_micro_batches"):
        value = getattr(parallel, name)
        if parallel.method == "replay" and value not in ("auto", None):
            yield ConfigError(
                f"parallel.{name}={value} has no meaning for parallel=replay: the plan says it",
                "Leave it out, or edit the plan.",
                [f"parallel.{name}"],
            )
    if (parallel.method == "replay") != (parallel.plan is not None):
        yield ConfigError(
            "parallel=replay and parallel.plan=FILE need each other",
            "Give parallel=replay parallel.plan=outputs/RUN/plan.json.",
            ["parallel.plan"],
        )


def _multiples(batch: int, pieces: int) -> str:
    """The multiples of `pieces` next to `batch`, in words."""
    below = batch // pieces * pieces
    return f"{below} or {below + pieces}" if below else str(pieces)
