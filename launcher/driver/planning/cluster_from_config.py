"""The shape of the cluster that a run plans for: this machine's, or the described one's."""

from __future__ import annotations

import logging
import os

from rich.console import Console

from launcher.base.log import held_back
from launcher.cluster.devices import DevicePool
from launcher.config.machines import Described
from launcher.config.parallel import Planned
from launcher.config.schema import Config
from launcher.driver.planning.check import measures_first
from launcher.hardware.cluster_shape import is_nominal
from launcher.hardware.gpu_memory import memory_share, usable_bytes
from launcher.plan import ClusterShape, local_shape
from launcher.plan.profile.calibration import calibrated, kept
from launcher.plan.profile.measure_first import measure_first
from launcher.report.console import Phase, status

_log = logging.getLogger(__name__)


def shape_of(config: Config, pool: DevicePool | None, console: Console | None) -> ClusterShape:
    """Return the shape to plan for: of the devices here, or of the described cluster.

    Devices that were calibrated have their measured rates, unless nominal ones are asked for.

    Args:
        config: the settings.
        pool: the devices here; None for a described cluster.
        console: where it is shown that devices are measured of which no calibration is kept; None:
            they are not measured.
    """
    if pool is None:
        assert isinstance(config.cluster, Described)
        return described_shape(config.cluster)
    nominal = pool_shape(pool)
    if isinstance(config.parallel, Planned) and config.parallel.cost == "model":
        return nominal
    if not measures_first(config) or kept(nominal, "measured again") is not None:
        return calibrated(nominal)
    if console is not None:
        with (
            held_back(),
            status(console, "measuring the devices, which are new here", Phase.MEASURING),
        ):
            return calibrated(nominal, measure_first(nominal))
    if not is_nominal(nominal):  # else there is a warning that says more
        _log.info(
            "predictions rest on nominal rates: the first training here, or python -m launcher "
            "task=calibrate, measures these devices"
        )
    return calibrated(nominal)


def pool_shape(pool: DevicePool) -> ClusterShape:
    """Return the shape of devices that are here, at nominal rates."""
    return local_shape(pool.num_devices, pool.hosts, pool.device_kind, memory_share(os.environ))


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
