"""Transfer arrays between processes from device to device, by collectives.

An exchange is one compiled program, a `jax.lax.ppermute` for each of its rounds, over the devices
of both sides. Only their processes take part: by NCCL on GPUs, by Gloo on CPUs. An array that
arrives is identified by its turn alone, so all processes follow one order (`emit.instructions`). If
one device has begun a program and another has not, the former waits. So everything is compiled, and
every group of devices has opened its communicator, before the first step.

Every device of an exchange sends and receives an array in every round. For a round in which a
device has nothing to send, it keeps zeros as long as an exchange needs them, one array of each
kind. Where nothing arrives, it receives zeros, which are freed when the round is over. Plans count
neither: they do not know the transport.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.runtime.throttle import Throttle
from launcher.runtime.transport.transport import Parcel, Parts, Shipment, Transport

_AXIS = "device"

Zero = Callable[[jax.Device, "Round"], jax.Array]


class Round(NamedTuple):
    """Arrays of one kind that travel together: no two have the same source or destination device.

    Attributes:
        shape: the shape of each array.
        dtype: the dtype of each array.
        pairs: `(source, destination)`, as positions among the devices of the exchange.
    """

    shape: tuple[int, ...]
    dtype: Any
    pairs: tuple[tuple[int, int], ...]

    def takes(self, other: Round) -> bool:
        """Return whether the arrays of another round can travel in this one."""
        ends = zip(*self.pairs, *other.pairs, strict=True)
        alike = (self.shape, self.dtype) == (other.shape, other.dtype)
        return alike and all(len(set(end)) == len(end) for end in ends)


def rounds_of(
    parcels: Sequence[Parcel], devices: Sequence[jax.Device]
) -> list[tuple[Round, list[int]]]:
    """Return the rounds that parcels between these devices take, each with its parcels' numbers."""
    at = {device: i for i, device in enumerate(devices)}
    rounds: list[tuple[Round, list[int]]] = []
    for n, parcel in enumerate(parcels):
        new = Round(parcel.shape, parcel.dtype, ((at[parcel.src], at[parcel.dst]),))
        for i, (found, numbers) in enumerate(rounds):
            if found.takes(new):
                both = Round(found.shape, found.dtype, found.pairs + new.pairs)
                rounds[i] = both, [*numbers, n]
                break
        else:
            rounds.append((new, [n]))
    return rounds


class PermuteTransport(Transport):
    """A transport by collectives between devices; see the module."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        # All are kept, of which those of microbatches and layers are the same few: what one process
        # forgets, others must not remember as open.
        self._program = functools.cache(_Program)
        self._opened: set[tuple[jax.Device, ...]] = set()
        self._zeros: weakref.WeakValueDictionary[Any, jax.Array] = weakref.WeakValueDictionary()
        self._throttle = Throttle()

    def bind(self, parcels: Sequence[Parcel]) -> Shipment:
        """See `Transport`."""
        ends = {device for parcel in parcels for device in (parcel.src, parcel.dst)}
        devices = tuple(sorted(ends, key=lambda device: device.id))
        rounds = rounds_of(parcels, devices)
        program = self._program(devices, tuple(found for found, _ in rounds))
        return _Permutes(program, [numbers for _, numbers in rounds], self._zero)

    def open(
        self,
        exchanges: Sequence[Shipment],
        order: str,
        together: Mapping[str, int] | None = None,
        by_all: bool = False,
        about: Any = None,
    ) -> list[Any]:
        """Compile the exchanges, then open the communicator of each group of devices.

        They are opened one after another, once all processes have compiled. See `Transport`.
        """
        programs = dict.fromkeys(x.program for x in exchanges if isinstance(x, _Permutes))
        new = [x for x in programs if x.is_here and x.run is None]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(_Program.compiled, new))
        told = self.barrier(order, together, about)
        for program, run in zip(new, compiled, strict=True):
            program.run = self._throttle.wrap(run, program.local)
        if by_all:
            for program in programs:
                program.is_open = True
        groups = {x.devices: x for x in reversed(new)}
        for devices in sorted(groups.keys() - self._opened, key=lambda g: [d.id for d in g]):
            self._opened.add(devices)
            jax.block_until_ready(groups[devices].first(self._zero))
        return told

    def _zero(self, device: jax.Device, of: Round) -> jax.Array:
        """Return zeros of a round's kind, one array that all its users share."""
        key = device, of.shape, of.dtype
        found = self._zeros.get(key)
        if found is None:
            self._zeros[key] = found = jax.device_put(np.zeros(of.shape, of.dtype), device)
        return found


