"""Where processes listen, and what the table of ports in launcher/driver/README.md says of it."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

ANYWHERE = ("::", "0.0.0.0")


def ports(processes: Iterable[psutil.Process]) -> dict[tuple[str, int], str]:
    """Each address that is listened at, and the kind of process that does: of several, the first
    of `processes`."""
    found: dict[tuple[str, int], str] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            kind = process.name() if process.pid != os.getpid() else "launcher"
            kind = "ray::Worker" if kind.startswith("ray::Worker") else kind
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ip, port = connection.laddr
                    found.setdefault((ip.removeprefix("::ffff:"), port), kind)
    return found


def documented(where: str, workers: int, *, first: bool = True, purpose: str = "") -> Counter[str]:
    """The table of ports: how many each kind of process has.

    Args:
        where: the column. workers: how many there are together.
        first: whether the run's driver is there, and its first worker.
        purpose: only those for this.
    """
    page = Path(__file__).parents[3].joinpath("launcher/driver/README.md").read_text()
    header, _, *rows = page[page.index("| process |") :].partition("\n\n")[0].splitlines()
    column = [cell.strip() for cell in header.split("|")].index(where)
    number: Counter[str] = Counter()
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")]
        (kind,) = re.findall(r"`([^`]+)`", cells[1])
        of_first = kind in ("launcher", "gcs_server") or "the first" in cells[1]
        if (first or not of_first) and purpose in ("", cells[2]):
            number[kind] += int(cells[column]) * (workers if "each" in cells[1] else 1)
    return +number
