"""Check `parallel` against the batch, the model's layers and the devices.

What a method does not obey is none of its settings (`parallel`), and is refused as such.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from launcher.config.errors import ConfigError, listed
from launcher.config.machines import Described
from launcher.config.parallel import Auto, Data, Manual, Planned, Shard, ThreeD
from launcher.config.schema import Config
from launcher.schedule import training_schedules


def check_parallel(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with `parallel`."""
    parallel = config.parallel
    if not isinstance(parallel, Planned):
        return
    yield from _check_batch(config, parallel)
    if isinstance(parallel, Shard):
        yield from _check_mesh(config, {"data": parallel.data, "model": parallel.model})
    if isinstance(parallel, ThreeD):
        sizes = {"data": parallel.data, "model": parallel.model, "pipeline": parallel.pipeline}
        yield from _check_mesh(config, sizes)
    yield from _check_cost(config, parallel)
    if isinstance(parallel, Auto | Manual):
        yield from _check_stages(config, parallel)


def _check_batch(config: Config, parallel: Planned) -> Iterator[ConfigError]:
    """Check that the batch divides into equal microbatches, and those into equal shares."""
    gpus, batch = config.cluster.gpus, config.train.global_batch_size
    pieces = parallel.num_micro_batches or 1
    if batch % pieces:
        yield ConfigError(
            f"train.global_batch_size={batch} cannot be cut into "
            f"parallel.num_micro_batches={pieces} equal microbatches",
            f"Use train.global_batch_size={_multiples(batch, pieces)}.",
            ["train.global_batch_size", "parallel.num_micro_batches"],
        )
    if isinstance(parallel, Data) and gpus and (batch // pieces) % gpus:
        yield ConfigError(
            f"A microbatch of {batch // pieces} samples (train.global_batch_size={batch} / "
            f"parallel.num_micro_batches={pieces}) cannot be shared evenly by "
            f"cluster.gpus={gpus} devices",
            f"Make train.global_batch_size a multiple of {pieces * gpus}.",
            ["train.global_batch_size", "parallel.num_micro_batches", "cluster.gpus"],
        )


def _check_stages(config: Config, parallel: Auto | Manual) -> Iterator[ConfigError]:
    """Check that every stage has a layer, and a device where the schedule needs one."""
    gpus = config.cluster.gpus
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
            f"{listed(sharing)}: ask for fewer stages or more devices.",
            ["parallel.num_stages", "cluster.gpus"],
        )


def _check_mesh(config: Config, sizes: dict[str, int | None]) -> Iterator[ConfigError]:
    """Check that the axes of the logical mesh, by their names, cover the devices."""
    gpus = config.cluster.gpus
    given = {name: size for name, size in sizes.items() if size}
    product = math.prod(given.values())
    if gpus and (gpus % product or (len(given) == len(sizes) and gpus != product)):
        yield ConfigError(
            f"{' × '.join(f'parallel.{name}={size}' for name, size in given.items())} does not fit "
            f"cluster.gpus={gpus}",
            "Make the product the number of devices, or leave one of them null.",
            [f"parallel.{name}" for name in sizes] + ["cluster.gpus"],
        )


def _check_cost(config: Config, parallel: Planned) -> Iterator[ConfigError]:
    """Check that the devices are here that are to be measured."""
    cluster = config.cluster
    if parallel.cost == "profile" and isinstance(cluster, Described):
        yield ConfigError(
            f"parallel.cost=profile measures devices, and those of cluster={cluster.name} are not "
            "here",
            "Use parallel.cost=model.",
            ["parallel.cost", "cluster.kind"],
        )


def _multiples(batch: int, pieces: int) -> str:
    """Return the multiples of `pieces` next to `batch`, in words."""
    below = batch // pieces * pieces
    return f"{below} or {below + pieces}" if below else str(pieces)
