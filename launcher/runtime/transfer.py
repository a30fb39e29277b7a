"""One transfer of the instruction list, bound to this process. Used by `runtime.executable`.

Inside one process a transfer is `jax.device_put`. Between processes it is a list of pieces
(`plan.reshard`): this process offers those it has and assembles those it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from launcher.plan.reshard import Box, Piece, route
from launcher.runtime.transport import Transport


def is_here(sharding: NamedSharding) -> bool:
    """Whether this process owns a device of a sharding's mesh."""
    return bool(sharding.addressable_devices)


def place(value: Any, sharding: NamedSharding) -> jax.Array:
    """A value that every process has, as one array; each process fills its own devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = place(np.asarray(jax.random.key_data(value)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def absent(aval: Any, sharding: NamedSharding) -> jax.Array:
    """An array of which this process holds no part."""
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)


class LocalTransfer:
    """All devices of both sides are this process's."""

    def __init__(self, shardings: Sequence[NamedSharding]) -> None:
        self._shardings = list(shardings)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return jax.device_put(list(arrays), self._shardings)


class RemoteTransfer:
    """A transfer in which several processes take part; called with a call's first key and the
    arrays, of which those that live elsewhere may be None.

    Args:
        offset: of this transfer's keys among those of one call.
    """

    def __init__(
        self,
        avals: Sequence[Any],
        src: Sequence[NamedSharding],
        dst: Sequence[NamedSharding],
        transport: Transport,
        offset: int,
    ) -> None:
        legs = []
        for aval, a, b in zip(avals, src, dst, strict=True):
            legs.append(_Leg(aval, a, b, transport, offset))
            offset += legs[-1].num_keys
        self._legs = legs
        self.num_keys = sum(leg.num_keys for leg in legs)

    def __call__(self, key: int, arrays: list[Any]) -> list[jax.Array]:
        return [leg(key, array) for leg, array in zip(self._legs, arrays, strict=True)]


class _Leg:
    """One array's transfer, as far as this process takes part in it."""

    def __init__(
        self,
        aval: Any,
        src: NamedSharding,
        dst: NamedSharding,
        transport: Transport,
        offset: int,
    ) -> None:
        self._aval, self._dst, self._transport = aval, dst, transport
        self._me = jax.process_index()
        pieces = _pieces(aval.shape, src, dst)
        self.num_keys = len(pieces)
        numbered = list(enumerate(pieces, offset))
        self._out = [(n, p) for n, p in numbered if p.src_process == self._me]
        self._in = [(n, p) for n, p in numbered if p.dst_process == self._me]
        self._one_source = len(src.device_set) == 1
        self._local = {d.id: d for d in jax.local_devices()}
        self._tiles = {d: box for d, box in boxes(aval.shape, dst).items() if d in self._local}
        # The common case: the whole array goes from one device to one device.
        self._simple = len(pieces) == 1 and self._one_source and len(dst.device_set) == 1
        self._absent = None if self._tiles else absent(aval, dst)

    def __call__(self, key: int, array: jax.Array | None) -> jax.Array:
        if self._simple:
            return self._move_whole(key, array)
        parts: dict[int, jax.Array] = {}
        shards = self._shards(array) if array is not None and self._out else {}
        for n, piece in self._out:
            parts[n] = _cut(shards[piece.src_device], piece.src_box, piece.box)
            if piece.dst_process != self._me:
                self._transport.send(key + n, [parts[n]])
        if self._absent is not None:
            return self._absent
        arrived: dict[Box, list[tuple[Piece, jax.Array]]] = {}
        for n, piece in self._in:
            if piece.src_process != self._me:
                parts[n] = self._receive(key + n, piece)
            arrived.setdefault(piece.dst_box, []).append((piece, parts[n]))
        whole = {box: _join(found, self._first(box)) for box, found in arrived.items()}
        data = [jax.device_put(whole[box], self._local[d]) for d, box in self._tiles.items()]
        return jax.make_array_from_single_device_arrays(
            self._aval.shape, self._dst, data, dtype=self._aval.dtype
        )

    def _move_whole(self, key: int, array: jax.Array | None) -> jax.Array:
        if self._out and self._in:
            return jax.device_put(array, self._dst)
        if self._out:
            self._transport.send(key + self._out[0][0], [array])  # type: ignore[list-item]
        if self._absent is not None:
            return self._absent
        (n, piece), like = self._in[0], self._aval
        like = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=self._dst)
        return self._transport.recv(key + n, piece.src_process, [like])[0]

    def _shards(self, array: jax.Array) -> dict[int, jax.Array]:
        return {shard.device.id: shard.data for shard in array.addressable_shards}

    def _receive(self, key: int, piece: Piece) -> jax.Array:
        where = SingleDeviceSharding(self._first(piece.dst_box))
        shape = tuple(stop - start for start, stop in piece.box)
        like = jax.ShapeDtypeStruct(shape, self._aval.dtype, sharding=where)
        return self._transport.recv(key, piece.src_process, [like])[0]

    def _first(self, box: Box) -> jax.Device:
        """The device of this process on which a tile arrives."""
        return self._local[next(d for d, held in self._tiles.items() if held == box)]


def move(
    arrays: Sequence[Any],
    avals: Sequence[Any],
    src: Sequence[NamedSharding],
    dst: Sequence[NamedSharding],
    transport: Transport,
) -> list[jax.Array]:
    """Bring arrays from one placement to another, once. Every process calls it with the same
    `avals` and placements, and with the arrays it holds (others may be anything)."""
    transfer = RemoteTransfer(avals, src, dst, transport, 0)
    return transfer(transport.open() << 48, list(arrays))


@functools.lru_cache(maxsize=4096)
def boxes(shape: tuple[int, ...], sharding: NamedSharding) -> dict[int, Box]:
    """The tile of every device of a sharding."""
    tiles: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    return {
        device.id: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in tiles.items()
    }


def _pieces(shape: tuple[int, ...], src: NamedSharding, dst: NamedSharding) -> tuple[Piece, ...]:
    devices: list[Any] = [*src.device_set, *dst.device_set]
    process_of = {d.id: d.process_index for d in devices}
    return route(boxes(shape, src), boxes(shape, dst), process_of)


def _cut(shard: jax.Array, src_box: Box, box: Box) -> jax.Array:
    if box == src_box:
        return shard
    starts = [start for start, _ in src_box]
    inner = tuple(slice(a - start, b - start) for (a, b), start in zip(box, starts, strict=True))
    return shard[inner]


def _join(parts: list[tuple[Piece, jax.Array]], device: jax.Device) -> jax.Array:
    """A tile from its parts, which are cut along any axes."""
    (piece, first), *rest = parts
    if not rest:
        return first
    origin = [start for start, _ in piece.dst_box]
    tile = jnp.zeros([b - a for a, b in piece.dst_box], first.dtype, device=device)
    for part, value in parts:
        at = [start - o for (start, _), o in zip(part.box, origin, strict=True)]
        tile = jax.lax.dynamic_update_slice(tile, jax.device_put(value, device), at)
    return tile
