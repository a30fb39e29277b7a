"""Pieces of a state: who holds them, who lacks them, who gets them from whom.

A piece is a shard of an array, or a part of one, by its place in the whole array. So a state is put
together from whatever pieces there are, also under another plan than the one that made them. These
are pure functions over plain data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from launcher.partition import Box, route, volume

Piece = tuple[str, Box]  # the array's name, and the place in it
Lent = tuple[int, list[Piece]]  # the host that holds them, and what another one gets
_MOST_ELEMENTS = 2**24  # that a host gets at a time, unless one piece has more


class Moment(NamedTuple):
    """The time of a snapshot: the number of finished steps, and the attempt that has made them.

    Snapshots of one moment are of one plan: their pieces are the same, or have nothing in common.
    """

    step: int
    attempt: int


class Holding(NamedTuple):
    """The pieces that a host holds of a state, and the shape of each array, held or not."""

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Collection[Piece]


class Copy(NamedTuple):
    """The pieces that a host sends, to which other one, and the bytes that it gets itself."""

    pieces: list[Piece]
    to: int
    taken: int


Holdings = Mapping[Moment, Holding]  # all of a host


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Return the index of a part in an array that holds `whole`."""
    both = zip(part, whole, strict=True)
    return tuple(slice(first - start, end - start) for (first, end), (start, _) in both)


def newest_of_all(hosts: Sequence[Holdings], most: int, since: int) -> Moment | None:
    """Return the newest moment of which the hosts together hold every piece, if there is one.

    Args:
        hosts: the holdings of each.
        most: the newest step that is recorded.
        since: the first attempt that counts.
    """
    found = {moment for holdings in hosts for moment in holdings if moment.attempt >= since}
    for moment in sorted((each for each in found if each.step <= most), reverse=True):
        held = [holdings[moment] for holdings in hosts if moment in holdings]
        elements = Counter[str]()
        for name, ranges in {piece for holding in held for piece in holding.pieces}:
            elements[name] += volume(ranges)
        if all(elements[name] == math.prod(shape) for name, shape in held[0].shapes.items()):
            return moment
    return None


def copies(sizes: Sequence[Mapping[Piece, int]]) -> list[Copy]:
    """Return for each host the copy that it sends: of what no other one holds as a replica.

    Args:
        sizes: the bytes of the pieces that each holds.
    """
    holders = Counter(piece for pieces in sizes for piece in pieces)
    alone = [[piece for piece in pieces if holders[piece] == 1] for pieces in sizes]
    counts = [sum(size[piece] for piece in own) for size, own in zip(sizes, alone, strict=True)]
    return [Copy(own, (k + 1) % len(sizes), counts[k - 1]) for k, own in enumerate(alone)]


def lends(
    lacks: Sequence[Iterable[Piece]], held: Sequence[Iterable[Piece]]
) -> Iterator[dict[int, Lent]]:
    """Yield in rounds from which host each other one gets parts of the pieces that it lacks.

    A round is small, so that little memory is taken beside the state's.

    Args:
        lacks: the pieces that each host lacks, all of which or a part of which others hold.
        held: those that each holds, of one moment.
    """
    wanted, sources = _by_name(lacks), _by_name(held)
    parts: list[list[tuple[int, Piece]]] = [[] for _ in held]
    for name, places in wanted.items():
        hosts, boxes = zip(*sources[name], *places, strict=True)
        src = dict(enumerate(boxes[: len(sources[name])]))
        dst = {k: box for k, box in enumerate(boxes) if k not in src}
        for each in route(src, dst, dict(enumerate(hosts))):
            if each.src_process != each.dst_process:
                parts[each.dst_process].append((each.src_process, (name, each.box)))
    for lent in zip_longest(*(_batches(sorted(one)) for one in parts)):
        yield {host: one for host, one in enumerate(lent) if one is not None}


def _by_name(of_hosts: Sequence[Iterable[Piece]]) -> dict[str, list[tuple[int, Box]]]:
    named: dict[str, list[tuple[int, Box]]] = {}
    for host, pieces in enumerate(of_hosts):
        for name, box in pieces:
            named.setdefault(name, []).append((host, box))
    return named


def _batches(parts: Iterable[tuple[int, Piece]]) -> Iterator[Lent]:
    """Yield the same in batches, each of one host."""
    batch, elements = (-1, list[Piece]()), 0
    for host, piece in parts:
        elements += volume(piece[1])
        if host != batch[0] or elements > _MOST_ELEMENTS:
            yield from [batch] if batch[1] else []
            batch, elements = (host, []), volume(piece[1])
        batch[1].append(piece)
    yield from [batch] if batch[1] else []
