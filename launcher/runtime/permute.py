"""Moving arrays between processes from device to device, by the runtime's collectives.

An exchange is one compiled program, a `jax.lax.ppermute` for each of its rounds, over the devices
of both sides, whose processes alone take part: NCCL on GPUs, gloo on CPUs. Nothing names what
arrives but its turn, so all processes follow the one order of `runtime.order`; and as a program of
which one device has begun and another has not keeps the former, everything is compiled, and every
group of devices has met once, before the first step. Used by the same as `runtime.transport`.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.runtime.pace import Pace
from launcher.runtime.transport import Exchange, Meeting, Parcel, Parts

_AXIS = "device"


class Round(NamedTuple):
    """Arrays of one kind of which no two leave the same device or arrive at the same.

    `pairs`: from where to where, as positions among the devices of the exchange.
    """

    shape: tuple[int, ...]
    dtype: Any
    pairs: tuple[tuple[int, int], ...]

    def takes(self, other: Round) -> bool:
        """Whether another round's arrays may go with these."""
        ends = zip(*self.pairs, *other.pairs, strict=True)
        alike = (self.shape, self.dtype) == (other.shape, other.dtype)
        return alike and all(len(set(end)) == len(end) for end in ends)


def rounds_of(
    parcels: Sequence[Parcel], devices: Sequence[jax.Device]
) -> list[tuple[Round, list[int]]]:
    """The rounds that parcels between these devices take; with each the numbers of its parcels."""
    at = {device: i for i, device in enumerate(devices)}
    rounds: list[tuple[Round, list[int]]] = []
    for n, parcel in enumerate(parcels):
        new = Round(parcel.shape, parcel.dtype, ((at[parcel.src], at[parcel.dst]),))
        for i, (found, numbers) in enumerate(rounds):
            if found.takes(new):
                rounds[i] = found._replace(pairs=found.pairs + new.pairs), [*numbers, n]
                break
        else:
            rounds.append((new, [n]))
    return rounds


class PermuteTransport(Meeting):
    """See the module. Where a device has nothing to send in a round, it sends zeros to nobody,
    which stay there for the next time: of each size one array, of what else arrives there."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: dict[Any, _Program] = {}
        self._opened: set[tuple[jax.Device, ...]] = set()
        self._zeros: dict[Any, jax.Array] = {}
        self._pace = Pace()

    def bind(self, parcels: Sequence[Parcel]) -> Exchange:
        """See `Transport`."""
        ends = {device for parcel in parcels for device in (parcel.src, parcel.dst)}
        devices = tuple(sorted(ends, key=lambda device: device.id))
        rounds = rounds_of(parcels, devices)
        key = devices, tuple(found for found, _ in rounds)
        if key not in self._programs:
            self._programs[key] = _Program(*key)
        return _Permutes(self._programs[key], [numbers for _, numbers in rounds])

    def open(self) -> None:
        """See `Transport`. Compiles, then lets each group of devices meet, one after another."""
        new = [x for x in self._programs.values() if x.is_here and x.run is None]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(_Program.compiled, new))
        for program, run in zip(new, compiled, strict=True):
            program.run = self._pace.keep(run, program.local)
            program.zeros = [self._zeros_for(program, x) for x in program.rounds]
        groups = {x.devices: x for x in reversed(self._programs.values()) if x.devices}
        for devices in sorted(groups.keys() - self._opened, key=lambda g: [d.id for d in g]):
            self._opened.add(devices)
            if groups[devices].is_here:
                nothing: list[list[int]] = [[] for _ in groups[devices].rounds]
                jax.block_until_ready(groups[devices]({}, nothing))

    def reserve(self, count: int) -> int:
        """See `Transport`. Nothing has a key."""
        return count

    def _zeros_for(self, program: _Program, of: Round) -> list[jax.Array]:
        """An array of a round's kind on each of this process's devices."""
        found = []
        for device in program.local:
            key = device, of.shape, of.dtype
            if key not in self._zeros:
                self._zeros[key] = jax.device_put(np.zeros(of.shape, of.dtype), device)
            found.append(self._zeros[key])
        return found


class _Program:
    """The program of exchanges that differ in their values alone.

    Attributes:
        local: those of `devices` that are this process's. run: it compiled, once it is.
        zeros: for each round what each of `local` gives that sends nothing.
    """

    def __init__(self, devices: tuple[jax.Device, ...], rounds: tuple[Round, ...]) -> None:
        me = jax.process_index()
        self.devices, self.rounds = devices, rounds
        self.local = [device for device in devices if device.process_index == me]
        self.is_here = bool(self.local)
        self.run: Any = None
        self.zeros: list[list[jax.Array]] = []
        if self.is_here:
            self._mesh = Mesh(np.array(devices), (_AXIS,))
            self._kinds = [self._kind(x) for x in rounds]
            at = [devices.index(device) for device in self.local]
            # For each round and pair the position of its ends among `local`, None elsewhere.
            here = {whole: own for own, whole in enumerate(at)}
            self.ends = [[(here.get(a), here.get(b)) for a, b in x.pairs] for x in rounds]

    def __call__(self, parts: Parts, numbers: Sequence[Sequence[int]]) -> Any:
        """Run it with these parcels in each round; all of the rounds' results."""
        inputs = []
        for kind, zeros, ends, found in zip(
            self._kinds, self.zeros, self.ends, numbers, strict=True
        ):
            data = list(zeros)
            for (a, _), n in zip(ends, found, strict=False):  # none, when they first meet
                if a is not None:
                    data[a] = parts[n]
            inputs.append(jax.make_array_from_single_device_arrays(kind.shape, kind.sharding, data))
        return self.run(*inputs)

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
        """All devices' arrays as one, along the first axis; of numbers, which have none, as if they
        were one and the same number."""
        spec = PartitionSpec(_AXIS) if of.shape else PartitionSpec()
        first = [len(self.devices) * of.shape[0]] if of.shape else []
        sharding = NamedSharding(self._mesh, spec)
        return jax.ShapeDtypeStruct((*first, *of.shape[1:]), of.dtype, sharding=sharding)


class _Permutes:
    """An exchange by a program. `numbers`: the parcels of each of its rounds."""

    num_keys = 0

    def __init__(self, program: _Program, numbers: list[list[int]]) -> None:
        self._program = program
        self._numbers = numbers

    def __call__(self, key: int, parts: Parts) -> Parts:
        program, arrived = self._program, {}
        if not program.is_here:
            return {}
        results = program(parts, self._numbers)
        for result, ends, found in zip(results, program.ends, self._numbers, strict=True):
            shards = result.addressable_shards
            for (_, b), n in zip(ends, found, strict=True):
                if b is not None:
                    arrived[n] = shards[b].data
        return arrived
