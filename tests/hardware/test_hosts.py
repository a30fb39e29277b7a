"""Hosts beside one another at the start of a run: made-up ones, and this machine."""

import dataclasses
import re

import jax
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


def test_a_version_that_one_lacks_is_a_difference() -> None:
    (line,) = differing_versions(hosts(versions={"jax": "0.12.0"}))
    assert line == "GPU driver 550.54 on n0, n2, n3 and none on n1"


@pytest.mark.parametrize("share", [0.0, 0.79, 0.81, 1.5])
@pytest.mark.parametrize("of", ALIKE.amounts)
def test_a_host_below_four_fifths_of_the_median_is_named(of: str, share: float) -> None:
    """Hosts that share a machine take its time from each other, and are not compared."""
    found = hosts(amounts={**ALIKE.amounts, of: tuple(share * one for one in ALIKE.amounts[of])})
    assert [name for name, _ in shortages(found)] == ["n1"] * (share < 0.8)
    assert [*shortages([dataclasses.replace(host, machine="same") for host in found])] == []


def test_devices_without_room_anywhere_are_alike() -> None:
    none = {of: (0.0,) * len(rates) for of, rates in ALIKE.amounts.items()}
    assert [*shortages([dataclasses.replace(host, amounts=none) for host in hosts()])] == []


@pytest.mark.devices
def test_this_machine_reports_all_that_is_compared(tmp_path, monkeypatch) -> None:
    report = Peer().measure_host(str(tmp_path))
    assert {"Python", "jax", "jaxlib", "ray"} <= report.versions.keys()
    assert all(re.match(r"\d", version) for version in report.versions.values())
    assert {str(tmp_path)} < report.free.keys()
    assert min(report.free.values()) > 0
    assert len(report.amounts) == 3
    assert all(min(rates) > 0 for rates in report.amounts.values())

    def full(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(jax, "device_put", full)
    again = Peer().measure_host(str(tmp_path / "of another host"))
    assert again.machine == report.machine
    assert len(again.free) == 1
    assert {0.0} == {*again.amounts["rate of matrix products"]}
