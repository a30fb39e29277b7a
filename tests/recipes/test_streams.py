"""`recipes/data/streams.py`: batches by number, of a stream that is read in order and once."""

import itertools

import numpy as np
import pytest

from launcher.recipes import InputError
from launcher.recipes.data.streams import StreamedBatches


def stream_of(stop=None):
    """A stream, and how often it was begun and where."""
    begun = []

    def begin(skip):
        begun.append(skip)
        numbers = itertools.count() if stop is None else range(stop)
        return ({"x": np.full(2, k)} for k in itertools.islice(numbers, skip, None))

    return StreamedBatches(begin), begun


def taken(batches, numbers):
    return [int(batches(k)["x"][0]) for k in numbers]


def test_a_run_reads_the_stream_once_and_resumes_by_count():
    batches, begun = stream_of()
    assert taken(batches, [0, 0, 1, 2, 3]) == [0, 0, 1, 2, 3]  # the first also for the shapes
    assert begun == [0]
    resumed, begun = stream_of()
    assert taken(resumed, [0, 100, 101]) == [0, 100, 101]
    assert begun == [0, 100]


def test_any_order_gives_the_same_batches():
    batches, _ = stream_of()
    assert taken(batches, [5, 3, 4, 4, 9, 8]) == [5, 3, 4, 4, 9, 8]


def test_the_end_of_a_stream_is_said():
    batches, _ = stream_of(stop=3)
    assert taken(batches, [0, 1, 2]) == [0, 1, 2]
    with pytest.raises(InputError, match="the dataset's stream ends after 3 batches, and batch 3"):
        batches(3)
