"""What the tests of the Python front share; they find the steps of `tests/runtime` by their names.

Workers do, too.
"""

import sys
from pathlib import Path

import pytest

import launcher

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def session(request):
    nodes = {"num_nodes": 2, "num_devices_per_node": 2}
    launcher.init(request.param, **nodes if request.param == "ray" else {"num_devices_per_node": 4})
    yield request.param
    launcher.shutdown()
