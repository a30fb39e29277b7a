"""Handles to arrays that stay on the workers, and their transfer to and from the driver."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from launcher.api.calls import Shards
from launcher.api.own_copies import is_key
from launcher.arrays.array_like import ArrayLike
from launcher.base.jax_compat import accept_as_array
from launcher.cluster.ray import pickling
from launcher.runtime import plain_aval


class ConsumedError(RuntimeError):
    """An error raised when an array is used after a call has consumed it."""


class Owner(Protocol):
    """The interface that a handle needs of the backend that keeps the array.

    Attributes:
        sending: the lock under which the next use of an array is chosen.
    """

    sending: threading.RLock

    def fetch(self, arrays: Sequence[RemoteArray]) -> None:
        """Start to fetch arrays, in one message to each worker."""

    def want(self, array: RemoteArray) -> None:
        """Fetch this array with the next message that has to be sent."""

    def flush(self) -> None:
        """Start to fetch all arrays that are wanted."""

    def wait(self, array: RemoteArray) -> None:
        """Wait until an array is computed."""

    def placement(self, array: RemoteArray) -> str:
        """Return in words where an array lies."""

    def drop(self, number: int) -> None:
        """Free an array with the next message."""


class Fetch:
    """Arrays on their way from the workers, of which each sends the parts that it has.

    Args:
        answers: waits for the workers' answers, each of which holds the `Shards` of every array.
        arrays: the handles of the arrays.
    """

    def __init__(self, answers: Callable[[], list[Any]], arrays: Sequence[RemoteArray]) -> None:
        self._answers: Callable[[], list[Any]] | None = answers
        avals = (plain_aval(array)[0] for array in arrays)  # of keys, that of their data
        self._avals = [(aval.shape, aval.dtype) for aval in avals]
        self._whole: list[np.ndarray] = []

    def result(self) -> list[np.ndarray]:
        """Wait for the arrays and return them, read-only, in their order; of keys, their data.

        It may be called more than once, and by several threads.
        """
        if (answers := self._answers) is not None:
            shards = zip(*answers(), strict=True)
            pairs = zip(self._avals, shards, strict=True)
            self._whole = [_assembled(*aval, each) for aval, each in pairs]
            self._answers = None
        return self._whole


class RemoteArray(ArrayLike):
    """A handle of a few bytes to an array that lies on the workers.

    It can be passed back to a parallelized function, which costs nothing. Whatever else is done
    with it (arithmetic, comparing, indexing, printing, functions of NumPy and JAX, pickling) waits
    for its value and brings it here, once. To fetch many in one round trip, `launcher.prefetch`
    them first, or `jax.device_get` them together. The workers free the array when its handle is
    gone, with the next message that they get.

    Attributes:
        owner: the backend that keeps the array.
        dtype: the dtype, as JAX has it.
        fetched: the fetch that brings the value, and its position there.

    Raises:
        ConsumedError: the array was donated to a call.
        WorkerError: a worker failed.
    """

    __slots__ = ("__weakref__", "_number", "_shape", "dtype", "fetched", "owner")

    def __init__(self, owner: Owner, number: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.owner, self._number = owner, number
        self._shape, self.dtype = shape, dtype
        self.fetched: tuple[Fetch, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self._shape

    @property
    def nbytes(self) -> int:
        """The number of bytes of all elements, each counted once."""
        return self.size * int(self.dtype.itemsize)

    @property
    def placement(self) -> str:
        """Where it lies, in words such as "whole, on device 2"; a worker is asked for it."""
        return self.owner.placement(self)

    @property
    def number(self) -> int:
        """The number by which the workers know the array.

        Raises:
            ConsumedError: the array was donated or deleted.
        """
        if self._number < 0:
            raise ConsumedError(
                f"this array ({self.dtype}{list(self._shape)}) was donated to an earlier call, "
                "which has consumed it; use that call's result in its place, or leave its argument "
                "out of donate_argnums"
            )
        return self._number

    def is_deleted(self) -> bool:
        """Return whether a call has consumed the array, or `delete` was called."""
        return self._number < 0

    def delete(self) -> None:
        """Free the array on the workers; it cannot be used again."""
        with self.owner.sending:
            self.owner.drop(self.number)
            self._number = -1

    def consume(self) -> None:
        """Mark the array as donated: the workers free it themselves."""
        self._number, self.fetched = -1, None

    def copy_to_host_async(self) -> None:
        """Fetch the array with the next message to the workers; many are fetched together."""
        with self.owner.sending:
            if self.number >= 0 and self.fetched is None:
                self.owner.want(self)

    def block_until_ready(self) -> RemoteArray:
        """Wait until the array is computed."""
        self.owner.wait(self)
        return self

    @property
    def value(self) -> jax.Array:
        """The value, an array of this process; it is fetched once."""
        data = jnp.asarray(self._data())
        _, impl = plain_aval(self)
        return data if impl is None else jax.random.wrap_key_data(data, impl=impl)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the value, read-only.

        NumPy does not know typed random keys; their value, for `jax.device_get`, is a `jax.Array`
        of this process.
        """
        return self.value if self._is_key else np.array(self._data(), dtype, copy=copy)

    @property
    def __jax_array__(self) -> Callable[[], jax.Array]:
        if self._is_key:  # as which jax.random would not know it
            raise TypeError(f"{self!r} is a random key on the workers; fetch it: jax.device_get")
        return lambda: self.value

    @property
    def _is_key(self) -> bool:
        return is_key(self.dtype)

    def _data(self) -> np.ndarray:
        """Return the array as it travels, fetched once."""
        with self.owner.sending:
            if self.number >= 0 and self.fetched is None:
                self.owner.flush()
                if self.fetched is None:
                    self.owner.fetch([self])
            assert self.fetched is not None
            fetch, place = self.fetched
        return fetch.result()[place]

    def __repr__(self) -> str:
        state = ", consumed" if self.is_deleted() else ""
        return f"RemoteArray({self.dtype}{list(self._shape)}{state})"

    def __del__(self) -> None:
        if getattr(self, "_number", -1) >= 0:
            self.owner.drop(self._number)


