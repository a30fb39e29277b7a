"""Compile a step's programs: in parallel, from shapes alone, and equal ones once."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from launcher.base.jax_compat import (
    compiled,
    loaded_for,
    overlap_options,
    with_barriers_kept,
)
from launcher.partition import are_packed
from launcher.runtime.emit.instructions import Run, Send
from launcher.runtime.emit.listing import Emitted
from launcher.runtime.programs.device_meshes import DeviceMeshes


class Compilation:
    """The programs of this process: all are lowered, and a pool compiles them.

    Args:
        emitted: the step's programs and instructions.
        placement: the devices of its meshes.
        pool: compiles them.

    Attributes:
        programs: the compilation of each distinct program.
    """

    def __init__(
        self, emitted: Emitted, placement: DeviceMeshes, pool: concurrent.futures.Executor
    ) -> None:
        self._pool = pool
        first: dict[str, Run] = {}
        for x in emitted.instructions:
            if isinstance(x, Run):
                first.setdefault(x.program, x)
        # What another process may not have pulled yet must not be written over.
        offered = {
            slot
            for x in emitted.instructions
            if isinstance(x, Send) and not placement.is_local(x)
            for slot in x.inputs
        }
        self._names = tuple(first)
        self._alike: dict[Any, list[_Program]] = {}
        seen: dict[Any, tuple[_Program, Any]] = {}  # a program of each key, and its kind
        for name, run in first.items():
            key = _same(name, run, emitted, placement, offered)
            lower = functools.partial(_lower, name, run, emitted, placement, offered)
            if key not in seen:
                program = lower()
                seen[key] = program, program.kind()
            one, kind = seen[key]
            arguments, results = _shardings(run, placement)
            program = dataclasses.replace(
                one, name=name, arguments=arguments, results=results, lower=lower
            )
            self._alike.setdefault(kind, []).append(program)
        self.programs = [
            pool.submit(compiled, group[0].lowered, group[0].options)
            for group in self._alike.values()
        ]

    def result(self) -> dict[str, Any]:
        """Wait for all programs and return them by name."""
        alike = self._alike
        distinct = {(kind, x.placed): x for kind, group in alike.items() for x in group}
        firsts = {kind: each.result() for kind, each in zip(alike, self.programs, strict=True)}
        made = self._pool.map(
            lambda at: _made(distinct[at], alike[at[0]][0], *firsts[at[0]]), distinct
        )
        found = dict(zip(distinct, made, strict=True))
        by_name = {x.name: found[kind, x.placed] for kind, group in alike.items() for x in group}
        return {name: by_name[name] for name in self._names}


def _same(name: str, run: Run, emitted: Emitted, placement: DeviceMeshes, offered: Set[int]) -> Any:
    """Return a key that is equal for programs that differ in their devices alone.

    One of them has to be lowered.
    """
    if (key := emitted.programs[name].alike) is None:
        return name
    slots = [emitted.slots[slot] for slot in (*run.inputs, *run.outputs)]
    types = tuple((slot.aval.shape, slot.aval.dtype, slot.spec) for slot in slots)
    donated = tuple(k for k in run.donated if run.inputs[k] not in offered)
    sharding, *_ = map(placement.sharding, (*run.inputs, *run.outputs))
    where = tuple(sharding.mesh.shape.items()), _kinds(sharding)
    mesh = None if sharding.is_fully_addressable else run.mesh
    return key, where, mesh, len(run.inputs), types, donated


def _shardings(
    run: Run, placement: DeviceMeshes
) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
    """Return the shardings of a program's arguments and of its results."""
    return tuple(map(placement.sharding, run.inputs)), tuple(map(placement.sharding, run.outputs))


def _kinds(sharding: NamedSharding) -> tuple[str, ...]:
    return tuple(device.device_kind for device in sharding.mesh.devices.flat)


@dataclass(frozen=True)
class _Program:
    """A program that is to be compiled.

    Attributes:
        name: its name.
        lowered: the lowered program.
        arguments: the shardings of its arguments.
        results: the shardings of its results.
        options: the compiler's.
        lower: returns the program as it is lowered for its own devices; `lowered` may be for those
            of a program that is alike.
    """

    name: str
    lowered: Any
    arguments: tuple[NamedSharding, ...]
    results: tuple[NamedSharding, ...]
    options: Mapping[str, Any]
    lower: Callable[[], _Program] | None = None

    @property
    def placed(self) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """The shardings of its arguments and of its results."""
        return self.arguments, self.results

    def kind(self) -> Any:
        """Return a key that is equal for programs of which only one has to be compiled.

        These are programs of equal stages, which differ in their devices alone: the lowered text
        names positions in a mesh, not devices. A program that runs in several processes is compiled
        by each of them, and shares its key with no other program.
        """
        sharding = [*self.arguments, *self.results][0]
        if not sharding.is_fully_addressable:
            return self.name
        kinds = _kinds(sharding)
        types = tuple((v.shape, v.dtype) for v in jax.tree.leaves(self.lowered.in_avals))
        options = tuple(sorted(self.options.items()))
        text = self.lowered.as_text().replace(f"@jit_{self.name}", "@jit", 1)
        return kinds, types, options, hashlib.sha256(text.encode()).digest()


def _made(program: _Program, first: _Program, made: Any, kept: bytes | None) -> Any:
    """Return the executable of a program of the same kind as `first`, which is compiled already.

    It is loaded from that of `first` for its own devices, or compiled if this JAX cannot do so.

    Args:
        program: the program.
        first: the program of its kind that was compiled.
        made: the executable of `first`.
        kept: the bytes that `jax_compat.compiled` returned with `made`.
    """
    if program.placed == first.placed:
        return made
    if found := loaded_for(made, *program.placed, kept):
        return found
    own = program.lower() if program.lower else program
    return compiled(own.lowered, own.options)[0]


def _lower(
    name: str, run: Run, emitted: Emitted, placement: DeviceMeshes, offered: Set[int]
) -> _Program:
    arguments, results = _shardings(run, placement)
    made = emitted.programs[name]

    def program(*flat: Any) -> tuple[Any, ...]:
        return tuple(made.fun(*flat))

    program.__name__ = name  # by which profilers show it
    jitted = jax.jit(
        program,
        donate_argnums=[k for k in run.donated if run.inputs[k] not in offered],
        out_shardings=results,
        keep_unused=True,
    )
    avals = [placement.slots[slot].aval for slot in run.inputs]
    abstract = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(avals, arguments, strict=True)
    ]
    lowered = jitted.lower(*abstract)
    platform = (*arguments, *results)[0].mesh.devices.flat[0].platform
    options = {}
    if made.buckets:
        largest = max(bucket.nbytes for bucket in made.buckets)
        options = overlap_options(platform, largest, are_packed(made.buckets))
    if "optimization_barrier" in lowered.as_text():
        options = with_barriers_kept(platform, options)
    return _Program(name, lowered, arguments, results, options)
