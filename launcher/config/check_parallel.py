"""What goes together in `parallel`, and with the batch, the model's layers and the devices.

`checks` calls `check_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.schedule import training_schedules

_ONE_STAGE = ("data", "zero2", "zero3", "shard")


def check_parallel(config: Config) -> Iterator[ConfigError]:
    """What is wrong with `parallel`."""
    yield from _check_batch(config)
    yield from _check_one_stage(config)
    yield from _check_keys(config)
    yield from _check_mesh(config)
    yield from _check_replay(config)
    yield from _check_cost(config)
    yield from _check_stages(config)


def _check_batch(config: Config) -> Iterator[ConfigError]:
    """A batch is cut into equal microbatches, and those into equal shares."""
    parallel, gpus = config.parallel, config.cluster.gpus
    batch, pieces = config.train.global_batch_size, parallel.num_micro_batches or 1
    if batch % pieces:
        yield ConfigError(
            f"train.global_batch_size={batch} cannot be cut into "
            f"parallel.num_micro_batches={pieces} equal microbatches",
            f"Use train.global_batch_size={_multiples(batch, pieces)}.",
            ["train.global_batch_size", "parallel.num_micro_batches"],
        )
    if parallel.method in ("data", "zero2", "zero3") and gpus and (batch // pieces) % gpus:
        yield ConfigError(
            f"A microbatch of {batch // pieces} samples (train.global_batch_size={batch} / "
            f"parallel.num_micro_batches={pieces}) cannot be shared evenly by "
            f"cluster.gpus={gpus} devices",
            f"Make train.global_batch_size a multiple of {pieces * gpus}.",
            ["train.global_batch_size", "parallel.num_micro_batches", "cluster.gpus"],
        )


def _check_one_stage(config: Config) -> Iterator[ConfigError]:
    """Methods without a pipeline."""
    parallel = config.parallel
    if parallel.method not in _ONE_STAGE:
        return
    if (stages := parallel.num_stages or 1) > 1:
        yield ConfigError(
            f"parallel={parallel.method} is one stage, not parallel.num_stages={stages}",
            "Use parallel=manual for a pipeline, or parallel.num_stages=null.",
            ["parallel.num_stages"],
        )
    if parallel.schedule != "auto":
        yield ConfigError(
            f"parallel={parallel.method} is one stage and has no schedule such as "
            f"parallel.schedule={parallel.schedule}",
            "Use parallel=manual for a pipeline.",
            ["parallel.schedule"],
        )


def _check_keys(config: Config) -> Iterator[ConfigError]:
    """Which methods put layers into stages, and may be told how."""
    parallel = config.parallel
    if parallel.num_layers and parallel.method not in ("auto", "manual", "three_d"):
        yield ConfigError(
            f"parallel.num_layers={parallel.num_layers} has no meaning for "
            f"parallel={parallel.method}",
            "Use parallel=auto, manual or three_d, which put layers into stages.",
            ["parallel.num_layers"],
        )
    for key, methods in (("num_stages", ("auto", "manual")), ("stages_per_mesh", ("manual",))):
        value = getattr(parallel, key)
        if value is not None and parallel.method not in methods:
            yield ConfigError(
                f"parallel.{key}={value} has no meaning for parallel={parallel.method}",
                f"Use parallel={methods[-1]}.",
                [f"parallel.{key}"],
            )


def _check_stages(config: Config) -> Iterator[ConfigError]:
    """Every stage needs a layer, and most a device."""
    parallel, gpus = config.parallel, config.cluster.gpus
    layers = parallel.num_layers or config.model.layers
    stages = parallel.num_stages or 1
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
    sharing = training_schedules(interleaves=True)
    if gpus is not None and stages > gpus and parallel.schedule not in sharing:
        yield ConfigError(
            f"parallel.num_stages={stages} is more than cluster.gpus={gpus}",
            "A stage needs a device of its own, except with parallel.schedule="
            f"{' or '.join(sharing)}: ask for fewer stages or more devices.",
            ["parallel.num_stages", "cluster.gpus"],
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


def _check_replay(config: Config) -> Iterator[ConfigError]:
    """A plan that was made before says all but its own name."""
    parallel = config.parallel
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


def _multiples(batch: int, pieces: int) -> str:
    """The multiples of `pieces` next to `batch`, in words."""
    below = batch // pieces * pieces
    return f"{below} or {below + pieces}" if below else str(pieces)
