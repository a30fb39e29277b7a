"""The state in the memory of the workers' hosts: kept in two places, found, and restored.

Each host keeps its worker's share, and of its neighbour's what no other host has. Restoring takes
whatever pieces there are, also under another plan: each worker says which it lacks, and gets these
from others. The hosts may be others than before, and fewer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from launcher import checkpoint
from launcher.driver.workers import Workers

_log = logging.getLogger(__name__)


class NewestState(NamedTuple):
    """The newest state in memory, and the pieces of it that each host holds."""

    moment: checkpoint.Moment
    held: list[list[checkpoint.Piece]]


def newest_state(workers: Workers, most: int, since: int) -> NewestState | None:
    """Return the newest state of which the hosts together hold all; None if there is none.

    Args:
        workers: the workers, of any plan, on the same hosts or on some that are left.
        most: the newest step that is recorded.
        since: the first attempt whose snapshots are of the run as it is now.
    """
    hosts: list[checkpoint.Holdings] = _each(
        workers, "snapshots", [(place,) for place in _places(workers)]
    )
    moment = checkpoint.newest_of_all(hosts, most, since)
    if moment is None:
        return None
    return NewestState(
        moment, [list(host[moment].pieces) if moment in host else [] for host in hosts]
    )


def restore(workers: Workers, newest: NewestState) -> None:
    """Restore a state in the workers, by their present plan.

    The workers are those of `newest_state`, and have set their plan up.
    """
    moment = newest.moment
    for lent in checkpoint.lends(workers.submit("lacks", moment).each(), newest.held):
        calls = []
        for borrower, (holder, pieces) in lent.items():
            answer = workers.handles[holder].submit("lend", moment, pieces)
            taken = workers.handles[borrower].submit("borrow", moment, answer.reference)
            calls += [answer, taken]
        workers.gather(calls, starting=True)
    workers.submit("restore_snapshot", moment).result()


def keep(workers: Workers, moment: checkpoint.Moment) -> bool:
    """Have each host keep snapshots from now on, if there is room; return whether they do.

    What no other host has of a share is copied to the next host as well, if there is room.

    Args:
        workers: the workers, with their state.
        moment: the number of finished steps, and of the attempt that begins.
    """
    kept = _each(workers, "keep_snapshots", [(moment, place) for place in _places(workers)])
    if problem := _first(kept):
        workers.submit("drop_snapshots").result()
        _log.info(f"the state is not kept in memory for restarts: {problem}")
        return False
    if len(kept) == 1:
        return True
    copies = checkpoint.copies([sizes for _, sizes in kept])
    about = [(copy.pieces, kept[copy.to][0], copy.taken) for copy in copies]
    if problem := _first(_each(workers, "exchange_copies", about)):
        _each(workers, "exchange_copies", [([], there, 0) for _, there, _ in about])
        _log.info(f"the state in memory does not outlive the loss of a host: {problem}")
    return True


def host_places(nodes: Sequence[str]) -> list[checkpoint.HostPlace]:
    """Return where the hosts on these nodes of Ray, each with a folder, keep their own."""
    return [
        checkpoint.HostPlace(rank, nodes[:rank].count(node), nodes.count(node))
        for rank, node in enumerate(nodes)
    ]


def _places(workers: Workers) -> list[checkpoint.HostPlace]:
    return host_places([handle.node for handle in workers.handles])


def _each(workers: Workers, method: str, arguments: Iterable[Sequence[Any]]) -> list[Any]:
    """Return each worker's answer to a call with arguments of its own."""
    calls = zip(workers.handles, arguments, strict=True)
    return workers.gather([handle.submit(method, *each) for handle, each in calls], starting=True)


def _first(answers: Iterable[Any]) -> str | None:
    return next((each for each in answers if isinstance(each, str)), None)
