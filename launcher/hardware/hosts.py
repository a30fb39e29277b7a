"""Comparison of the hosts of a run at its start: versions, clocks, free space, speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_SLOW_SHARE = 0.8  # of the median over all hosts
_CLOCK_SECONDS = 1.0  # off by more, times in logs and files mislead
_FREE_BYTES = 1 << 30  # less is used up by a run's own files


@dataclass(frozen=True)
class HostReport:
    """The state of a host at the start of a run.

    Attributes:
        machine: the same text for hosts that share a machine, and each other's time.
        versions: the versions of what a run uses and this host has, by name.
        free: the free bytes of folders, by path.
        amounts: what equal hosts have the same of, by name: free memory in bytes, and the rate of
            each device in a product (FLOP/s) and in a transfer to it (bytes/s).
        name: the name by which the user knows the host.
        clock: seconds by which its clock is ahead of the driver's.
    """

    machine: str
    versions: Mapping[str, str]
    free: Mapping[str, int]
    amounts: Mapping[str, tuple[float, ...]]
    name: str = ""
    clock: float = 0.0


def differing_versions(hosts: Sequence[HostReport]) -> Iterator[str]:
    """Yield a line for each version that not all hosts share."""
    for of in dict.fromkeys(name for host in hosts for name in host.versions):
        found: dict[str, list[str]] = {}
        for host in hosts:
            found.setdefault(host.versions.get(of, ""), []).append(host.name)
        if len(found) > 1:
            each = (f"{one or 'none'} on {', '.join(names)}" for one, names in found.items())
            yield f"{of} {' and '.join(each)}"


def shortages(hosts: Sequence[HostReport]) -> Iterator[tuple[str, str]]:
    """Yield a host's name and a line for each way in which it falls short.

    Amounts are compared only between machines: hosts that share one take them from each other.
    """
    for host in hosts:
        if abs(host.clock) > _CLOCK_SECONDS:
            way = "ahead of" if host.clock > 0 else "behind"
            yield host.name, f"its clock is {abs(host.clock):.1f} s {way} the driver's"
        for path, free in host.free.items():
            if free < _FREE_BYTES:
                yield host.name, f"{path} has only {free / 2**20:.0f} MiB free"
    if len({host.machine for host in hosts}) < len(hosts):
        return
    for of in hosts[0].amounts:
        median = float(np.median([one for host in hosts for one in host.amounts[of]]))
        for host in hosts:
            if (least := min(host.amounts[of])) < _SLOW_SHARE * median:
                at = f" on device {host.amounts[of].index(least)}" if host.amounts[of][1:] else ""
                yield host.name, f"its {of}{at} is {least / median:.0%} of the median of all hosts"