accept_as_array(RemoteArray, lambda array: array.value)


def known_to_flax() -> None:
    """Have `flax.serialization` write arrays on the workers as what they hold."""
    from flax import serialization  # so late: it takes time, and needs no workers

    serialization.register_serialization_state(
        RemoteArray, lambda array: array.value, lambda _, value: value, override=True
    )


def prefetch(tree: Any) -> Any:
    """Start to fetch all arrays of a pytree, in one round trip to each worker; return `tree`.

    Their values are there, or on their way, when `np.asarray` or `jax.device_get` asks for them. It
    also takes arrays of this process.

    Example:
        >>> metrics = launcher.prefetch({"loss": jnp.ones(())})
        >>> jax.device_get(metrics["loss"]).item()
        1.0
    """
    owners: dict[int, Owner] = {}
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, (RemoteArray, jax.Array)):
            leaf.copy_to_host_async()
        if isinstance(leaf, RemoteArray):
            owners[id(leaf.owner)] = leaf.owner
    for owner in owners.values():
        owner.flush()
    return tree


def portable(leaf: Any, dtype: Any = None) -> Any:
    """Return a leaf in the form that travels by value: a NumPy array, or a typed random key."""
    if isinstance(leaf, jax.Array) and is_key(leaf.dtype):
        return leaf
    return np.asarray(leaf, dtype)


def pickled(value: Any, fun: Callable[..., Any]) -> bytes:
    """Return `value`, which contains the user's function `fun`, as bytes.

    Raises:
        TypeError: the function refers to something that cannot be pickled.
    """
    try:
        return pickling.dumps_script(value)
    except Exception as error:
        name = getattr(fun, "__name__", repr(fun))
        raise TypeError(
            f"{name} cannot be sent to the workers, since something that it refers to cannot be "
            f"pickled: {error}"
        ) from error


def _assembled(shape: tuple[int, ...], dtype: Any, shards: Iterable[Shards]) -> np.ndarray:
    whole = np.empty(shape, dtype)
    for box, data in itertools.chain.from_iterable(shards):
        whole[tuple(slice(*span) for span in box)] = data
    whole.flags.writeable = False
    return whole
