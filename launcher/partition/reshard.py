"""Map pieces of an array from source devices to target processes. Pure.

An array leaves one submesh in tiles and arrives on another in tiles of perhaps another shape. Each
process of the destination takes every part it needs once, from a copy it has itself where there is
one, else from the process that has sent least so far; its further copies are made inside it. So no
byte crosses a link between hosts twice (cf. cross-mesh resharding: Zhuang et al., MLSys 2023,
arXiv 2211.05322).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]  # (start, stop) along each axis


@dataclass(frozen=True)
class Piece:
    """The part `box` of an array, read from `src_device`, for `dst_process`'s shards `dst_box`."""

    src_device: int
    src_process: int
    dst_process: int
    box: Box
    src_box: Box
    dst_box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(stop - start for start, stop in self.box)


def route(
    src: Mapping[int, Box], dst: Mapping[int, Box], process_of: Mapping[int, int]
) -> tuple[Piece, ...]:
    """Return the pieces that fill every device of `dst` (device -> its tile) from those of `src`.

    Pieces for one process and tile stand together; their boxes are disjoint and cover the tile.
    """
    holders: dict[Box, list[int]] = {}
    for device, box in src.items():
        holders.setdefault(box, []).append(device)
    sent: dict[int, int] = {}
    pieces = []
    wanted = dict.fromkeys((process_of[device], box) for device, box in dst.items())
    for process, dst_box in wanted:
        for src_box, devices in holders.items():
            common = intersect(src_box, dst_box)
            if common is None:
                continue
            device = min(devices, key=lambda d: (process_of[d] != process, sent.get(d, 0), d))
            if process_of[device] != process:
                sent[device] = sent.get(device, 0) + volume(common)
            pieces.append(Piece(device, process_of[device], process, common, src_box, dst_box))
    return tuple(pieces)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes, None if it is empty."""
    found = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in found) else found


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)
