"""One transfer of the instruction list, bound to this process. Used by `runtime.executable`.

Inside one process a transfer is a copy from devices to devices. Between processes it is a list of
pieces (`plan.reshard`): this process offers those it has and assembles those it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from launcher.plan.reshard import Box, Piece, route
from launcher.runtime.compat import batched_copy
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


def local_transfer(
    avals: Sequence[Any], src: Sequence[NamedSharding], dst: Sequence[NamedSharding]
) -> Callable[..., list[jax.Array]]:
    """A transfer between devices that are all this process's: a function of the arrays."""
    shardings = list(dst)
    alike = all(_cut_alike(*parts) for parts in zip(avals, src, dst, strict=True))

    def put(*arrays: jax.Array) -> list[jax.Array]:
        return jax.device_put(list(arrays), shardings)

    return (batched_copy(shardings) if alike else None) or put


def _cut_alike(aval: Any, src: NamedSharding, dst: NamedSharding) -> bool:
    """Whether each device of the one side holds what its counterpart of the other wants."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return False  # no array of the devices' own, but a wrapper around one
    tiles = boxes(aval.shape, src), boxes(aval.shape, dst)
    return list(tiles[0].values()) == list(tiles[1].values())


class RemoteTransfer:
    """A transfer in which several processes take part; called with a call's first key and the
    arrays, of which those that live elsewhere may be None.

    All pieces that go from one process to another travel as one message under one key.

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
        self._legs = [_Leg(*parts) for parts in zip(avals, src, dst, strict=True)]
        self._transport = transport
        me = jax.process_index()
        links: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (leg, piece of it)
        for k, leg in enumerate(self._legs):
            for n, piece in enumerate(leg.pieces):
                link = piece.src_process, piece.dst_process
                if link[0] != link[1]:
                    links.setdefault(link, []).append((k, n))
        self.num_keys = len(links)
        numbered = [(key, *link, found) for key, (link, found) in enumerate(links.items(), offset)]
        self._out = [(key, found) for key, a, _, found in numbered if a == me]
        self._in = [
            (key, a, found, [self._legs[k].like(n) for k, n in found])
            for key, a, b, found in numbered
            if b == me
        ]

    def __call__(self, key: int, arrays: list[Any]) -> list[jax.Array]:
        parts = [leg.cut(x) for leg, x in zip(self._legs, arrays, strict=True)]
        for at, found in self._out:
            self._transport.send(key + at, [parts[k][n] for k, n in found])
        for at, process, found, like in self._in:
            arrived = self._transport.recv(key + at, process, like)
            for (k, n), part in zip(found, arrived, strict=True):
                parts[k][n] = part
        return [leg.joined(found) for leg, found in zip(self._legs, parts, strict=True)]


class _Leg:
    """One array's transfer, as far as this process takes part in it. `pieces`: of all processes."""

    def __init__(self, aval: Any, src: NamedSharding, dst: NamedSharding) -> None:
        self._aval, self._dst = aval, dst
        self.pieces = _pieces(aval.shape, src, dst)
        me = jax.process_index()
        self._out = [(n, p) for n, p in enumerate(self.pieces) if p.src_process == me]
        self._in = [(n, p) for n, p in enumerate(self.pieces) if p.dst_process == me]
        self._local = {d.id: d for d in jax.local_devices()}
        self._tiles = {d: box for d, box in boxes(aval.shape, dst).items() if d in self._local}
        # The common case: the whole array goes from one device to one device.
        self._simple = len(self.pieces) == len(src.device_set) == len(dst.device_set) == 1
        self._absent = None if self._tiles else absent(aval, dst)

    def like(self, n: int) -> jax.ShapeDtypeStruct:
        """What arrives here of a piece."""
        piece = self.pieces[n]
        where = self._dst if self._simple else SingleDeviceSharding(self._first(piece.dst_box))
        shape = tuple(stop - start for start, stop in piece.box)
        return jax.ShapeDtypeStruct(shape, self._aval.dtype, sharding=where)

    def cut(self, array: jax.Array | None) -> dict[int, jax.Array]:
        """The pieces that this process has, by their place in `pieces`."""
        if array is None or not self._out:
            return {}
        if self._simple:
            return {0: array}
        shards = {shard.device.id: shard.data for shard in array.addressable_shards}
        return {n: _cut(shards[p.src_device], p.src_box, p.box) for n, p in self._out}

    def joined(self, parts: dict[int, jax.Array]) -> jax.Array:
        """The array, from the pieces that this process needs of it."""
        if self._absent is not None:
            return self._absent
        if self._simple:
            return jax.device_put(parts[0], self._dst) if self._out else parts[0]
        arrived: dict[Box, list[tuple[Piece, jax.Array]]] = {}
        for n, piece in self._in:
            arrived.setdefault(piece.dst_box, []).append((piece, parts[n]))
        whole = {box: _join(found, self._first(box)) for box, found in arrived.items()}
        data = [jax.device_put(whole[box], self._local[d]) for d, box in self._tiles.items()]
        return jax.make_array_from_single_device_arrays(
            self._aval.shape, self._dst, data, dtype=self._aval.dtype
        )

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
    return transfer(transport.reserve(transfer.num_keys), list(arrays))


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
