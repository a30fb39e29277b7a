"""The shape of the cluster that a run plans for: this machine's, or the described one's."""

from __future__ import annotations

import os

from launcher.cluster.devices import DevicePool
from launcher.config.machines import Cluster, Described
from launcher.gpu_memory import memory_share, usable_bytes
from launcher.plan import ClusterShape, local_shape
from launcher.plan.profile.calibration import calibrated


def shape_of(cluster: Cluster, pool: DevicePool | None) -> ClusterShape:
    """Return the shape to plan for: of the devices here, or of the described cluster.

    Devices that were calibrated have their measured rates.

    Args:
        cluster: the settings.
        pool: the devices here; None for a described cluster.
    """
    if pool is not None:
        return calibrated(pool_shape(pool))
    assert isinstance(cluster, Described)
    return described_shape(cluster)


def pool_shape(pool: DevicePool) -> ClusterShape:
    """Return the shape of devices that are here, at nominal rates."""
    kind = "cpu" if pool.kind == "cpu" else pool.device_name
    return local_shape(pool.num_devices, pool.hosts, kind, memory_share(os.environ))


def described_shape(cluster: Described) -> ClusterShape:
    """Return the shape of `cluster.device` and `cluster.links`."""
    device, links = cluster.device, cluster.links
    assert cluster.gpus is not None  # as `config.checks` has seen to, here and below
    assert device.peak_tflops is not None
    assert device.memory_gib is not None
    assert device.memory_gb_per_second is not None
    assert links.intra_host_gb_per_second is not None
    peak = device.peak_tflops * 1e12
    single = (device.peak_tflops_fp32 or device.peak_tflops / 2) * 1e12
    return ClusterShape(
        name=cluster.title,
        hosts=cluster.hosts,
        devices_per_host=cluster.gpus // cluster.hosts,
        device_kind=str(device.name),
        peak_flops=peak,
        flops=device.sustained * peak,
        flops_fp32=device.sustained * single,
        memory_bandwidth=device.memory_gb_per_second * 1e9,
        memory_bytes=usable_bytes(device.memory_gib),
        intra_host=links.intra_host_gb_per_second * 1e9,
        inter_host=(links.inter_host_gb_per_second or links.intra_host_gb_per_second) * 1e9,
        latency=links.latency_us * 1e-6,
    )
