"""Sum gradients over the processes of one machine, in memory that they share. CPU devices only.

Every process writes its part; then each adds one piece of all parts, in the order of the processes,
in place of the first part; then all read that. It costs a few passes over the bytes. XLA's
collectives take them through sockets, and on the one core of a process their threads hold up the
computation: 28 ms for 17 MB, in which this takes 3.

The memory has no name that a killed process could leave behind, or another user open: the others
find it below the first one's folder in /proc, and it is gone with the last process that has it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from launcher.base import SpanRecorder
from launcher.partition import accumulator_dtype
from launcher.runtime.emit.instructions import Exchange
from launcher.runtime.programs.device_meshes import DeviceMeshes

_LINE = 64  # bytes of a cache line, which no two processes write to
_POLL = 5e-5  # seconds for which a process that waits leaves its core to others
_PATIENCE = 1000  # polls, after which it looks whether those that it waits for live


class SharedSum:
    """The sum of a mesh's gradients; all processes of the mesh `open` and call it alike.

    Args:
        x: the instruction. Its inputs are `[replicas, …]`, each replica whole in one process.
        placement: where its slots live.
        near: the processes of this machine, each with its number of the operating system.
        spans: takes when it ran, while it records.

    Attributes:
        turn: the turn of the instruction.
        path: where the other processes find the memory; "" in those.
    """

    def __init__(
        self, x: Exchange, placement: DeviceMeshes, near: Mapping[int, int], spans: SpanRecorder
    ) -> None:
        me, members = jax.process_index(), sorted(placement.owners[x.mesh])
        self._rank, self._count = members.index(me), len(members)
        self.turn, self._met = x.turn, 0
        self._about = {"mesh": x.mesh, "program": x.specs[0].name}
        self._others = {i: psutil.Process(near[i]) for i in members if i != me}
        self._devices, self._spans = placement.meshes[x.mesh].local_devices, spans
        self._fence = threading.Lock()
        avals = [placement.slots[slot].aval for slot in x.outputs]
        self._kinds = [
            (a.shape, placement.sharding(s)) for a, s in zip(avals, x.outputs, strict=True)
        ]
        self._indices = [s.addressable_devices_indices_map(shape) for shape, s in self._kinds]
        self._crossing = [jnp.dtype(s.dtype) for s in x.specs]
        types = [(t, a.dtype) for t, a in zip(self._crossing, avals, strict=True)]
        self._copied = jax.jit(
            lambda views: [
                jnp.copy(v).astype(t).astype(to) for v, (t, to) in zip(views, types, strict=True)
            ]
        )
        # The turns of the processes, then the parts that they have of each array.
        self._types = [((self._count, *s.shape), accumulator_dtype(s.dtype)) for s in x.specs]
        sizes = [-(-math.prod(shape) * t.itemsize // _LINE) * _LINE for shape, t in self._types]
        *self._starts, self._size = itertools.accumulate(sizes, initial=self._count * _LINE)
        self.path = ""
        if not self._rank:
            self._file = os.fdopen(os.memfd_create("launcher"), "r+b")
            self._file.truncate(self._size)
            self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def open(self, path: str) -> None:
        """Map the memory, which the first process has at `path`, and compile what reads it."""
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), self._size)
        self._turns = np.ndarray(self._count, np.int64, memory, strides=(_LINE,))
        self._parts = [
            np.ndarray(*kind, memory, start)
            for kind, start in zip(self._types, self._starts, strict=True)
        ]
        self._read()

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Sum what the replicas have, and wait for it.

        Raises:
            ConnectionError: another process has ended.
        """
        with jax.transfer_guard("allow"):
            jax.block_until_ready(arrays)
            began = time.time_ns()
            self._write(arrays)
            self._meet()  # all parts are there
            for parts in self._parts:
                flat = parts.reshape(self._count, -1)
                first, *others = np.array_split(flat, self._count, axis=1)[self._rank]
                for other in others:
                    first += other
            self._meet()  # the sums are
            sums = self._read()
            self._meet()  # nobody reads any more what the next call writes over
        for device in self._devices:
            lane = f"device {jax.devices().index(device)} gradient sums"
            self._spans.add(lane, "sum", began, time.time_ns(), "gradient sum", **self._about)
        return sums

    def _write(self, arrays: Sequence[jax.Array]) -> None:
        """Write this process's part: the sums of its own replicas."""
        for array, parts, dtype in zip(arrays, self._parts, self._crossing, strict=True):
            part, filled = parts[self._rank, ...], []  # a view, also of a number alone
            for shard in array.addressable_shards:
                if shard.replica_id == 0:  # once of what several devices hold of a replica
                    place = shard.index[1:]
                    value = np.asarray(shard.data)[0].astype(dtype, copy=False)
                    part[place] = part[place] + value if place in filled else value
                    filled.append(place)

    def _read(self) -> list[jax.Array]:
        """Return the sums on the devices, when they are there."""
        each = list(zip(self._parts, self._indices, strict=True))
        on = [  # copies: what is put on a CPU may be the memory itself
            self._copied(jax.device_put([parts[0][index[device]] for parts, index in each], device))
            for device in self._devices
        ]
        sums: list[jax.Array] = [
            jax.make_array_from_single_device_arrays(*kind, list(own))
            for kind, own in zip(self._kinds, zip(*on, strict=True), strict=True)
        ]
        jax.block_until_ready(sums)
        return sums

    def _meet(self) -> None:
        """Wait until all processes have come here."""
        self._met += 1
        self._order()
        self._turns[self._rank] = self._met
        for polls in itertools.count(1):
            if (self._turns >= self._met).all():
                break
            for index, process in self._others.items() if polls % _PATIENCE == 0 else ():
                with suppress(psutil.NoSuchProcess):
                    if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                        continue
                raise ConnectionError(
                    f"process {index} of this run ended in the middle of a step; see its log"
                )
            time.sleep(_POLL)
        self._order()

    def _order(self) -> None:
        """Keep reads and writes before it from being put off, and later ones from coming first."""
        for _ in range(2):  # a lock is released, then taken: a full barrier on every processor
            with self._fence:
                pass
