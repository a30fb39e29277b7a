"""The section `parallel`: a class for each method, with its settings and its `check`.

To add a method, write its class here, list it in `METHODS`, give it a file in `conf/parallel/`, and
map it to a plan in `driver.planning.plan_from_config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from launcher.base import REMAT_NAMES, parse_remat
from launcher.config.cluster import Cluster, Described
from launcher.config.errors import ConfigError, listed
from launcher.config.fields import automatic, automatic_choice, choice, number
from launcher.schedule import DEFAULT_SCHEDULE, training_schedules


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Settings of every method.

    Attributes:
        method: its name.
        allow_over_memory: whether to train by a plan that needs more memory than the devices have.
        clause: why the method has no other settings, for messages; "" where there is no one reason.
        idles: whether its plan leaves devices idle where they do not help.
    """

    method: str
    allow_over_memory: bool = False
    clause: ClassVar[str] = ""
    idles = False

    def check(self, cluster: Cluster, batch: int, layers: int | None) -> Iterator[ConfigError]:
        """Yield the contradictions within these settings and with what they divide.

        Args:
            cluster: the cluster.
            batch: `train.global_batch_size`.
            layers: the number of pipeline layers of the model; None: not known before tracing.
        """
        yield from ()

    def on_fewer_devices(self, batch: int) -> Iterator[Parallel]:
        """Yield these settings and then others, of which fewer devices take the first that fits.

        Only the number of microbatches and the data axis give way. Larger numbers come first, as
        they need no more memory.

        Args:
            batch: `train.global_batch_size`.
        """
        yield from ()


@dataclass(frozen=True, kw_only=True)
class Replay(Parallel):
    """A plan that was made before, from the file `plan`."""

    method: str = "replay"
    plan: str
    clause = "which takes it from the plan"


@dataclass(frozen=True, kw_only=True)
class Planned(Parallel):
    """Settings of every method that makes a plan.

    Attributes:
        num_micro_batches: number of parts of the global batch.
        remat: the activations that are recomputed for the backward pass.
        cost: source of the predictions: rates measured on the devices of this machine, nominal
            rates, or layers timed on these devices.
        bucket_bytes: the most bytes of gradients that one collective sums over the replicas.
        reduce_dtype: the type in which gradients are summed over replicas.
    """

    num_micro_batches: int | None = automatic()
    remat: str = automatic_choice("none", *REMAT_NAMES, parse=parse_remat)
    cost: str = choice("measured", "measured", "model", "profile")
    bucket_bytes: int = number(25 << 20, minimum=0)
    reduce_dtype: str = choice("fp32", "fp32", "bf16")

    def check(self, cluster: Cluster, batch: int, layers: int | None) -> Iterator[ConfigError]:
        """Yield the contradictions with the batch and with devices that are not here."""
        pieces = self.num_micro_batches or 1
        if batch % pieces:
            yield ConfigError(
                f"train.global_batch_size={batch} cannot be cut into "
                f"parallel.num_micro_batches={pieces} equal microbatches",
                f"Use train.global_batch_size={_multiples(batch, pieces)}.",
            )
        if self.cost == "profile" and isinstance(cluster, Described):
            yield ConfigError(
                f"parallel.cost=profile measures devices, and those of cluster={cluster.name} are "
                "not here",
                "Use parallel.cost=model.",
                ["parallel.cost", "cluster.kind"],
            )

    def on_fewer_devices(self, batch: int) -> Iterator[Planned]:
        """See `Parallel.on_fewer_devices`; nothing is measured."""
        kept = replace(self, cost="measured") if self.cost == "profile" else self
        yield kept
        asked = self.num_micro_batches or 1
        others = [n for n in range(1, batch + 1) if batch % n == 0 and n != asked]
        for count in sorted(others, key=lambda n: (n < asked, abs(n - asked))):
            yield replace(kept, num_micro_batches=count)


