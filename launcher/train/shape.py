"""The shape of the cluster that a run plans for: this machine's, or the described one's.

Used by `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.cluster.devices import DevicePool, find_devices
from launcher.config.errors import ConfigError
from launcher.config.machines import Cluster
from launcher.plan import ClusterShape, local_shape
from launcher.plan.calibration import calibrated


def find_cluster(
    cluster: Cluster, plan_only: bool, say: Callable[[str], None]
) -> tuple[DevicePool | None, ClusterShape]:
    """The devices that there are, and the shape to plan for, as it was calibrated if it was. No
    devices are needed, and None are returned, where a described cluster is only planned for.

    Args:
        say: told in a line where a calibration is ignored.

    Raises:
        ConfigError: the devices asked for are not here, or the description is not complete.
    """
    if plan_only and cluster.kind == "described":
        return None, described_shape(cluster)
    pool = find_devices(cluster)
    return pool, calibrated(pool_shape(pool), say)


def pool_shape(pool: DevicePool) -> ClusterShape:
    """The shape of devices that are here, at nominal rates."""
    kind = "cpu" if pool.kind == "cpu" else pool.device_name
    return local_shape(pool.num_devices, pool.hosts, kind)


def described_shape(cluster: Cluster) -> ClusterShape:
    """The shape of `cluster.device` and `cluster.links`.

    Raises:
        ConfigError: a figure is missing.
    """
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
            raise ConfigError(
                f"{key} is not set, and a described cluster needs it",
                "Fill it in from the datasheet; conf/cluster/h100_8.yaml is an example.",
                (key,),
            )
    assert cluster.gpus is not None  # as was just checked, here and below
    assert device.peak_tflops is not None
    assert device.memory_gib is not None
    assert device.memory_gb_per_second is not None
    assert links.intra_host_gb_per_second is not None
    peak = device.peak_tflops * 1e12
    single = (device.peak_tflops_fp32 or device.peak_tflops / 2) * 1e12
    return ClusterShape(
        name=cluster.name or "described",
        hosts=cluster.hosts,
        devices_per_host=cluster.gpus // cluster.hosts,
        device_kind=str(device.name),
        peak_flops=peak,
        flops=device.sustained * peak,
        flops_fp32=device.sustained * single,
        memory_bandwidth=device.memory_gb_per_second * 1e9,
        memory_bytes=int(device.memory_gib * 2**30),
        intra_host=links.intra_host_gb_per_second * 1e9,
        inter_host=(links.inter_host_gb_per_second or links.intra_host_gb_per_second) * 1e9,
        latency=links.latency_us * 1e-6,
    )
