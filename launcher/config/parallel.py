"""The settings of the section `parallel`: a class a method, with the fields that the method obeys.

A part of `schema`, whose rules hold here as well. To add a method, write its class here, list it in
`METHODS`, give it a file in `conf/parallel/`, and say in `driver.planning.plan_from_config` which
plan it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from launcher.base.remat_name import WORDS, parse_remat
from launcher.config.fields import automatic, automatic_choice, choice, number
from launcher.schedule import DEFAULT_SCHEDULE, training_schedules


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """What every method obeys.

    Attributes:
        method: its name.
        allow_over_memory: whether to train by a plan that needs more memory than the devices have.
        clause: why the method has no other settings, for messages; "" where there is no one reason.
    """

    method: str
    allow_over_memory: bool = False
    clause: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Replay(Parallel):
    """A plan that was made before, from the file `plan`."""

    method: str = "replay"
    plan: str
    clause: ClassVar[str] = "which takes it from the plan"


@dataclass(frozen=True, kw_only=True)
class Planned(Parallel):
    """What every method obeys that makes a plan.

    Attributes:
        num_micro_batches: how many parts the global batch is cut into.
        remat: which activations are computed again for the backward pass.
        cost: what predictions rest on: rates measured on the devices that are here, nominal rates,
            or layers timed on these devices.
        bucket_bytes: the most bytes of gradients that one collective sums over the replicas.
        reduce_dtype: the type in which gradients cross.
    """

    num_micro_batches: int | None = automatic()
    remat: str = automatic_choice("none", *WORDS, parse=parse_remat)
    cost: str = choice("measured", "measured", "model", "profile")
    bucket_bytes: int = number(25 << 20, minimum=0)
    reduce_dtype: str = choice("fp32", "fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Data(Planned):
    """Data parallelism: one stage on all devices, each with a share of every microbatch."""

    method: str = "data"
    num_micro_batches: int = automatic(1)
    clause: ClassVar[str] = "which is one stage on all devices"


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
    clause: ClassVar[str] = "which is one stage on all devices"


@dataclass(frozen=True, kw_only=True)
class Pipelined(Planned):
    """What every method obeys that puts layers into stages.

    Attributes:
        num_layers: number of automatic layers; None: at the model's marks, if it has any.
        schedule: the order of the stages' tasks.
    """

    num_layers: int | None = number(None, minimum=1)
    schedule: str = automatic_choice(DEFAULT_SCHEDULE, *training_schedules())


@dataclass(frozen=True, kw_only=True)
class Auto(Pipelined):
    """The best plan that a search finds; `auto` and null are searched for.

    Attributes:
        try_: how many of the best plans are run for some steps, to go on with the fastest; None: as
            many as pay, for a long run.
    """

    method: str = "auto"
    try_: int | None = automatic(minimum=0)
    num_stages: int | None = automatic()
    schedule: str = automatic_choice("auto", *training_schedules())
    remat: str = automatic_choice("auto", *WORDS, parse=parse_remat)


@dataclass(frozen=True, kw_only=True)
class Manual(Pipelined):
    """A pipeline of stages of about equal work.

    Attributes:
        num_stages: None: as many as layers and devices allow.
        stages_per_mesh: how many stages share a submesh; None: one, or at least two with a schedule
            that interleaves.
    """

    method: str = "manual"
    num_micro_batches: int = automatic(4)
    num_stages: int | None = automatic()
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


METHODS: dict[str, type[Parallel]] = {
    "auto": Auto,
    "manual": Manual,
    "data": Data,
    "parameter_server": Served,
    "zero2": Zero2,
    "zero3": Zero3,
    "shard": Shard,
    "three_d": ThreeD,
    "replay": Replay,
}
