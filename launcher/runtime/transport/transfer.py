"""Bind one transfer of the instruction list to this process.

Inside one process a transfer is a copy from devices to devices. Between processes it is a list of
pieces (`reshard`): this process offers those that it has and assembles those that it needs. The
programs that cut and join pieces are compiled before the first step: a process that compiles in the
middle of a step holds up those that exchange arrays with it by collectives, on GPUs perhaps for
ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from launcher.base.jax_compat import batched_copy
from launcher.partition import Box, Piece, route
from launcher.runtime.transport.transport import Parcel, Transport, fail_together

Cutter = Callable[[jax.Array], jax.Array]  # of a piece from a tile
_MOST_PROGRAMS = 4096  # that are kept: microbatches and layers need the same few


def is_here(sharding: NamedSharding) -> bool:
    """Return whether this process owns a device of a sharding's mesh."""
    return bool(sharding.addressable_devices)


def place_array(value: Any, sharding: NamedSharding) -> jax.Array:
    """Return a value that every process has as one array; each process fills its own devices."""
    if sharding.is_fully_addressable:
        moved: jax.Array = jax.device_put(value, sharding)
        return moved
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = place_array(np.asarray(jax.random.key_data(value)), sharding)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        return keys
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def absent(aval: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array of which this process holds no part."""
    words, impl = plain_aval(aval)
    if impl is not None:
        keys: jax.Array = jax.random.wrap_key_data(absent(words, sharding), impl=impl)
        return keys
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)


def wait_for(arrays: Sequence[jax.Array]) -> None:
    """Wait until arrays are computed, but for those that a later step uses up meanwhile.

    An array of several devices is deleted shard by shard, and JAX 0.11 answers for the first.
    """
    left = [array for array in arrays if not array.is_deleted()]
    try:
        jax.block_until_ready(left)
    except RuntimeError:
        there = [array for array in left if not _partly_deleted(array)]
        if len(there) == len(left):
            raise
        wait_for(there)


def _partly_deleted(array: jax.Array) -> bool:
    try:
        return any(shard.data.is_deleted() for shard in array.addressable_shards)
    except RuntimeError:  # it was whole a moment ago
        return True


def plain_aval(aval: Any) -> tuple[Any, Any]:
    """Return what an array is on the devices, and the implementation of its random keys.

    An array of random keys is a wrapper around their data: the data is returned, and the
    implementation to wrap it with. Any other array is returned itself, with None.
    """
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return aval, None
    impls = []

    def data(keys: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    words = jax.eval_shape(data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return words, impls[0]


def local_transfer(
    avals: Sequence[Any], src: Sequence[NamedSharding], dst: Sequence[NamedSharding]
) -> Callable[..., list[jax.Array]]:
    """Return a function that transfers arrays between devices of this process."""
    shardings = list(dst)
    alike = all(_cut_alike(*parts) for parts in zip(avals, src, dst, strict=True))

    def put(*arrays: jax.Array) -> list[jax.Array]:
        moved: list[jax.Array] = jax.device_put(list(arrays), shardings)
        return moved

    return (batched_copy(shardings) if alike else None) or put


def _cut_alike(aval: Any, src: NamedSharding, dst: NamedSharding) -> bool:
    """Return whether each source device holds what its counterpart at the destination needs."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return False  # no array of the devices' own, but a wrapper around one
    tiles = boxes(aval.shape, src), boxes(aval.shape, dst)
    return list(tiles[0].values()) == list(tiles[1].values())


class RemoteTransfer:
    """A transfer in which several processes take part.

    It is called with the key of the step's call and with the arrays, of which those that live in
    other processes may be None. All that goes from one process to another goes together, by one
    exchange of the transport.

    Args:
        avals: the shape and dtype of each array.
        src: the sharding of each array at the source.
        dst: the sharding of each array at the destination.
        transport: what moves arrays between processes.
        turn: the position of this transfer's key among the keys of one call.
        outlives: for each array, whether it is there after the step.

    Attributes:
        exchange: what goes between processes; it must be opened before the first call.
    """

    def __init__(
        self,
        avals: Sequence[Any],
        src: Sequence[NamedSharding],
        dst: Sequence[NamedSharding],
        transport: Transport,
        turn: int,
        outlives: Sequence[bool],
    ) -> None:
        self._legs = [_Leg(*parts) for parts in zip(avals, src, dst, outlives, strict=True)]
        parcels = [(k, n, x) for k, leg in enumerate(self._legs) for n, x in leg.parcels()]
        self.exchange = transport.bind([parcel for _, _, parcel in parcels])
        self._turn = turn
        me = jax.process_index()
        numbered = list(enumerate(parcels))
        self._out = [(i, k, n) for i, (k, n, x) in numbered if x.src.process_index == me]
        self._where = [(k, n) for k, n, _ in parcels]

    def __call__(self, key: int, arrays: list[Any]) -> list[jax.Array]:
        """Transfer the arrays; return them at the destination.

        Args:
            key: the key of the step's call.
            arrays: the arrays at the source; those that live in other processes may be None.
        """
        parts = [leg.cut(x) for leg, x in zip(self._legs, arrays, strict=True)]
        out = {i: parts[k][n] for i, k, n in self._out}
        for i, part in self.exchange(key + self._turn, out).items():
            k, n = self._where[i]
            parts[k][n] = part
        return [leg.joined(found) for leg, found in zip(self._legs, parts, strict=True)]


class _Leg:
    """One array's transfer, as far as this process takes part in it.

    Random keys travel as their data, which is sharded as they are: its last axis is not sharded.
    """

    def __init__(self, aval: Any, src: NamedSharding, dst: NamedSharding, outlives: bool) -> None:
        aval, self._impl = plain_aval(aval)
        self._outlives = outlives
        self._aval, self._dst = aval, dst
        devices: list[jax.Device] = [*src.device_set, *dst.device_set]
        self._device = {d.id: d for d in devices}
        self._process = {d.id: d.process_index for d in devices}
        self._tiles = boxes(aval.shape, dst)
        self._pieces = route(boxes(aval.shape, src), self._tiles, self._process)
        me = jax.process_index()
        self._out = [(n, p) for n, p in enumerate(self._pieces) if p.src_process == me]
        # The common case: the whole array goes from one device to one device.
        self._simple = len(self._pieces) == len(src.device_set) == len(dst.device_set) == 1
        self._absent = None if is_here(dst) else absent(aval, dst)
        cuts = [] if self._simple else self._out
        self._cuts = {n: cutter(p, aval.dtype, self._device[p.src_device]) for n, p in cuts}
        mine = [(n, p) for n, p in enumerate(self._pieces) if p.dst_process == me]
        self._in: dict[Box, tuple[list[int], Any]] = {}
        for box in dict.fromkeys(p.dst_box for _, p in mine):
            found = [(n, p) for n, p in mine if p.dst_box == box]
            joined = joiner([p for _, p in found], aval.dtype, self._first(me, box))
            self._in[box] = [n for n, _ in found], joined
        own = [(d, box) for d, box in self._tiles.items() if self._process[d] == me]
        self._here = [(self._device[d], box) for d, box in own]

    def parcels(self) -> list[tuple[int, Parcel]]:
        """Return what goes from one process to another, with its position among the pieces."""
        parcels = []
        for n, p in enumerate(self._pieces):
            if p.src_process != p.dst_process:
                whole = p.box == p.src_box  # others are cut, which copies
                src, dst = self._device[p.src_device], self._first(p.dst_process, p.dst_box)
                parcel = Parcel(src, dst, p.shape, self._aval.dtype, self._outlives and whole)
                parcels.append((n, parcel))
        return parcels

    def cut(self, array: jax.Array | None) -> dict[int, jax.Array]:
        """Return the pieces that this process has, by their position among all pieces."""
        if array is None or not self._out:
            return {}
        if self._impl is not None:
            array = jax.random.key_data(array)
        if self._simple:
            return {0: array}
        shards = {shard.device.id: shard.data for shard in array.addressable_shards}
        return {n: self._cuts[n](shards[p.src_device]) for n, p in self._out}

    def joined(self, parts: dict[int, jax.Array]) -> jax.Array:
        """Return the array, made of the pieces of it that this process needs."""
        data = self._joined(parts)
        return data if self._impl is None else jax.random.wrap_key_data(data, impl=self._impl)

    def _joined(self, parts: dict[int, jax.Array]) -> jax.Array:
        if self._absent is not None:
            return self._absent
        if self._simple and self._out:
            whole_array: jax.Array = jax.device_put(parts[0], self._dst)
            return whole_array
        whole = {
            box: joined([parts[n] for n in found]) for box, (found, joined) in self._in.items()
        }
        data = list(whole.values())
        if not self._simple:
            data = [jax.device_put(whole[box], device) for device, box in self._here]
        return jax.make_array_from_single_device_arrays(
            self._aval.shape, self._dst, data, dtype=self._aval.dtype
        )

    def _first(self, process: int, box: Box) -> jax.Device:
        """Return the device of a process on which a tile arrives."""
        found = (d for d, held in self._tiles.items() if held == box)
        return self._device[next(d for d in found if self._process[d] == process)]


def move(
    arrays: Sequence[Any],
    avals: Sequence[Any],
    src: Sequence[NamedSharding],
    dst: Sequence[NamedSharding],
    transport: Transport,
) -> list[jax.Array]:
    """Move arrays from one placement to another, once.

    Every process calls it with the same `avals` and placements. A transfer of a new kind is
    prepared first, and no process starts it before all have prepared it.

    Args:
        arrays: the arrays that this process holds; others may be anything.
        avals: the shape and dtype of each array.
        src: the sharding of each array at the source.
        dst: the sharding of each array at the destination.
        transport: what moves arrays between processes.

    Raises:
        ProcessMismatchError: another process could not prepare the transfer.
    """
    transfer = RemoteTransfer(avals, src, dst, transport, 0, [True] * len(avals))
    if not transfer.exchange.is_open:
        with fail_together(transport):
            exchange = transfer.exchange
            transport.open([exchange], exchange.description, by_all=True)
            transport.barrier("open")
    return transfer(transport.reserve(1), list(arrays))


@functools.lru_cache(maxsize=4096)
def boxes(shape: tuple[int, ...], sharding: NamedSharding) -> dict[int, Box]:
    """Return the tile of every device of a sharding, by the device's id."""
    tiles: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    return {
        device.id: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in tiles.items()
    }


def cutter(piece: Piece, dtype: Any, device: jax.Device) -> Cutter:
    """Return a function that cuts a piece from its source tile, which lies on this device."""
    if piece.box == piece.src_box:
        return lambda tile: tile
    return _cut(_shape(piece.src_box), dtype, _inside(piece.box, piece.src_box), device)


def joiner(
    pieces: Sequence[Piece], dtype: Any, device: jax.Device
) -> Callable[[list[jax.Array]], jax.Array]:
    """Return a function that joins the pieces of one destination tile on this device.

    A single piece is returned as it is.
    """
    tile = pieces[0].dst_box
    if len(pieces) == 1:
        return lambda parts: parts[0]
    join = _join(_shape(tile), dtype, tuple(_inside(p.box, tile) for p in pieces), device)
    return lambda parts: join([jax.device_put(part, device) for part in parts])


@functools.lru_cache(_MOST_PROGRAMS)
def _cut(shape: tuple[int, ...], dtype: Any, inner: Box, device: jax.Device) -> Cutter:
    where = SingleDeviceSharding(device)
    like = jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    cut = jax.jit(lambda tile: tile[tuple(slice(*edge) for edge in inner)], out_shardings=where)
    return cut.lower(like).compile()


@functools.lru_cache(_MOST_PROGRAMS)
def _join(shape: tuple[int, ...], dtype: Any, inner: tuple[Box, ...], device: jax.Device) -> Any:
    where = SingleDeviceSharding(device)

    def join(parts: list[jax.Array]) -> jax.Array:
        tile = jnp.zeros(shape, dtype)
        for box, part in zip(inner, parts, strict=True):
            tile = jax.lax.dynamic_update_slice(tile, part, [start for start, _ in box])
        return tile

    like = [jax.ShapeDtypeStruct(_shape(box), dtype, sharding=where) for box in inner]
    return jax.jit(join, out_shardings=where).lower(like).compile()


def _inside(box: Box, of: Box) -> Box:
    """Return where a box lies in a larger one."""
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, of, strict=True))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
