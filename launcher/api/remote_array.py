"""Arrays that stay on the workers, as the driver sees them: handles, fetched when asked for; and
what travels to the workers by value.

`launcher.api.ray_backend` makes the handles; the public front offers `RemoteArray` and `prefetch`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from launcher.api.step_worker import Pieces


class ConsumedError(RuntimeError):
    """An array was used after a call had consumed it."""


class Owner(Protocol):
    """What a handle needs of whoever keeps the array."""

    def fetch(self, arrays: Sequence[RemoteArray]) -> None:
        """Begin to fetch arrays, in one message to each worker."""

    def want(self, array: RemoteArray) -> None:
        """Fetch this array with the next message that has to be sent."""

    def flush(self) -> None:
        """Send for all that is wanted."""

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait until arrays are computed."""

    def placement(self, number: int) -> str:
        """Where an array lies, in words."""

    def drop(self, number: int) -> None:
        """Forget an array with the next message."""


class Fetch:
    """Arrays on their way from the workers, of which each sends the parts that it has.

    Args:
        answers: waits for the workers' answers; each holds the `Pieces` of every array.
    """

    def __init__(self, answers: Callable[[], list[Any]], arrays: Sequence[RemoteArray]) -> None:
        self._answers: Callable[[], list[Any]] | None = answers
        self._avals = [_data_aval(array) for array in arrays]
        self._whole: list[np.ndarray] = []

    def result(self) -> list[np.ndarray]:
        """The arrays, in their order, once they are here; read-only. Of keys, their data. May be
        asked for again."""
        if self._answers is not None:
            parts = zip(*self._answers(), strict=True)
            found = zip(self._avals, parts, strict=True)
            self._whole = [_assembled(*aval, pieces) for aval, pieces in found]
            self._answers = None
        return self._whole


class RemoteArray:
    """An array that lies on the workers; this is its handle, of a few bytes.

    It can be given back to a parallelized function, which costs nothing, or fetched:
    `np.asarray`, `float` and `jax.device_get` wait for its value and bring it here. To fetch many
    in one round trip, `launcher.prefetch` them first, or `jax.device_get` them together. The
    workers free the array when its handle is gone, with the next message that they get.

    Raises `ConsumedError` where it was donated to a call, and `WorkerError` where a worker failed.
    """

    __slots__ = ("__weakref__", "_dtype", "_fetched", "_number", "_owner", "_shape")

    def __init__(self, owner: Owner, number: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._owner, self._number = owner, number
        self._shape, self._dtype = shape, dtype
        self._fetched: tuple[Fetch, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        return self.size * self._dtype.itemsize

    @property
    def sharding(self) -> str:
        """Where it lies, in words, such as "whole, on device 2". Asks a worker."""
        return self._owner.placement(self.number)

    @property
    def number(self) -> int:
        """What the workers know it by. Raises ConsumedError."""
        if self._number < 0:
            raise ConsumedError(
                f"this array ({self._dtype}{list(self._shape)}) was donated to an earlier call, "
                "which has consumed it; use that call's result in its place, or leave its argument "
                "out of donate_argnums"
            )
        return self._number

    def is_deleted(self) -> bool:
        """Whether a call has consumed it, or `delete` was called."""
        return self._number < 0

    def delete(self) -> None:
        """Free it on the workers now; it cannot be used again."""
        self._owner.drop(self.number)
        self._number = -1

    def consume(self) -> None:
        """Mark it as donated: the workers free it themselves."""
        self._number, self._fetched = -1, None

    def copy_to_host_async(self) -> None:
        """Fetch it with the next message to the workers; many are fetched together."""
        if self.number >= 0 and self._fetched is None:
            self._owner.want(self)

    def block_until_ready(self) -> RemoteArray:
        """Wait until it is computed."""
        self._owner.wait([self.number])
        return self

    def fetched_by(self, fetch: Fetch, place: int) -> None:
        """Note which fetch brings it."""
        self._fetched = fetch, place

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Its value, read-only. Of typed random keys (which NumPy does not know, and
        `jax.device_get` does) a `jax.Array` of this process."""
        if self.number >= 0 and self._fetched is None:
            self._owner.flush()
            if self._fetched is None:
                self._owner.fetch([self])
        assert self._fetched is not None
        fetch, place = self._fetched
        value = fetch.result()[place]
        if is_key(self._dtype):
            return jax.random.wrap_key_data(jnp.asarray(value), impl=_key_impl(self._dtype))
        return np.array(value, dtype, copy=copy)

    def item(self) -> Any:
        """The value of an array of one element, as a Python number."""
        return np.asarray(self).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __reduce__(self) -> Any:
        raise TypeError("an array on the workers cannot be pickled; fetch it: np.asarray(array)")

    def __repr__(self) -> str:
        state = ", consumed" if self.is_deleted() else ""
        return f"RemoteArray({self._dtype}{list(self._shape)}{state})"

    def __del__(self) -> None:
        if getattr(self, "_number", -1) >= 0:
            self._owner.drop(self._number)


def prefetch(tree: Any) -> Any:
    """Begin to fetch all arrays of a pytree, in one round trip to each worker, and return `tree`.

    Their values are there, or on their way, when `np.asarray` or `jax.device_get` asks for them.
    Also takes arrays of this process.
    """
    owners: dict[int, Owner] = {}
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, (RemoteArray, jax.Array)):
            leaf.copy_to_host_async()
        if isinstance(leaf, RemoteArray):
            owners[id(leaf._owner)] = leaf._owner
    for owner in owners.values():
        owner.flush()
    return tree


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed random keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _key_impl(dtype: Any) -> Any:
    found: list[Any] = []
    keys = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), keys)
    return found[0]


def portable(leaf: Any, dtype: Any = None) -> Any:
    """A leaf as it travels by value: a NumPy array, or a typed random key as it is."""
    if isinstance(leaf, jax.Array) and is_key(leaf.dtype):
        return leaf
    return np.asarray(leaf, dtype)


def pickled(value: Any, fun: Callable[..., Any]) -> bytes:
    """`value`, which holds the user's function `fun`, as bytes.

    Raises:
        TypeError: the function holds something that cannot travel.
    """
    import ray

    try:
        return bytes(ray.cloudpickle.dumps(value))
    except Exception as error:
        name = getattr(fun, "__name__", repr(fun))
        raise TypeError(
            f"{name} cannot be sent to the workers, since something that it refers to cannot be "
            f"pickled: {error}"
        ) from error


def _data_aval(array: RemoteArray) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of an array as it travels."""
    if is_key(array.dtype):
        keys = jax.ShapeDtypeStruct(array.shape, array.dtype)
        data = jax.eval_shape(jax.random.key_data, keys)
        return data.shape, data.dtype
    return array.shape, array.dtype


def _assembled(shape: tuple[int, ...], dtype: Any, parts: Iterable[Pieces]) -> np.ndarray:
    whole = np.empty(shape, dtype)
    for box, data in itertools.chain.from_iterable(parts):
        whole[tuple(slice(*span) for span in box)] = data
    whole.flags.writeable = False
    return whole
