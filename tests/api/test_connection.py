"""How a session's workers are connected: by the first use, and never in two ways."""

from types import SimpleNamespace

import pytest

from launcher.api.messages import Connection
from launcher.partition.assignment import Reduction
from launcher.plan import PlanError


class Group:
    """Two workers that only note how they are connected."""

    handles = (1, 2)

    def __init__(self):
        self.calls = []

    def check_open(self):
        pass

    def join(self):
        self.calls.append("join")

    def use_servers(self, servers):
        self.calls.append(servers)


def plan(servers):
    return SimpleNamespace(reduction=Reduction(workers=2 if servers else 1, servers=servers))


@pytest.fixture
def group():
    return Group()


@pytest.fixture
def connection(group):
    return Connection(group, lambda count, workers: f"{count} servers for {workers} workers")


def test_a_first_plan_with_servers_needs_no_group(group, connection):
    for _ in range(2):
        connection.open_for(plan(3))
        connection.open()
    assert group.calls == ["3 servers for 2 workers"]
    with pytest.raises(PlanError, match="through parameter servers alone"):
        connection.open_for(plan(0))
    with pytest.raises(PlanError, match="the plan has 2 parameter servers, and the first one of"):
        connection.open_for(plan(2))


def test_any_other_first_use_makes_a_group(group, connection):
    connection.open()
    connection.open_for(plan(0))
    assert group.calls == ["join"]
    with pytest.raises(PlanError, match="are connected for collectives, since they were used"):
        connection.open_for(plan(2))
