"""What the launcher takes from Ray beyond its public names: all of it in one module."""

import ast
import re
import sys
from pathlib import Path

import pytest

import launcher
from launcher.cluster.ray import ray_compat
from launcher.cluster.ray.ray_compat import connection_problem

PACKAGE = Path(launcher.__file__).parent
STAND_ALONE = {"head.py", "worker_actor.py"}  # they run before the package can be imported
PRIVATE = re.compile(
    r"\b_?ray\.(_|(nodes|cloudpickle|scripts)\b)|\"(RAY_(?!ADDRESS\b)|accelerator_type:)"
)


def test_what_is_private_or_undocumented_is_named_in_one_module():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names_it = isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom) or (
                isinstance(node, ast.Constant) and str(node.value).startswith("RAY_")
            )
            if names_it and PRIVATE.search(ast.unparse(node).replace("'", '"')):
                found.add(path.name)
    assert found - STAND_ALONE == {"ray_compat.py"}


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("", "it says nothing"),
        ("Traceback:\nConnectionError: no", "ConnectionError: no"),
        (
            "[2026-01-02 03:04:05,678 W 12 34] rpc_client.cc:12: no token\n"
            "[2026-01-02 03:04:05,679 I 12 34] rpc_client.cc:15: retrying\n"
            "ConnectionError: no",
            "no token",
        ),
    ],
)
def test_the_last_warning_of_ray_says_why_it_cannot_connect(output, problem):
    assert connection_problem(output) == problem


def test_a_ray_of_other_versions_is_said_in_one_line():
    import ray
    from ray._private.utils import check_version_info

    with pytest.raises(RuntimeError) as error:
        check_version_info({"ray_version": "1.2.3", "python_version": "3.8.1"}, "node 10.0.0.1")
    here = f"Ray {ray.__version__} on Python {'.'.join(map(str, sys.version_info[:3]))}"
    found = connection_problem(f"Traceback:\nRuntimeError: {error.value}")
    there = "it runs Ray 1.2.3 on Python 3.8.1"
    assert found == f"{there}, and this process {here}; use the same versions in both"


def test_living_nodes_come_with_most_gpus_first():
    gpus = {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}
    resources = {"b": {}, "a": {}, "dead": {"GPU": 8.0}, "c": gpus}
    found = [
        {"NodeID": n, "NodeManagerAddress": n, "Alive": n != "dead", "Resources": resources[n]}
        for n in resources
    ]
    nodes = ray_compat.nodes_of(found)
    told = [(node.node_id, node.gpus, node.gpu_names) for node in nodes]
    assert told == [("c", 2, ["H100"]), ("a", 0, []), ("b", 0, [])]


def test_settings_of_ray_all_have_its_prefix_but_for_the_known_one():
    settings = ray_compat.private_settings(Path("token"), nodes=False)
    others = {name for name in settings if not name.startswith(ray_compat.PREFIX)}
    assert others == {"DASHBOARD_METRIC_PORT"}
