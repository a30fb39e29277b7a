"""The state in the hosts' memory: whose folders are whose, on machines and emulated."""

import pytest

from launcher.checkpoint import HostPlace
from launcher.driver.in_memory import host_places


@pytest.mark.parametrize(
    ("nodes", "places"),
    [
        (list("a"), [HostPlace(0)]),
        (list("aa"), [HostPlace(0, 0, 2), HostPlace(1, 1, 2)]),
        (list("ab"), [HostPlace(0), HostPlace(1)]),
        (list("aba"), [HostPlace(0, 0, 2), HostPlace(1), HostPlace(2, 1, 2)]),
    ],
)
def test_a_host_alone_on_its_node_has_all_folders_there(nodes, places):
    assert host_places(nodes) == places


def test_each_folder_is_in_the_charge_of_one_host_also_where_there_are_fewer(tmp_path):
    for rank in range(3):
        HostPlace(rank).own(tmp_path).mkdir()
    (tmp_path / "host_of_another").mkdir()

    def charges(*places):
        return [sorted(path.name for path in place.all(tmp_path)) for place in places]

    assert charges(HostPlace(1)) == [["host_0", "host_1", "host_2"]]
    assert charges(HostPlace(0, 0, 2), HostPlace(1, 1, 2)) == [["host_0", "host_2"], ["host_1"]]
