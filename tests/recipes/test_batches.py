"""`batches.py`: batch k is a pure function of the seed and k; passes differ in order."""

import numpy as np

from launcher.recipes.data.batches import batches, held_out, next_token_batch


def numbered(num_samples, batch_size, seed=0):
    return batches(num_samples, batch_size, seed, lambda which: {"which": which})


def samples(batch_of, steps):
    return np.concatenate([batch_of(k)["which"] for k in steps]).tolist()


def test_batch_k_depends_on_the_seed_and_k_alone():
    one, other = numbered(50, 8, seed=3), numbered(50, 8, seed=3)
    forwards = [one(k)["which"].tolist() for k in range(20)]
    backwards = [other(k)["which"].tolist() for k in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert samples(numbered(50, 8, seed=4), range(20)) != samples(one, range(20))


def test_each_pass_holds_every_sample_once_in_an_order_of_its_own():
    passes = np.array(samples(numbered(12, 4), range(5 * 3))).reshape(5, 12).tolist()
    assert all(sorted(one) == list(range(12)) for one in passes)
    assert len({tuple(one) for one in passes}) == 5


def test_passes_follow_each_other_without_a_gap_where_batches_do_not_divide_them():
    row = samples(numbered(10, 4), range(5))
    assert sorted(row[:10]) == sorted(row[10:]) == list(range(10))


def test_fewer_samples_than_a_batch_holds():
    assert sorted(numbered(3, 6)(0)["which"].tolist()) == [0, 0, 1, 1, 2, 2]
    assert numbered(1, 2)(10**9)["which"].tolist() == [0, 0]


def test_targets_are_the_tokens_one_later():
    batch = next_token_batch(np.array([[1, 2, 3], [255, 5, 6]], np.uint8))
    assert batch["tokens"].tolist() == [[1, 2], [255, 5]]
    assert batch["targets"].tolist() == [[2, 3], [5, 6]]
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in batch.values())


def test_held_out_batches_hold_each_sample_once_and_then_none():
    held = held_out(10, 4, lambda which: {"which": which})
    assert sorted(samples(held, range(3))) == list(range(10))
    assert [len(held(k)["which"]) for k in range(5)] == [4, 4, 2, 0, 0]
    assert held.num_rows == 10


def test_the_rows_of_a_batch_can_be_made_apart():
    numbered_batches = numbered(50, 8)
    numbers = numbered_batches.numbers(3)
    made = numbered_batches.gather(numbers[[5, 2]])["which"]
    assert made.tolist() == numbered_batches(3)["which"][[5, 2]].tolist()
