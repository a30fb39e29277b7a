"""Rates that `task=calibrate` measures with several workers."""

import pytest

from launcher.cluster.devices import emulated_pool
from launcher.cluster.measure import measure_links, measure_servers
from launcher.config.cluster import Emulated


@pytest.mark.slow
def test_all_reduces_are_timed() -> None:
    found = measure_links(emulated_pool(Emulated(gpus=4, hosts=2)))
    assert list(found) == ["4096", "16777216"]
    assert 1e-6 < found["4096"] < found["16777216"] < 30.0  # seconds


@pytest.mark.slow
def test_exchanges_are_timed() -> None:
    latency, *rates = measure_servers(emulated_pool(Emulated(gpus=2, hosts=2)))
    assert 1e-5 < latency < 10.0  # seconds
    assert len(rates) == 3
    assert all(1e6 < rate < 1e13 for rate in rates)  # bytes/s
