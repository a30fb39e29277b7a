"""The state in the memory of the workers' hosts: kept in two places, found, and restored.

Each host keeps its worker's share, and of its neighbour's what no other host has. Restoring takes
whatever pieces there are, also under another plan: each worker says which it lacks, and gets these
from others. The hosts may be others than before, and fewer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from launcher import checkpoint
from launcher.driver.workers import Workers

_log = logging.getLogger(__name__)


class NewestState(NamedTuple):
    """The newest state in memory, and the pieces of it that each host holds."""

    moment: checkpoint.Moment
    held: list[list[checkpoint.Piece]]


def find(workers: Workers) -> list[checkpoint.Holdings]:
    """Return what each host holds."""
    places = host_places([handle.address for handle in workers.handles])
    return _each(workers, "snapshots", [(place,) for place in places])


def newest_state(hosts: Sequence[checkpoint.Holdings], after: int, most: int) -> NewestState | None:
    """Return the newest state of which the hosts together hold all; None if there is none.

    Args:
        hosts: what `find` has returned.
        after: the step of the newest checkpoint; a state has to be of a later one.
        most: the newest step that is recorded.
    """
    moment = checkpoint.newest_of_all(hosts, after, most)
    if moment is None:
        return None
    held = [host[moment].pieces if moment in host else [] for host in hosts]
    return NewestState(moment, list(map(list, held)))


def restore(workers: Workers, newest: NewestState) -> None:
    """Restore a state in the workers, by their present plan.

    The workers are those of `find`, and have set their plan up.
    """
    moment = newest.moment
    lacks = workers.submit("lacks", moment).each()
    for lent in checkpoint.lends(lacks, newest.held):
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
    places = host_places([handle.address for handle in workers.handles])
    kept = _each(workers, "keep_snapshots", [(moment, place) for place in places])
    if problem := _first(kept):
        workers.submit("drop_snapshots").result()
        _log.info(f"the state is not kept in memory for restarts: {problem}")
        return False
    if len(kept) == 1:
        return True
    folders, sizes = zip(*kept, strict=True)
    alone = checkpoint.alone(sizes)
    taken = [sum(map(of.get, pieces)) for of, pieces in zip(sizes, alone, strict=True)]
    next_folders, taken_here = [*folders[1:], folders[0]], [taken[-1], *taken[:-1]]
    about = list(zip(alone, next_folders, taken_here, strict=True))
    if problem := _first(_each(workers, "exchange_copies", about)):
        _each(workers, "exchange_copies", [([], folder, 0) for folder in folders])
        _log.info(f"the state in memory does not outlive the loss of a host: {problem}")
    return True


def host_places(addresses: Sequence[str]) -> list[checkpoint.HostPlace]:
    """Return where the hosts at these addresses keep their folders."""
    counts, found = Counter(addresses), Counter[str]()
    places = []
    for rank, address in enumerate(addresses):
        places.append(checkpoint.HostPlace(rank, found[address], counts[address]))
        found[address] += 1
    return places


def _each(workers: Workers, method: str, arguments: Iterable[Sequence[Any]]) -> list[Any]:
    """Return each worker's answer to a call with arguments of its own."""
    calls = zip(workers.handles, arguments, strict=True)
    return workers.gather([handle.submit(method, *each) for handle, each in calls], starting=True)


def _first(answers: Iterable[Any]) -> str | None:
    return next((each for each in answers if isinstance(each, str)), None)
