"""Rows of batches: a process makes its own, and pieces of held-out rows fill batches evenly."""

import jax
import numpy as np
import pytest

from launcher.recipes import InputError
from launcher.recipes.data.batches import batches, held_out
from launcher.train.feed import filled, own_rows, pieces, shapes_of

SHAPES = {"x": jax.ShapeDtypeStruct((6, 2), np.float32)}


class Source:
    """Rows that are their numbers, which remembers the numbers that were asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, which):
        self.asked.append(which.tolist())
        return {"x": np.stack([which, which], 1).astype(np.float32)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("num_rows", range(8))
@pytest.mark.parametrize("batch_size", [1, 6, 7])
def test_pieces_hold_each_row_once_and_divide_a_batch(num_rows, batch_size):
    found = list(pieces(num_rows, batch_size))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(num_rows))
    assert all(batch_size % (stop - start) == 0 for start, stop in found)


def test_a_process_asks_for_its_own_rows_alone():
    whole, source = batches(50, 6, 3, Source()), Source()
    numbered = batches(50, 6, 3, source)
    rows = np.array([1, 4])
    batch = own_rows(numbered, SHAPES, rows)(7)
    assert source.asked == [numbered.numbers(7)[rows].tolist()]
    np.testing.assert_array_equal(batch["x"][rows], whole(7)["x"][rows])
    assert not np.delete(batch["x"], rows, 0).any()


def test_a_process_without_rows_asks_for_none():
    source = Source()
    batch = own_rows(batches(50, 6, 0, source), SHAPES, np.array([], int))(0)
    assert batch["x"].shape == (6, 2)
    assert not source.asked


@pytest.mark.parametrize("rows", [None, np.arange(6)])
def test_a_process_with_all_rows_gets_the_batch_itself(rows):
    numbered = batches(50, 6, 0, Source())
    np.testing.assert_array_equal(own_rows(numbered, SHAPES, rows)(2)["x"], numbered(2)["x"])


def test_a_function_makes_whole_batches_all_alike():
    def batch_at(k):
        return {"x": np.full((6 if k < 3 else 4, 2), k)}

    shapes = shapes_of(batch_at, 6)
    own = own_rows(batch_at, shapes, np.array([0]))
    np.testing.assert_array_equal(own(2)["x"], batch_at(2)["x"])
    with pytest.raises(InputError, match=r"batch_at \(.*test_rows.py:\d+\) returns .* as batch 3"):
        own(3)


def test_shapes_are_those_of_a_batch_and_take_one_row():
    source = Source()
    assert shapes_of(batches(50, 6, 0, source), 6) == SHAPES
    assert len(source.asked) == len(source.asked[0]) == 1


def test_the_batches_of_a_function_may_hold_numbers_and_a_random_key():
    key = np.zeros(2, np.uint32)
    batch = {"x": np.ones((6, 2)), "scale": 2.0, "rng": key, "typed": jax.random.key(0)}
    shapes = shapes_of(lambda k: batch, 6)
    assert {name: x.shape for name, x in shapes.items()} == jax.tree.map(np.shape, batch)
    assert own_rows(lambda k: batch, shapes, None)(3) is batch
    with pytest.raises(InputError, match=r"must return arrays of . rows.*one of shape \(\)"):
        shapes_of(lambda k: batch, 6, held_out=True)


@pytest.mark.parametrize("as_function", [False, True])
def test_a_full_batch_for_each_piece_repeats_its_rows_evenly(as_function):
    held = held_out(11, 6, Source())
    given = (lambda k: held(k)) if as_function else held
    found = [part for k in range(3) for part in filled(given, k, SHAPES, None)]
    assert [count for count, _ in found] == [6, 3, 2]
    counted = []
    for count, batch in found:
        values, repeats = np.unique(batch["x"][:, 0], return_counts=True)
        assert batch["x"].shape == (6, 2)
        assert repeats.tolist() == [6 // count] * count
        counted += values.tolist()
    assert sorted(counted) == list(range(11))


def test_pieces_are_of_the_same_rows_where_a_process_makes_its_own():
    held, rows = held_out(11, 6, Source()), np.array([0, 5])
    for (_, whole), (_, own) in zip(
        filled(held, 1, SHAPES, None), filled(held, 1, SHAPES, rows), strict=True
    ):
        np.testing.assert_array_equal(own["x"][rows], whole["x"][rows])
        assert not own["x"][1:5].any()
