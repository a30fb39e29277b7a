"""Hosts beside one another at the start of a run: made-up ones, and this machine."""

import dataclasses
import os
import re

import pytest

from launcher.cluster.process_group import Peer
from launcher.hardware import HostReport, differing_versions, shortages

GIB = 2**30
ALIKE = HostReport(
    machine="0",
    versions={"jax": "0.12.0", "GPU driver": "550.54"},
    free={"/runs/a": 90 * GIB, "/tmp": 9 * GIB},
    amounts={"free memory": (64.0 * GIB,), "rate of matrix products": (1e14, 1e14)},
)


def hosts(count: int = 4, **of_the_second: object) -> list[HostReport]:
    every = [dataclasses.replace(ALIKE, name=f"n{k}", machine=str(k)) for k in range(count)]
    every[1] = dataclasses.replace(every[1], **of_the_second)  # type: ignore[arg-type]
    return every


# For each member of a report: what one host differs in, and what is said of it. A version is
# refused, the rest is warned of; what identifies a host is no difference.
SAID = {
    "versions": (
        {"versions": {"jax": "0.11.1", "GPU driver": "550.54"}},
        "jax 0.12.0 on n0, n2, n3",
    ),
    "free": ({"free": {"/runs/a": 90 * GIB, "/tmp": GIB // 2}}, "/tmp has only 512 MiB free"),
    "amounts": (
        {"amounts": {"free memory": (64.0 * GIB,), "rate of matrix products": (1e14, 7e13)}},
        "its rate of matrix products on device 1 is 70% of the median of all hosts",
    ),
    "clock": ({"clock": -2.5}, "its clock is 2.5 s behind the driver's"),
    "machine": ({"machine": "other"}, ""),
    "name": ({"name": "other"}, ""),
}


@pytest.mark.parametrize("member", [field.name for field in dataclasses.fields(HostReport)])
def test_each_member_of_a_report_is_compared(member: str) -> None:
    change, said = SAID[member]
    found = hosts(**change)
    refused, warned = list(differing_versions(found)), list(shortages(found))
    if member == "versions":
        assert (refused, warned) == ([f"{said} and 0.11.1 on n1"], [])
    else:
        assert (refused, warned) == ([], [("n1", said)] if said else [])


def test_equal_hosts_are_fine_and_a_version_that_one_lacks_is_a_difference() -> None:
    assert [*differing_versions(hosts()), *shortages(hosts())] == []
    (line,) = differing_versions(hosts(versions={"jax": "0.12.0"}))
    assert line == "GPU driver 550.54 on n0, n2, n3 and none on n1"


@pytest.mark.parametrize(("share", "is_named"), [(0.79, True), (0.81, False), (1.5, False)])
def test_a_host_below_four_fifths_of_the_median_is_named(share: float, is_named: bool) -> None:
    for of in ALIKE.amounts:
        slower = tuple(share * one for one in ALIKE.amounts[of])
        found = list(shortages(hosts(amounts={**ALIKE.amounts, of: slower})))
        assert [name for name, _ in found] == ["n1"] * is_named


def test_hosts_that_share_a_machine_take_its_time_from_each_other() -> None:
    slow = {of: (1.0,) * len(rates) for of, rates in ALIKE.amounts.items()}
    found = [dataclasses.replace(host, machine="same") for host in hosts(amounts=slow)]
    assert list(shortages(found)) == []


@pytest.mark.devices
def test_this_machine_reports_all_that_is_compared(tmp_path) -> None:
    report = Peer().measure_host(str(tmp_path))
    assert {"Python", "jax", "jaxlib", "ray"} <= report.versions.keys()
    assert all(re.match(r"\d", version) for version in report.versions.values())
    assert {str(tmp_path)} < report.free.keys()
    assert min(report.free.values()) > 0
    assert len(report.amounts) == 3
    assert all(min(rates) > 0 for rates in report.amounts.values())
    assert report.machine == Peer().measure_host(os.getcwd()).machine
