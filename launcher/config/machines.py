"""The settings of the section `cluster`: a class a kind, with the fields that the kind obeys.

A part of `schema`, whose rules hold here as well. `launcher.cluster.kinds` has the behaviour of
each kind, and says how to add one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from launcher.config.fields import choice, number


@dataclass(frozen=True)
class Device:
    """One device of a described cluster.

    FLOP rates are dense; `sustained` is the share of the peak that large matrix products reach
    inside a training step.
    """

    name: str | None = None
    peak_tflops: float | None = number(None, minimum=0.0)  # 16 bit
    peak_tflops_fp32: float | None = number(None, minimum=0.0)  # 32 bit, as JAX computes it
    sustained: float = number(0.5, minimum=0.01, maximum=1.0)
    memory_gib: float | None = number(None, minimum=0.0)
    memory_gb_per_second: float | None = number(None, minimum=0.0)


@dataclass(frozen=True)
class LinkSpeeds:
    """How fast the devices of a described cluster reach one another, one way."""

    intra_host_gb_per_second: float | None = number(None, minimum=0.0)  # device to device
    inter_host_gb_per_second: float | None = number(None, minimum=0.0)  # host to host
    latency_us: float = number(10.0, minimum=0.0)


@dataclass(frozen=True)
class Container:
    """What srun's container plugin (pyxis) is told; null leaves each out."""

    image: str | None = None
    mounts: list[str] = field(default_factory=list)
    workdir: str | None = None


@dataclass(frozen=True)
class Slurm:
    """What a job asks of Slurm; null leaves the choice to the site.

    `conf/cluster/slurm.yaml` says in comments what each setting means.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus: int | None = number(None, minimum=1)
    mem: str | None = None
    gpu_type: str | None = None
    gres: str | None = None
    exclusive: bool = True
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    dependency: str | None = None
    job_name: str | None = None
    signal: str = "USR2@120"
    max_requeues: int = number(10, minimum=0)
    array: int | None = number(None, minimum=1)
    setup: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    python: str | None = None
    container: Container = field(default_factory=Container)
    srun_args: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    emulated: bool = False
    network_interface: str | None = None
    start_timeout: int = number(300, minimum=1)
    dry_run: bool = False
    wait: bool = False


def minutes(time: str) -> int:
    """Return a `Slurm.time`, such as 2d12h or 90m, in minutes."""
    parts = {unit: int(number) for number, unit in re.findall(r"(\d+)([dhm])", time)}
    return (parts.get("d", 0) * 24 + parts.get("h", 0)) * 60 + parts.get("m", 0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What every kind of cluster obeys.

    Attributes:
        kind: which kind it is.
        gpus: the number of devices in total.
        hosts: the number of hosts.
        price_per_device_hour: what a device costs an hour, in any currency; None: not known.
        clause: what the kind has no other settings for, for messages.
    """

    kind: str
    gpus: int | None = number(None, minimum=1)
    hosts: int = number(1, minimum=1)
    price_per_device_hour: float | None = number(None, minimum=0.0)
    clause: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """The option that chooses it."""
        return self.kind

    @property
    def holds_secrets(self) -> bool:
        """Whether a setting may be a secret."""
        return False


@dataclass(frozen=True, kw_only=True)
class Machines(Cluster):
    """What every cluster obeys that can be trained on.

    Attributes:
        start_timeout: seconds until Ray is up, and then until one more process is up.
        step_timeout: seconds without an answer after which workers are taken to hang.
        max_restarts: how often the workers are started again when they die, hang or lose Ray.
    """

    start_timeout: float = number(120.0, minimum=1.0)
    step_timeout: float = number(600.0, minimum=1.0)
    max_restarts: int = number(3, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Local(Machines):
    """This machine: its GPUs, all if `gpus` is None, or CPU devices where it has none."""

    kind: str = "local"
    clause: ClassVar[str] = "which is this one machine"


@dataclass(frozen=True, kw_only=True)
class Hosts(Machines):
    """What every cluster obeys that may have several hosts.

    Attributes:
        transport: the way of arrays between worker processes.
    """

    transport: str = choice("auto", "auto", "pull", "collective")


@dataclass(frozen=True, kw_only=True)
class Emulated(Hosts):
    """CPU devices of this machine that stand in, and several processes for several hosts."""

    kind: str = "emulated"
    gpus: int | None = number(4, minimum=1)
    clause: ClassVar[str] = "which is this one machine"


@dataclass(frozen=True, kw_only=True)
class SlurmCluster(Hosts):
    """Nodes that Slurm lends."""

    kind: str = "slurm"
    gpus: int | None = number(8, minimum=1)
    slurm: Slurm = field(default_factory=Slurm)

    @property
    def holds_secrets(self) -> bool:
        """See `Cluster.holds_secrets`."""
        return bool(self.slurm.env)


@dataclass(frozen=True, kw_only=True)
class RayCluster(Hosts):
    """Nodes of a Ray that is already running, with the devices that they have.

    Attributes:
        address: where that Ray is: "auto", or host:port.
        gpus: the number of devices in total; None takes all GPUs of the nodes, or four emulated CPU
            devices a worker where no node has a GPU.
        num_cpus: the CPUs that each worker demands of Ray.
        resources: the amount of each custom resource that each worker demands of Ray, by name.
    """

    kind: str = "ray"
    address: str = "auto"
    num_cpus: float = number(0.0, minimum=0.0)
    resources: dict[str, float] = field(default_factory=dict)


def ray_address_problem(address: str) -> str:
    """Return what is wrong with the address of a Ray, and what to do; "" if nothing is."""
    if address.startswith("ray://"):
        return (
            "That is a Ray Client, which runs this program's calls in another process: run the "
            'launcher on a node of that Ray and give "auto", or the host:port that `ray start` '
            "told."
        )
    host, _, port = address.rpartition(":")
    if address == "auto" or (host and port.isdigit() and 0 < int(port) < 2**16):
        return ""
    return 'Give "auto" for the Ray of this machine, or host:port as `ray start` told it.'


@dataclass(frozen=True, kw_only=True)
class Described(Cluster):
    """Machines that are not here: `name`, `device` and `links` say what they are."""

    kind: str = "described"
    name: str | None = None
    device: Device = field(default_factory=Device)
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    clause: ClassVar[str] = "which is only planned for"

    @property
    def title(self) -> str:
        """The option that chooses it, as its file is to be called."""
        return self.name or self.kind


CLUSTERS: dict[str, type[Cluster]] = {
    "local": Local,
    "emulated": Emulated,
    "slurm": SlurmCluster,
    "ray": RayCluster,
    "described": Described,
}


def machines_of(cluster: Cluster) -> Machines:
    """Return a cluster that is known to be one to train on."""
    assert isinstance(cluster, Machines)
    return cluster


def slurm_cluster(cluster: Cluster) -> SlurmCluster:
    """Return a cluster that is known to be Slurm's."""
    assert isinstance(cluster, SlurmCluster)
    return cluster


def slurm_of(cluster: Cluster) -> Slurm:
    """Return what a job asks of Slurm, of a cluster that is known to be Slurm's."""
    return slurm_cluster(cluster).slurm