@dataclass(frozen=True, kw_only=True)
class Data(Planned):
    """Data parallelism: one stage on all devices, each with a share of every microbatch."""

    method: str = "data"
    num_micro_batches: int = automatic(1)
    clause = "which is one stage on all devices"

    def check(self, cluster: Cluster, batch: int, layers: int | None) -> Iterator[ConfigError]:
        """Check that the replicas get equal shares of a microbatch, too."""
        yield from super().check(cluster, batch, layers)
        pieces, gpus = self.num_micro_batches, cluster.gpus
        if gpus and (batch // pieces) % gpus:
            yield ConfigError(
                f"A microbatch of {batch // pieces} samples (train.global_batch_size={batch} / "
                f"parallel.num_micro_batches={pieces}) cannot be shared evenly by "
                f"cluster.gpus={gpus} devices",
                f"Make train.global_batch_size a multiple of {pieces * gpus}.",
            )


@dataclass(frozen=True, kw_only=True)
class Served(Data):
    """Data parallelism whose workers, one a host, sum their gradients through servers.

    Attributes:
        servers: number of servers; None: one a host.
    """

    method: str = "parameter_server"
    servers: int | None = number(None, minimum=1, maximum=256)


@dataclass(frozen=True, kw_only=True)
class Zero2(Data):
    """Data parallelism with a sharded optimizer state and sharded gradients."""

    method: str = "zero2"


@dataclass(frozen=True, kw_only=True)
class Zero3(Data):
    """Data parallelism with sharded parameters as well."""

    method: str = "zero3"


@dataclass(frozen=True, kw_only=True)
class Shard(Planned):
    """One stage on all devices, which share the batch and every large matrix product.

    Attributes:
        data: size of the data axis; None: what `model` leaves of the devices.
        model: size of the model axis; None: what `data` leaves, or all devices.
    """

    method: str = "shard"
    num_micro_batches: int = automatic(1)
    data: int | None = number(None, minimum=1)
    model: int | None = number(None, minimum=1)
    clause = "which is one stage on all devices"

    def check(self, cluster: Cluster, batch: int, layers: int | None) -> Iterator[ConfigError]:
        """Check that the logical mesh covers the devices, too."""
        yield from super().check(cluster, batch, layers)
        yield from _check_mesh(cluster.gpus, {"data": self.data, "model": self.model})

    def on_fewer_devices(self, batch: int) -> Iterator[Planned]:
        """See `Parallel.on_fewer_devices`."""
        yield from super().on_fewer_devices(batch)
        if self.data is not None:
            yield from replace(self, data=None).on_fewer_devices(batch)


@dataclass(frozen=True, kw_only=True)
class Pipelined(Planned):
    """Settings of every method that puts layers into stages.

    Attributes:
        num_layers: number of automatic layers; None: at the model's marks, if it has any.
        schedule: the order of the stages' tasks.
    """

    num_layers: int | None = number(None, minimum=1)
    schedule: str = automatic_choice(DEFAULT_SCHEDULE, *training_schedules())


@dataclass(frozen=True, kw_only=True)
class StageSettings(Pipelined):
    """Settings of every method that takes a number of stages.

    Attributes:
        num_stages: None: searched for, or as many as layers and devices allow.
    """

    num_stages: int | None = automatic()

    def check(self, cluster: Cluster, batch: int, layers: int | None) -> Iterator[ConfigError]:
        """Check that every stage has a layer, and a device where the schedule needs one."""
        yield from super().check(cluster, batch, layers)
        gpus, stages = cluster.gpus, self.num_stages or 1
        most = self.num_layers or layers
        if most is not None and stages > most:
            asked = (
                f"parallel.num_layers={most}" if self.num_layers else f"the model's {most} layers"
            )
            yield ConfigError(
                f"parallel.num_stages={stages} is more than {asked}",
                "A stage is at least one layer: ask for fewer stages, or raise "
                f"{'parallel' if self.num_layers else 'model'}.num_layers.",
            )
        sharing = training_schedules(interleaves=True)
        if gpus is not None and stages > gpus and self.schedule not in sharing:
            yield ConfigError(
                f"parallel.num_stages={stages} is more than cluster.gpus={gpus}",
                "A stage needs a device of its own, except with parallel.schedule="
                f"{listed(sharing)}: ask for fewer stages or more devices.",
            )


@dataclass(frozen=True, kw_only=True)
class Auto(StageSettings):
    """The best plan that a search finds; `auto` and null are searched for.

    Attributes:
        try_: number of the best plans that are run for some steps to choose the fastest; None: as
            many as pay, for a long run.
        verify: "compile": the plan is compiled before it is taken, the compiler's memory counts in
            place of the predicted, and one that does not fit gives way to the next; None: it is
            taken by its predictions.
    """

    method: str = "auto"
    idles = True
    try_: int | None = automatic(minimum=0)
    verify: str | None = field(default=None, metadata={"choices": ("compile",)})
    schedule: str = automatic_choice("auto", *training_schedules())
    remat: str = automatic_choice("auto", *REMAT_NAMES, parse=parse_remat)

    def on_fewer_devices(self, batch: int) -> Iterator[Planned]:
        """See `Parallel.on_fewer_devices`."""
        kept = replace(self, cost="measured") if self.cost == "profile" else self
        yield kept
        if self.num_micro_batches is not None:
            yield replace(kept, num_micro_batches=None)


@dataclass(frozen=True, kw_only=True)
class Manual(StageSettings):
    """A pipeline of stages of about equal work.

    Attributes:
        stages_per_mesh: how many stages share a submesh; None: one, or at least two with a schedule
            that interleaves.
    """

    method: str = "manual"
    num_micro_batches: int = automatic(4)
    stages_per_mesh: int | None = number(None, minimum=1)


@dataclass(frozen=True, kw_only=True)
class ThreeD(Pipelined):
    """A pipeline of `pipeline` stages, each on `data` × `model` devices.

    Attributes:
        data: None: what the others leave of the devices.
        model: None: one, or what the others leave if both are given.
        pipeline: None: one, or what the others leave if `data` is given.
    """

    method: str = "three_d"
    num_micro_batches: int = automatic(4)
    data: int | None = number(None, minimum=1)
    model: int | None = number(2, minimum=1)
    pipeline: int | None = number(2, minimum=1)

    def check(self, cluster: Cluster, batch: int, layers: int | None) -> Iterator[ConfigError]:
        """Check that the logical mesh covers the devices, too."""
        yield from super().check(cluster, batch, layers)
        sizes = {"data": self.data, "model": self.model, "pipeline": self.pipeline}
        yield from _check_mesh(cluster.gpus, sizes)

    def on_fewer_devices(self, batch: int) -> Iterator[Planned]:
        """See `Parallel.on_fewer_devices`."""
        yield from super().on_fewer_devices(batch)
        if self.data is not None:
            yield from replace(self, data=None).on_fewer_devices(batch)


def _check_mesh(gpus: int | None, sizes: dict[str, int | None]) -> Iterator[ConfigError]:
    """Check that the axes of the logical mesh, by their names, cover the devices."""
    given = {name: size for name, size in sizes.items() if size}
    product = math.prod(given.values())
    if gpus and (gpus % product or (len(given) == len(sizes) and gpus != product)):
        yield ConfigError(
            f"{' × '.join(f'parallel.{name}={size}' for name, size in given.items())} does not fit "
            f"cluster.gpus={gpus}",
            "Make the product the number of devices, or leave one of them null.",
            [f"parallel.{name}" for name in sizes] + ["cluster.gpus"],
        )


def _multiples(batch: int, pieces: int) -> str:
    """Return the multiples of `pieces` next to `batch`, in words."""
    below = batch // pieces * pieces
    return f"{below} or {below + pieces}" if below else str(pieces)


METHODS: dict[str, type[Parallel]] = {
    kind.method: kind for kind in (Auto, Manual, Data, Served, Zero2, Zero3, Shard, ThreeD, Replay)
}