class _Program:
    """The program of exchanges that differ in their values alone.

    Attributes:
        devices: the devices of both sides.
        rounds: its rounds.
        local: the devices that are this process's.
        run: the compiled program, once there is one.
        is_here: whether this process takes part.
        is_open: whether all processes have opened it, of this one and those that take no part.
        ends: for each round, both positions of each pair among `local`; None for a device of
            another process.
    """

    def __init__(self, devices: tuple[jax.Device, ...], rounds: tuple[Round, ...]) -> None:
        me = jax.process_index()
        self.devices, self.rounds = devices, rounds
        self.local = [device for device in devices if device.process_index == me]
        self.is_here = bool(self.local)
        self.is_open = not devices  # nothing to do
        self.run: Any = None
        if self.is_here:
            self._mesh = Mesh(np.array(devices), (_AXIS,))
            self._kinds = [self._kind(x) for x in rounds]
            at = [devices.index(device) for device in self.local]
            here = {whole: own for own, whole in enumerate(at)}
            self.ends = [[(here.get(a), here.get(b)) for a, b in x.pairs] for x in rounds]

    def __call__(self, given: Sequence[Sequence[jax.Array]]) -> Any:
        """Run it with what each of `local` sends in each round; return all rounds' results."""
        kinds = zip(self._kinds, given, strict=True)
        return self.run(
            *(
                jax.make_array_from_single_device_arrays(x.shape, x.sharding, list(data))
                for x, data in kinds
            )
        )

    def first(self, zero: Zero) -> Any:
        """Run it with nothing but zeros."""
        return self([[zero(device, x) for device in self.local] for x in self.rounds])

    def compiled(self) -> Any:
        """Compile it, from shapes alone."""
        specs = tuple(kind.sharding.spec for kind in self._kinds)

        def permuted(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(
                jax.lax.ppermute(array, _AXIS, of.pairs)
                for array, of in zip(arrays, self.rounds, strict=True)
            )

        mapped = jax.shard_map(
            permuted, mesh=self._mesh, in_specs=specs, out_specs=specs, check_vma=False
        )
        return jax.jit(mapped).lower(*self._kinds).compile()

    def _kind(self, of: Round) -> jax.ShapeDtypeStruct:
        """Return the shape of all devices' arrays of a round as one array, along the first axis.

        Scalars have no axis: they are declared as one replicated scalar.
        """
        spec = PartitionSpec(_AXIS) if of.shape else PartitionSpec()
        first = [len(self.devices) * of.shape[0]] if of.shape else []
        sharding = NamedSharding(self._mesh, spec)
        return jax.ShapeDtypeStruct((*first, *of.shape[1:]), of.dtype, sharding=sharding)


class _Permutes:
    """An exchange that is carried out by a program.

    Args:
        program: the program.
        numbers: the numbers of the parcels in each of its rounds.
        zero: makes what idle devices send.
    """

    def __init__(self, program: _Program, numbers: list[list[int]], zero: Zero) -> None:
        self.program = program
        self._numbers = numbers
        rounds = [(x.shape, str(x.dtype), x.pairs) for x in program.rounds]
        self.description = repr(([device.id for device in program.devices], rounds, numbers))
        self._zeros: list[dict[int, jax.Array]] = []
        if program.is_here:
            for of, ends in zip(program.rounds, program.ends, strict=True):
                idle = set(range(len(program.local))) - {a for a, _ in ends}
                self._zeros.append({at: zero(program.local[at], of) for at in idle})

    @property
    def is_open(self) -> bool:
        """Whether all processes have opened it."""
        return self.program.is_open

    def __call__(self, key: int, parts: Parts) -> Parts:
        program, arrived = self.program, {}
        if not program.is_here:
            return {}
        rounds = list(zip(program.ends, self._numbers, self._zeros, strict=True))
        given = []
        for ends, found, zeros in rounds:
            data = zeros | {
                a: parts[n] for (a, _), n in zip(ends, found, strict=True) if a is not None
            }
            given.append([data[at] for at in range(len(program.local))])
        for result, (ends, found, _) in zip(program(given), rounds, strict=True):
            shards = result.addressable_shards
            for (_, b), n in zip(ends, found, strict=True):
                if b is not None:
                    arrived[n] = shards[b].data
        return arrived
