"""Which rows of a batch this process needs, by the boxes of its devices."""

import numpy as np
import pytest

from launcher.partition.assignment import Slicing
from launcher.runtime.execute.dispatch_table import rows_here


class Boxes:
    """A sharding of which devices here have these boxes."""

    def __init__(self, *boxes):
        self.addressable_devices = set(range(len(boxes)))
        self._boxes = boxes

    def addressable_devices_indices_map(self, shape):
        return {
            device: (box + (slice(None),) * len(shape))[: len(shape)]
            for device, box in enumerate(self._boxes)
        }


def rows(slicing, axis, *shardings, shape=(12, 5)):
    leaves = [np.empty(shape)] * len(shardings)
    copies = [(i, i, sharding, axis) for i, sharding in enumerate(shardings)]
    found = rows_here(copies, leaves, slicing.stack)
    return found if found is None else found.tolist()


ALL = slice(None)


def test_a_replica_has_its_share_of_every_microbatch():
    second = Boxes((ALL, slice(1, 2)))  # [microbatch, replica, rows, …]
    assert rows(Slicing(3, 2), 0, second) == [2, 3, 6, 7, 10, 11]


def test_devices_that_share_rows_need_them_together():
    halves = Boxes((ALL, slice(0, 1), ALL, slice(0, 2)), (ALL, slice(0, 1), ALL, slice(2, 5)))
    assert rows(Slicing(3, 2), 0, halves) == [0, 1, 4, 5, 8, 9]


@pytest.mark.parametrize("axis", [0, None])
def test_what_is_replicated_needs_all_rows(axis):
    assert rows(Slicing(2, 1), axis, Boxes(())) == list(range(12))


def test_rows_of_a_whole_batch_that_is_cut_by_the_compiler():
    assert rows(Slicing(1, 1), None, Boxes((slice(4, 8),))) == [4, 5, 6, 7]


def test_what_different_leaves_need_is_needed_together():
    first, last = Boxes((ALL, slice(0, 1))), Boxes((ALL, slice(3, 4)))
    assert rows(Slicing(1, 4), 0, first, last, Boxes()) == [0, 1, 2, 9, 10, 11]


def test_a_process_without_a_part_of_the_batch_needs_none():
    assert rows(Slicing(2, 2), 0, Boxes()) == []


def test_where_rows_lie_along_another_axis_all_are_needed():
    assert rows(Slicing(2, 1), 1, Boxes(())) is None
