"""What `task=calibrate` measures of parameter servers."""

import pytest

from launcher.cluster.devices import emulated_pool
from launcher.cluster.measure_servers import measure_servers
from launcher.config.machines import Emulated


@pytest.mark.slow
def test_the_rates_are_those_of_this_machine() -> None:
    found = measure_servers(emulated_pool(Emulated(gpus=2, hosts=2)))
    assert 1e-5 < found.latency < 10.0  # seconds
    assert all(1e6 < rate < 1e13 for rate in (found.put, found.add, found.get))  # bytes/s
