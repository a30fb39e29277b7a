"""Measures what sums through a parameter server cost here, with workers of a real Ray."""

from __future__ import annotations

import statistics

from launcher.cluster.devices import DevicePool
from launcher.cluster.ray.measured_exchanges import ExchangeMeter, ExchangeRates
from launcher.cluster.ray.private_ray import start
from launcher.cluster.worker_group import WorkerGroup

_SECONDS = 60.0  # for all rounds


def measure_servers(pool: DevicePool) -> ExchangeRates:
    """Return the rates that the workers of a pool find, in the median.

    Raises:
        ClusterError: Ray or a process did not come up, or does not answer.
        WorkerError: a process died.
    """
    with start(pool, None) as session:
        workers, servers = session.spawn(ExchangeMeter), session.serve(1, pool.hosts)
        group = WorkerGroup(workers, session.check, _SECONDS, "task=calibrate")
        group.use_servers(servers)
        found: list[ExchangeRates] = group.gather(group.submit("measure"), starting=True)
    return ExchangeRates(*map(statistics.median, zip(*found, strict=True)))
