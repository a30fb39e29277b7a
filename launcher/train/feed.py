"""Batches of a process, made ahead of time: its own rows, and each held-out row once.

Every program is compiled for full batches. A held-out batch with fewer rows is therefore evaluated
in pieces, each of a size that divides a full batch, and a piece is repeated until it fills one. So
all its rows count alike, in a mean of any kind and under any plan, and an evaluation weighs each
piece by the rows that it stands for.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from launcher.base import source_of
from launcher.recipes import Batches, InputError
from launcher.trace import arrays_only, may_be_raw_key

if TYPE_CHECKING:
    from launcher.recipes import Batch


class Feeder:
    """Calls `batch_at(k)` in a background thread, a little ahead of the requests.

    Batches are addressed by index, so there is no position to store, seek or lose. A thread is
    enough, since NumPy and file reads release the interpreter's lock.

    Args:
        batch_at: returns batch k, for 0 <= k < `stop`.
        start: the index of the first request; its preparation begins at once.
        stop: the index from which no batch is prepared.
        look_ahead: the most batches prepared beyond the one requested.
    """

    def __init__(
        self, batch_at: Callable[[int], Batch], start: int, stop: int, look_ahead: int = 2
    ) -> None:
        self._batch_at = batch_at
        self._stop = stop
        self._look_ahead = look_ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feeder")
        self._ready: dict[int, Future[Batch]] = {}
        self._prepare(start)

    def get(self, k: int) -> tuple[Batch, float]:
        """Return batch k and the seconds spent waiting for it; raise what `batch_at(k)` raised."""
        began = time.perf_counter()
        self._prepare(k)
        batch = self._ready.pop(k).result()
        return batch, time.perf_counter() - began

    def peek(self, k: int) -> Batch:
        """Return batch k, which `get` is still to be asked for; raise what `batch_at(k)` raised."""
        self._prepare(k)
        return self._ready[k].result()

    def close(self) -> None:
        """Stop the thread once it has finished its batch."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, k: int) -> None:
        for ahead in range(k, min(k + self._look_ahead + 1, self._stop)):
            if ahead not in self._ready:
                self._ready[ahead] = self._thread.submit(self._batch_at, ahead)


def shapes_of(batches: Callable[[int], Batch], batch_size: int, held_out: bool = False) -> Any:
    """Return the shapes of a full batch, a tree of `jax.ShapeDtypeStruct`, from one sample.

    A function's batches may hold numbers and random keys, too, which have no rows.

    Raises:
        InputError: it is no tree of arrays, or has another number of rows.
    """
    make: Any = batches
    at: Any = 0
    rows = batch_size
    if isinstance(batches, Batches):
        sample = batches.a_sample
        at = batches.numbers(0) if sample is None else np.array([sample], np.int64)
        if not isinstance(at, np.ndarray) or at.ndim != 1:
            raise InputError(f"{source_of(batches.numbers)} must return sample numbers, an array")
        make, at, rows = batches.gather, at[:1], 1
    batch = jax.tree.map(_shape, arrays_only(make, make(at)))
    leaves = jax.tree.leaves(batch) or [_shape(0)]
    if held_out:
        rows = next((leaf.shape[0] for leaf in leaves if leaf.shape), rows)
    elif make is batches:
        leaves = [x for x in leaves if x.shape and not may_be_raw_key(x)] or leaves
    if others := [leaf.shape for leaf in leaves if leaf.shape[:1] != (rows,)]:
        raise InputError(
            f"{source_of(make)} must return arrays of {rows} rows, as train.global_batch_size="
            f"{batch_size} asks; it returns one of shape {others[0]}"
        )
    if make is batches and not held_out:
        return batch
    return jax.tree.map(lambda x: x.update(shape=(batch_size, *x.shape[1:])), batch)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x))


def num_batches(held_out: Callable[[int], Batch], batch_size: int, most: int | None) -> int | None:
    """Return how many batches an evaluation takes, none twice; None: `most` has to be given."""
    num_rows = held_out.num_rows if isinstance(held_out, Batches) else None
    if num_rows is None:
        return most
    all_batches = -(-num_rows // batch_size)
    return all_batches if most is None else min(most, all_batches)


def own_rows(
    batches: Callable[[int], Batch], shapes: Any, rows: np.ndarray | None
) -> Callable[[int], Batch]:
    """Return a function from k to batch k, in which the rows of other processes are zeros.

    Those are not made, if `batches` are `Batches`, and many of them take no memory.

    Args:
        batches: the numbered batches.
        shapes: the shapes of a full batch.
        rows: the rows that this process needs; None: all of them.
    """
    if isinstance(batches, Batches):
        return lambda k: _gathered(batches, batches.numbers(k), shapes, rows)

    def batch_at(k: int) -> Batch:
        found = jax.tree.map(_shape, batch := batches(k))
        if found != shapes:
            raise InputError(f"{source_of(batches)} returns {found} as batch {k}, after {shapes}")
        return batch

    return batch_at


def filled(
    batches: Callable[[int], Batch], k: int, shapes: Any, rows: np.ndarray | None
) -> Iterator[tuple[int, Batch]]:
    """Yield held-out batch k as full batches, each with the number of rows that it stands for.

    Args:
        batches: the numbered batches; one with fewer rows than a full batch is the last.
        k: the number of the batch.
        shapes: the shapes of a full batch.
        rows: as in `own_rows`.
    """
    (batch_size,) = {shape.shape[0] for shape in jax.tree.leaves(shapes)}
    if isinstance(batches, Batches):
        numbers = batches.numbers(k)
        for start, stop in pieces(len(numbers), batch_size):
            repeated = np.repeat(numbers[start:stop], batch_size // (stop - start))
            yield stop - start, _gathered(batches, repeated, shapes, rows)
        return
    batch = batches(k)
    for start, stop in pieces(len(jax.tree.leaves(batch)[0]), batch_size):
        repeated = np.repeat(np.arange(start, stop), batch_size // (stop - start))
        yield stop - start, jax.tree.map(operator.itemgetter(repeated), batch)


def pieces(num_rows: int, batch_size: int) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` of consecutive pieces of rows, whose sizes divide `batch_size`."""
    start = 0
    while start < num_rows:
        largest = min(num_rows - start, batch_size)
        size = next(size for size in range(largest, 0, -1) if batch_size % size == 0)
        yield start, start + size
        start += size


def _gathered(batches: Batches, numbers: np.ndarray, shapes: Any, rows: np.ndarray | None) -> Batch:
    """Return the rows of these sample numbers, a full batch; zeros but for `rows`."""
    if rows is None or len(rows) == len(numbers):
        return batches.gather(numbers)
    whole: Batch = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
    if len(rows):
        made = batches.gather(numbers[rows])
        jax.tree.map(lambda array, own: array.__setitem__(rows, own), whole, made)
    return whole
