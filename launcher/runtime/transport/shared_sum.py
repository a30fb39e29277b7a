"""Sum gradients over the processes of one machine, in memory that they share. CPU devices only.

Every process writes its part; then each adds one piece of all parts, in the order of the processes,
in place of the first part; then all read that. It costs a few passes over the bytes. XLA's
collectives take them through sockets, and on the one core of a process their threads hold up the
computation: 28 ms for 17 MB, in which this takes 3.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from launcher.base import SpanRecorder
from launcher.runtime.emit.instructions import Exchange
from launcher.runtime.programs.device_meshes import DeviceMeshes
from launcher.runtime.transport.neighbours import Circle, Neighbours
from launcher.runtime.transport.transfer import boxes

_ALIGNED = 64  # bytes of a cache line


class _Own(NamedTuple):
    """What a device has of a replica's gradient; whether it is the first here of that place."""

    device: jax.Device
    place: tuple[slice, ...]
    is_first: bool


class SharedSum:
    """The sum of a mesh's gradients; `open` it before the first call.

    Args:
        x: the instruction. Its inputs are `[replicas, …]`, each replica whole in one process.
        placement: where its slots live.
        neighbours: the sockets to the processes of this machine.
        spans: takes when it ran, while it records.
    """

    def __init__(
        self, x: Exchange, placement: DeviceMeshes, neighbours: Neighbours, spans: SpanRecorder
    ) -> None:
        me, every = jax.process_index(), jax.devices()
        self._circle = Circle(me, placement.owners[x.mesh], neighbours)
        self._x, self._spans = x, spans
        self._lanes = [
            f"device {every.index(device)} gradient sums"
            for device in placement.meshes[x.mesh].local_devices
        ]
        self._own = [_own(placement.slots[s].aval.shape, placement.sharding(s)) for s in x.inputs]
        self._avals = [placement.slots[slot].aval for slot in x.outputs]
        self._shardings = [placement.sharding(slot) for slot in x.outputs]
        self._parts: list[list[np.ndarray]] = []  # of each spec and process, flat
        self._mine: list[np.ndarray] = []  # of each array, in the part of this process
        self._sums: list[np.ndarray] = []  # and in the first part

    def open(self) -> None:
        """Get the memory; all processes of the mesh call it alike.

        Raises:
            OSError: there is none, or another process has ended.
        """
        circle, at = self._circle, 0
        dtypes = [jnp.dtype(spec.dtype) for spec in self._x.specs]
        pairs = list(zip(self._x.specs, dtypes, strict=True))
        sizes = [-(-s.shape[0] * t.itemsize // _ALIGNED) * _ALIGNED for s, t in pairs]
        memory = circle.memory(circle.count * sum(sizes))
        for (spec, dtype), size in zip(pairs, sizes, strict=True):
            starts = [at + rank * size for rank in range(circle.count)]
            parts = [np.frombuffer(memory, dtype, spec.shape[0], start) for start in starts]
            self._parts.append(parts)
            at += circle.count * size
        self._mine, self._sums = self._arrays(circle.rank), self._arrays(0)
        self._read()  # which compiles what it needs

    def _arrays(self, rank: int) -> list[np.ndarray]:
        """Return the arrays of a process's part."""
        avals, found = iter(self._avals), []
        for parts, count in zip(self._parts, self._x.counts, strict=True):
            of = [next(avals) for _ in range(count)]
            pieces = np.split(parts[rank], np.cumsum([aval.size for aval in of])[:-1])
            found += [x.reshape(aval.shape) for x, aval in zip(pieces, of, strict=True)]
        return found

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Sum what the replicas have, and wait for it.

        Raises:
            OSError: another process has ended.
        """
        with jax.transfer_guard("allow"):
            jax.block_until_ready(arrays)
            began = time.time_ns()
            self._write(arrays)
            self._circle.meet()  # all parts are there
            self._add()
            self._circle.meet()  # the sums are
            made = self._read()
            self._circle.meet()  # nobody reads any more what the next call writes over
            for lane in self._lanes:
                self._spans.add(
                    lane, "sum", began, time.time_ns(), "gradient sum", mesh=self._x.mesh
                )
            return made

    def _write(self, arrays: Sequence[jax.Array]) -> None:
        """Write the part of this process, the sums of its own replicas."""
        for array, own, into in zip(arrays, self._own, self._mine, strict=True):
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            for device, place, is_first in own:
                value = np.asarray(shards[device])[0].astype(into.dtype, copy=False)
                into[place] = value if is_first else into[place] + value

    def _add(self) -> None:
        """Add this process's piece of all parts."""
        rank, count = self._circle.rank, self._circle.count
        for first, *others in self._parts:
            piece = slice(rank * first.size // count, (rank + 1) * first.size // count)
            for other in others:
                first[piece] += other[piece]

    def _read(self) -> list[jax.Array]:
        """Return the sums on the devices, when they are there."""
        pairs = list(zip(self._avals, self._shardings, strict=True))
        indices = [s.addressable_devices_indices_map(aval.shape) for aval, s in pairs]
        on: dict[jax.Device, list[jax.Array]] = {}
        for device in indices[0]:
            views = [
                x[index[device]].astype(aval.dtype, copy=False)
                for x, index, aval in zip(self._sums, indices, self._avals, strict=True)
            ]
            on[device] = _copies(jax.device_put(views, device))  # an array on a CPU may be the view
        found: list[jax.Array] = [
            jax.make_array_from_single_device_arrays(
                aval.shape, sharding, [of[k] for of in on.values()], dtype=aval.dtype
            )
            for k, (aval, sharding) in enumerate(pairs)
        ]
        jax.block_until_ready(found)
        return found


@jax.jit
def _copies(arrays: list[jax.Array]) -> list[jax.Array]:
    return [array.copy() for array in arrays]


def _own(shape: tuple[int, ...], sharding: NamedSharding) -> list[_Own]:
    """Return what this process adds of an array `[replicas, …]`: each tile of a replica once."""
    tiles, found = boxes(shape, sharding), []
    told: set[Any] = set()
    here: list[jax.Device] = [*sharding.addressable_devices]
    for device in sorted(here, key=lambda device: device.id):
        tile = tiles[device.id]
        if tile not in told:
            inner = tile[1:]
            found.append(_Own(device, tuple(slice(*edge) for edge in inner), inner not in told))
            told |= {tile, inner}
    return found
