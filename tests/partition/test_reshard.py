"""Routing an array from one submesh to another: all of it, once, from balanced sources."""

import collections
import itertools

import numpy as np
import pytest

from launcher.partition.reshard import route, volume

SHAPE = (12, 8)


def tiles(devices, rows, columns):
    """`devices` as a grid over SHAPE, `rows` × `columns` tiles, replicated over the rest."""
    grid = list(itertools.product(range(rows), range(columns)))
    height, width = SHAPE[0] // rows, SHAPE[1] // columns
    return {
        d: ((i * height, (i + 1) * height), (j * width, (j + 1) * width))
        for d, (i, j) in zip(devices, itertools.cycle(grid), strict=False)
    }


def crossing(pieces):
    """Elements that go from one process to another, by `(from, to)`."""
    total = collections.Counter()
    for p in pieces:
        if p.src_process != p.dst_process:
            total[p.src_process, p.dst_process] += volume(p.box)
    return total


LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 1), (1, 4)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("src_layout", LAYOUTS)
@pytest.mark.parametrize("dst_layout", LAYOUTS)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_process_gets_every_needed_element_once(src_layout, dst_layout, processes):
    src = tiles(range(12), *src_layout)
    dst = tiles(range(12, 24), *dst_layout)
    process_of = {d: d * processes // 12 for d in range(24)}  # disjoint processes
    pieces = route(src, dst, process_of)
    for process in {process_of[d] for d in dst}:
        needed = {box for d, box in dst.items() if process_of[d] == process}
        for box in needed:
            seen = np.zeros(SHAPE, int)
            for p in pieces:
                if p.dst_process == process and p.dst_box == box:
                    seen[tuple(slice(*axis) for axis in p.box)] += 1
                    assert src[p.src_device] == p.src_box
            want = np.zeros(SHAPE, int)
            want[tuple(slice(*axis) for axis in box)] = 1
            np.testing.assert_array_equal(seen, want)
        arrived = sum(n for (_, to), n in crossing(pieces).items() if to == process)
        assert arrived == sum(volume(box) for box in needed)


def test_what_a_process_has_does_not_cross():
    both = tiles(range(4), 2, 1)
    assert crossing(route(both, both, {0: 0, 1: 0, 2: 1, 3: 1})) == {}
    pieces = route(tiles([0], 1, 1), tiles([0, 1, 2, 3], 1, 1), {0: 0, 1: 0, 2: 1, 3: 1})
    assert crossing(pieces) == {(0, 1): 96}  # once, though two devices there want it


def test_replicated_sources_share_the_load():
    pieces = route(
        tiles(range(4), 1, 1),
        tiles(range(4, 8), 4, 1),
        dict.fromkeys(range(4), 0) | dict.fromkeys(range(4, 8), 1),
    )
    sent = collections.Counter()
    for p in pieces:
        sent[p.src_device] += volume(p.box)
    assert sent == dict.fromkeys(range(4), 24)
