"""Rates that `task=calibrate` measures with several workers."""

import pytest

from launcher.cluster.devices import emulated_pool
from launcher.cluster.measure import measure_links, measure_servers
from launcher.config.cluster import Emulated


@pytest.mark.slow
def test_collectives_between_hosts_are_timed() -> None:
    found = measure_links(emulated_pool(Emulated(gpus=4, hosts=2)))
    kinds, sizes = ("all-reduce", "all-gather", "reduce-scatter"), (1 << 12, 1 << 24)
    ways = [(kind, 4 // n, n, size) for kind in kinds for n in (1, 2) for size in sizes]
    assert [one[:4] for one in found] == ways
    assert all(1e-6 < seconds < 30.0 for *_, seconds in found)


@pytest.mark.slow
def test_exchanges_are_timed() -> None:
    latency, *rates = measure_servers(emulated_pool(Emulated(gpus=2, hosts=2)))
    assert 1e-5 < latency < 10.0  # seconds
    assert len(rates) == 3
    assert all(1e6 < rate < 1e13 for rate in rates)  # bytes/s
