"""The settings of the section `cluster`: which machines, and what a batch job asks of Slurm.

A part of `schema`, whose rules hold here as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from launcher.config.fields import choice, number


@dataclass(frozen=True)
class Device:
    """One device of a described cluster. FLOP rates are dense; `sustained` is the share of the peak
    that large matrix products reach inside a training step."""

    name: str | None = None
    peak_tflops: float | None = number(None, minimum=0.0)  # 16 bit
    peak_tflops_fp32: float | None = number(None, minimum=0.0)  # 32 bit, as JAX computes it
    sustained: float = number(0.5, minimum=0.01, maximum=1.0)
    memory_gib: float | None = number(None, minimum=0.0)
    memory_gb_per_second: float | None = number(None, minimum=0.0)


@dataclass(frozen=True)
class Links:
    """How the devices of a described cluster reach one another, one way."""

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
    """What a job asks of Slurm; null leaves the choice to the site. `conf/cluster/slurm.yaml`
    says in comments what each setting means."""

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
    """`Slurm.time`, such as 2d12h or 90m, in minutes."""
    parts = {unit: int(number) for number, unit in re.findall(r"(\d+)([dhm])", time)}
    return (parts.get("d", 0) * 24 + parts.get("h", 0)) * 60 + parts.get("m", 0)


@dataclass(frozen=True)
class Cluster:
    """The machines: `gpus` is the total number of devices, `hosts` the number of hosts.

    `kind: described` is machines that are not here: `name`, `device` and `links` say what they
    are, and plans can be made for them.
    """

    kind: str = choice("local", "local", "emulated", "slurm", "described")
    gpus: int | None = number(None, minimum=1)  # null: all of this machine's
    hosts: int = number(1, minimum=1)
    start_timeout: float = number(180.0, minimum=1.0)  # seconds until all processes are up
    step_timeout: float = number(600.0, minimum=1.0)  # seconds without an answer: workers hang
    max_restarts: int = number(3, minimum=0)  # of the workers, when they die, hang or lose Ray
    transport: str = choice("auto", "auto", "pull", "collective")  # between worker processes
    name: str | None = None
    device: Device = field(default_factory=Device)
    links: Links = field(default_factory=Links)
    slurm: Slurm = field(default_factory=Slurm)
