"""What workers demand of a Ray is refused, by name, where its nodes can never give it."""

import pytest

from launcher.cluster.devices import DevicePool
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.demand import Demand, check_demand
from launcher.cluster.ray.ray_compat import Node

TWO = (
    Node("a", "10.0.0.1", {"CPU": 4.0, "my_node": 1.0, "node:10.0.0.1": 1.0, "memory": 9e9}),
    Node("b", "10.0.0.2", {"CPU": 4.0, "node:10.0.0.2": 1.0}),
)
GPUS = tuple(Node(n, f"10.0.0.{i}", {"CPU": 8.0, "GPU": 8.0}) for i, n in enumerate("cd", 3))


def check(demand, hosts, nodes=TWO, kind="cpu", each=2):
    bundle = demand.bundle(each if kind == "gpu" else 0)
    check_demand(bundle, DevicePool(kind, hosts, each, "", ""), nodes)


@pytest.mark.parametrize(
    ("demand", "hosts", "nodes", "kind"),
    [
        (Demand(), 100, TWO, "cpu"),
        (Demand(4, {}), 2, TWO, "cpu"),
        (Demand(1, {"my_node": 0.1}), 4, TWO, "cpu"),
        (Demand(0, {"my_node": 0.1}), 10, TWO, "cpu"),  # 0.1 ten times is 1, also in binary
        (Demand(8, {}), 2, GPUS, "gpu"),
    ],
)
def test_what_the_nodes_can_give_is_accepted(demand, hosts, nodes, kind):
    check(demand, hosts, nodes, kind)


@pytest.mark.parametrize(
    ("demand", "hosts", "nodes", "kind", "told"),
    [
        (
            Demand(0, {"no_such": 1}),
            *(1, TWO, "cpu"),
            "1 worker demands no_such: 1, which this Ray can never give: 10.0.0.1 has no_such: 0 "
            "(and my_node); 10.0.0.2 has no_such: 0",
        ),
        (
            Demand(3, {"my_node": 1}),
            *(2, TWO, "cpu"),
            "each of 2 workers demands my_node: 1, which this Ray can never give: 10.0.0.1 has "
            "my_node: 1; 10.0.0.2 has my_node: 0",
        ),
        (
            Demand(9, {}),
            *(2, GPUS, "gpu"),
            "each of 2 workers demands CPU: 9 on a node of its own, which this Ray can never give: "
            "10.0.0.3 has CPU: 8; 10.0.0.4 has CPU: 8",
        ),
        # Each is there, but not on one node.
        (
            Demand(5, {"a": 1}),
            *(1, (Node("x", "x", {"CPU": 9.0}), Node("y", "y", {"a": 1.0})), "cpu"),
            "1 worker demands CPU: 5, a: 1, which this Ray can never give: x has CPU: 9, a: 0; y "
            "has CPU: 0, a: 1",
        ),
    ],
)
def test_what_they_can_never_give_is_named(demand, hosts, nodes, kind, told):
    with pytest.raises(ClusterError) as error:
        check(demand, hosts, nodes, kind)
    assert str(error.value) == told
