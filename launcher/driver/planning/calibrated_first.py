"""Decide whether a training measures its devices before it plans.

It imports no JAX, as it decides when Ray is started.
"""

from __future__ import annotations

from launcher.base.measurements import cache_file, read_cached
from launcher.cluster.devices import DevicePool
from launcher.config.machines import Described, RayCluster, SlurmCluster
from launcher.config.parallel import Planned
from launcher.config.schema import Config


def measures_first(config: Config) -> bool:
    """Return whether a training by these settings measures devices that no calibration is kept of.

    The devices are this machine's, and the plan rests on what they can do.
    """
    is_here = not isinstance(config.cluster, Described | RayCluster | SlurmCluster)
    parallel = config.parallel
    return is_here and isinstance(parallel, Planned) and parallel.cost != "model"


def is_kept(pool: DevicePool) -> bool:
    """Return whether a calibration of these devices is kept, by these versions, if it is intact."""
    path = cache_file("calibration", pool.device_kind, pool.num_devices)
    return read_cached(path, lambda tree: tree) is not None
