"""Kinds of clusters, one class each: devices, shape, start of Ray, submission of jobs.

To add a kind, subclass `ClusterKind`, decorate it with `register`, and add `conf/cluster/NAME.yaml`
with `kind: NAME`. The settings that the kind takes are a dataclass of `config.cluster`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from launcher.cluster.devices import (
    EMULATED,
    STAND_INS,
    DevicePool,
    Gpus,
    count,
    emulated_pool,
    find_gpus,
    local_pool,
    node_gpus,
)
from launcher.cluster.slurm.allocation import find_allocation
from launcher.config.cluster import (
    CLUSTERS,
    Cluster,
    Described,
    Emulated,
    Hosts,
    Local,
    RayCluster,
    SlurmCluster,
)
from launcher.config.errors import ConfigError
from launcher.hardware import memory_share

if TYPE_CHECKING:
    from launcher.cluster.ray.session import RaySession, StartLimit
    from launcher.cluster.slurm.rendezvous import Rendezvous
    from launcher.hardware import ClusterShape, Datasheet

C = TypeVar("C", bound=Cluster)


class ClusterKind(Generic[C]):
    """One kind of cluster.

    Args:
        cluster: the settings.

    Attributes:
        name: the value of `cluster.kind` that selects it.
        settings: the dataclass of its settings.
        is_here: whether its devices are those of this machine, so that they can be measured.
        is_emulated: whether any number of runs may use its devices at once.
        batch: the path of the module of `submission`; "" starts runs here.
        starts_early: whether Ray may start before there is a plan.
    """

    name: ClassVar[str]
    settings: ClassVar[type[Cluster]] = Hosts
    is_here: ClassVar[bool] = False
    is_emulated: ClassVar[bool] = False
    batch: ClassVar[str] = ""
    starts_early: ClassVar[bool] = True

    def __init__(self, cluster: C) -> None:
        self.cluster = cluster

    def pool(self, *, planning: bool = False) -> DevicePool | None:
        """Return the devices of a run.

        Args:
            planning: whether the run is only checked or planned. Then no other machine is asked,
                and None is returned if the devices need not exist.

        Raises:
            ConfigError: the devices that the settings ask for do not exist.
            ClusterError: an existing Ray cannot be reached, or lacks the resources.
        """
        raise NotImplementedError

    def shape(self, pool: DevicePool | None) -> ClusterShape:
        """Return the shape to plan for, at nominal rates; `pool` is from the method `pool`."""
        assert pool is not None
        return pool_shape(pool)

    def start(
        self,
        pool: DevicePool,
        logs: Path | None,
        limit: StartLimit,
        rendezvous: Rendezvous | None = None,
    ) -> RaySession:
        """Start Ray for the hosts of `pool`, without waiting for workers: by default a private one.

        Args:
            pool: the devices.
            logs: the folder for the output of Ray and the workers; see `PrivateRay`.
            limit: how long each part of the start may take.
            rendezvous: the meeting point of a job's other tasks.

        Raises:
            ClusterError: Ray cannot be started or reached.
        """
        from launcher.cluster.ray.private_ray import PrivateRay

        return PrivateRay(pool, logs, rendezvous, limit)

    def submission(self) -> Any:
        """Return the module that submits runs as jobs; None starts them here.

        It has `submit(config, stop)` and `submit_sweep(points, stop)`, which return exit codes, and
        `check_jobs(configs)`, which raises ConfigError for runs that it cannot submit together.
        """
        return import_module(self.batch) if self.batch else None

    def unchecked(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Yield the parts of the cluster that `task=check` cannot check in `environ`."""
        yield from ()

    def ignored(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Yield a line for each variable of `environ` that a default takes no account of."""
        if "RAY_ADDRESS" in environ and self.name != "ray":
            yield "RAY_ADDRESS has no effect: a run starts a Ray of its own; cluster=ray uses one"
        for name in (DevicePool.count_flag, "JAX_NUM_CPU_DEVICES"):
            is_set = name in environ or name in environ.get("XLA_FLAGS", "")
            if is_set and getattr(self.cluster, "gpus", None) is None:
                yield f"{name} has no effect: cluster.gpus is the number of devices"
        platforms = environ.get("JAX_PLATFORMS", "")
        if set(platforms.split(",")) - {"", "cpu", "cuda", "gpu"}:
            yield f"JAX_PLATFORMS={platforms} has no effect: devices are CUDA's GPUs, or the CPU's"


KINDS: dict[str, type[ClusterKind[Any]]] = {}
K = TypeVar("K", bound=type[ClusterKind[Any]])


def register(kind: K) -> K:
    """Make a kind available as `cluster.kind=<name>`; a class decorator."""
    KINDS[kind.name] = kind
    CLUSTERS.setdefault(kind.name, kind.settings)
    return kind


def kind_of(cluster: Cluster) -> ClusterKind[Any]:
    """Return the kind of a cluster, with its settings."""
    return KINDS[cluster.kind](cluster)


def find_devices(cluster: Cluster) -> DevicePool:
    """Return the devices of a cluster without asking another machine.

    Raises:
        ConfigError: the devices that the settings ask for do not exist.
    """
    kind = kind_of(cluster)
    pool = kind.pool(planning=True) or kind.pool()
    assert pool is not None
    return pool


def pool_shape(pool: DevicePool) -> ClusterShape:
    """Return the shape of existing devices, at nominal rates.

    What a GPU says of its compute capability counts before its datasheet.
    """
    from launcher.hardware import local_shape  # `task=check` needs none

    shape = local_shape(pool.num_devices, pool.hosts, pool.device_kind, memory_share(os.environ))
    return replace(shape, compute_capability=pool.compute_capability or shape.compute_capability)


@register
class LocalKind(ClusterKind[Local]):
    """This machine's GPUs, or emulated CPU devices if it has none."""

    name, settings, is_here = "local", Local, True

    def pool(self, *, planning: bool = False) -> DevicePool:
        """See `local_pool`."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return local_pool(self.cluster, find_gpus(os.environ), visible)


@register
class EmulatedKind(ClusterKind[Emulated]):
    """Emulated CPU devices of this machine."""

    name, settings, is_here, is_emulated = "emulated", Emulated, True, True

    def pool(self, *, planning: bool = False) -> DevicePool:
        """See `emulated_pool`."""
        return emulated_pool(self.cluster)


@register
class SlurmKind(ClusterKind[SlurmCluster]):
    """The nodes of a Slurm job."""

    name, settings, batch = "slurm", SlurmCluster, "launcher.submit.job"

    def pool(self, *, planning: bool = False) -> DevicePool:
        """Return the devices of the job's nodes, the same number on each.

        Outside of a job, the model of the GPUs is unknown.

        Raises:
            ConfigError: this node of the job has fewer GPUs than the settings ask for.
        """
        cluster = self.cluster
        if cluster.slurm.emulated:
            return emulated_pool(cluster)
        assert cluster.gpus is not None
        per_host, name, gpus = cluster.gpus // cluster.hosts, "", Gpus()
        if find_allocation(os.environ) is not None:
            gpus = find_gpus(os.environ)
            name = ", ".join(dict.fromkeys(node_gpus(gpus, per_host)))
        note = f"{count(cluster.gpus, 'GPU')} on {count(cluster.hosts, 'Slurm node')}"
        return DevicePool(
            kind="gpu",
            hosts=cluster.hosts,
            devices_per_host=per_host,
            device_name=name or "GPU",
            note=f"{note}: {name}" if name else note,
            compute_capability=gpus.least_capability(per_host),
        )

    def unchecked(self, environ: Mapping[str, str]) -> Iterator[str]:
        """See `ClusterKind.unchecked`."""
        if find_allocation(environ) is None:
            yield "the resources of Slurm"


@register
class ExistingRayKind(ClusterKind[RayCluster]):
    """The nodes of an existing Ray cluster."""

    name, settings, starts_early = "ray", RayCluster, False

    def pool(self, *, planning: bool = False) -> DevicePool:
        """Return the devices of the Ray's nodes; when planning, assume that they equal those here.

        Raises:
            ClusterError: the Ray cannot be reached, or lacks the resources.
        """
        if not planning:
            return self._nodes_pool()
        cluster, gpus = self.cluster, find_gpus(os.environ)
        per_host = (cluster.gpus or 0) // cluster.hosts or len(gpus.usable) or STAND_INS
        name = ", ".join(dict.fromkeys(gpus.usable)) or EMULATED
        return DevicePool(
            kind="gpu" if gpus.usable else "cpu",
            hosts=cluster.hosts,
            devices_per_host=per_host,
            device_name=name,
            note="cluster=ray is not asked for its devices: assumed to equal those here, "
            f"{per_host * cluster.hosts} times {name}",
            compute_capability=gpus.least_capability(per_host),
        )

    def _nodes_pool(self) -> DevicePool:
        from launcher.cluster.ray import existing_ray
        from launcher.cluster.ray.session import StartLimit

        cluster = self.cluster
        nodes = existing_ray.find_nodes(cluster.address, StartLimit(cluster.start_timeout))
        devices = None if cluster.gpus is None else cluster.gpus // cluster.hosts
        request = existing_ray.ResourceRequest(cluster.num_cpus, cluster.resources)
        pool, _ = existing_ray.feasible_pool(nodes, cluster.hosts, devices, request)
        spread = f", {pool.hosts} workers" if pool.hosts > 1 else ""
        found = f"{pool.num_devices} times {pool.device_name}{spread}"
        return replace(pool, note=f"on the Ray at {cluster.address}: {found}")

    def start(
        self,
        pool: DevicePool,
        logs: Path | None,
        limit: StartLimit,
        rendezvous: Rendezvous | None = None,
    ) -> RaySession:
        """Connect to the Ray; see `ExistingRay`."""
        from launcher.cluster.ray import existing_ray

        cluster = self.cluster
        request = existing_ray.ResourceRequest(cluster.num_cpus, cluster.resources)
        asked = cluster.address, pool.hosts, pool.devices_per_host
        return existing_ray.ExistingRay(*asked, limit, request, logs and logs.absolute())

    def unchecked(self, environ: Mapping[str, str]) -> Iterator[str]:
        """See `ClusterKind.unchecked`."""
        yield "the Ray at cluster.address and its devices"


@register
class DescribedKind(ClusterKind[Described]):
    """Machines that only the settings describe, to plan for."""

    name, settings = "described", Described

    def pool(self, *, planning: bool = False) -> None:
        """Return None when planning.

        Raises:
            ConfigError: the run needs devices.
        """
        if not planning:
            raise ConfigError(
                f"cluster={self.cluster.title} describes machines to plan for; they are not here",
                "Use task=plan, or train with cluster=local or cluster=emulated.",
            )

    def shape(self, pool: DevicePool | None = None) -> ClusterShape:
        """Return the shape of `cluster.device` and `cluster.links`."""
        from launcher.hardware import NETWORK_SHARE, ClusterShape, sheet_rates

        cluster, links = self.cluster, self.cluster.links
        assert cluster.gpus is not None  # as the settings' check ensures
        sheet, network = self.sheet(), links.inter_host_gb_per_second
        rates = sheet_rates(sheet)
        return ClusterShape(
            name=cluster.title,
            hosts=cluster.hosts,
            devices_per_host=cluster.gpus // cluster.hosts,
            device_kind=sheet.name,
            inter_host=NETWORK_SHARE * network * 1e9 if network else rates["intra_host"],
            latency=links.latency_us * 1e-6,
            **rates,
        )

    def sheet(self) -> Datasheet:
        """Return the datasheet of its devices."""
        from launcher.hardware import described_sheet

        cluster = self.cluster
        source = f"cluster={cluster.title}"
        return described_sheet(vars(cluster.device), vars(cluster.links), source)

    def unchecked(self, environ: Mapping[str, str]) -> Iterator[str]:
        """See `ClusterKind.unchecked`."""
        yield f"the devices, as cluster={self.cluster.title} is not here"
