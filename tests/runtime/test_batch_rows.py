"""Which rows of a batch this process needs, by the boxes of its devices."""

import numpy as np
import pytest

from launcher.partition.assignment import Slicing
from launcher.runtime.dispatch_table import rows_here


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


ALL = slice(None)
FIRST = ALL, slice(0, 1)  # [microbatch, replica, rows, …]
CASES = {  # the slicing, the axis along which a leaf is stacked, the leaves' boxes: the rows
    "a replica: its share of every microbatch": (
        *(Slicing(3, 2), 0, [Boxes((ALL, slice(1, 2)))]), [2, 3, 6, 7, 10, 11]
    ),
    "devices that share rows: these together": (
        *(Slicing(3, 2), 0, [Boxes((*FIRST, ALL, slice(0, 2)), (*FIRST, ALL, slice(2, 5)))]),
        [0, 1, 4, 5, 8, 9],
    ),
    "replicated, stacked": (Slicing(2, 1), 0, [Boxes(())], [*range(12)]),
    "replicated": (Slicing(2, 1), None, [Boxes(())], [*range(12)]),
    "a whole batch that the compiler cuts": (
        *(Slicing(1, 1), None, [Boxes((slice(4, 8),))]), [4, 5, 6, 7]
    ),
    "different leaves: together": (
        *(Slicing(1, 4), 0, [Boxes(FIRST), Boxes((ALL, slice(3, 4))), Boxes()]),
        [0, 1, 2, 9, 10, 11],
    ),
    "no part of the batch: none": (Slicing(2, 2), 0, [Boxes()], []),
    "rows along another axis: maybe any": (Slicing(2, 1), 1, [Boxes(())], None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_read_here(case):
    slicing, axis, shardings, expected = CASES[case]
    leaves = [np.empty((12, 5))] * len(shardings)
    copies = [(i, i, sharding, axis) for i, sharding in enumerate(shardings)]
    found = rows_here(copies, leaves, slicing.stack)
    assert (found if found is None else found.tolist()) == expected
