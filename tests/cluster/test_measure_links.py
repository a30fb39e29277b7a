"""What `task=calibrate` measures of sums over several hosts."""

import pytest

from launcher.cluster.devices import emulated_pool
from launcher.cluster.measure_links import measure_links
from launcher.config.machines import Emulated


@pytest.mark.slow
def test_the_sums_are_those_of_this_machine() -> None:
    found = measure_links(emulated_pool(Emulated(gpus=4, hosts=2)))
    assert list(found) == ["4096", "16777216"]
    assert 1e-6 < found["4096"] < found["16777216"] < 30.0  # seconds
