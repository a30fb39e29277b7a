"""Instructions that a worker follows each step, with the lifetimes of arrays. Pure.

Instructions address *slots*: numbered places that hold one array each. What a slot holds (shape,
mesh, spec) is known before the first step.

An instruction has a *turn*: its place in the order that all workers follow. Each does what it takes
part in by ascending turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.partition import Spec
from launcher.schedule import Task


@dataclass(frozen=True)
class Slot:
    """The content of a slot: a value on one mesh.

    Attributes:
        mesh: the mesh's number.
        aval: the value's shape and dtype.
        spec: how the value is sharded over the mesh's devices.
    """

    mesh: int
    aval: Any
    spec: Spec


@dataclass(frozen=True)
class Run:
    """An instruction to call a program on one mesh.

    An output may name the slot of an input, which it then replaces.

    Attributes:
        mesh: the mesh that runs it.
        program: the program's name.
        inputs: the slots of its arguments.
        outputs: the slots of its results.
        donated: the positions, among `inputs`, of the arguments that are donated.
        task: the task of the pipeline that the program is for; None for the programs around the
            pipeline.
        turn: its turn.
    """

    mesh: int
    program: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()
    task: Task | None = None
    turn: int = 0


@dataclass(frozen=True)
class Send:
    """An instruction to copy arrays from slots of one mesh to slots of another."""

    src: int
    dst: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    turn: int = 0


@dataclass(frozen=True)
class ExchangeSpec:
    """An array that each worker gives its part of in every call, and gets the whole of.

    Attributes:
        name: the exchange in words, for errors and timelines.
        kind: "sum": the whole is the sum of the parts, added in rank order; "gather": the parts in
            rank order, joined along `axis`.
        shape: the shape of a part.
        dtype: the name of the dtype in which parts and the whole cross. Parts of 16 bits are
            added in 32.
        server: the number of the server that makes the whole.
        axis: the axis along which a "gather" joins parts.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    server: int
    axis: int = 0


@dataclass(frozen=True)
class Exchange:
    """An instruction to take arrays of one mesh through the parameter servers.

    Every worker gives its own; each gets the sums, or what is gathered from all.

    Attributes:
        mesh: the mesh.
        specs: what crosses together, each by itself, all at once.
        counts: how many of the arrays cross by each.
        inputs: the slots of this worker's arrays.
        outputs: the slots of what they become.
        micro_batches: of how many microbatches, one after another, each array holds the replicas.
        turn: its turn.
    """

    mesh: int
    specs: tuple[ExchangeSpec, ...]
    counts: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    micro_batches: int = 1
    turn: int = 0


@dataclass(frozen=True)
class Free:
    """An instruction to drop the arrays of these slots."""

    slots: tuple[int, ...]


Work = Run | Send | Exchange
Instruction = Work | Free


def with_donations(
    instructions: Sequence[Work],
    slots: Sequence[Slot],
    arguments: frozenset[int],
    kept: frozenset[int],
) -> list[Work]:
    """Let the programs around the pipeline reuse the buffers that they are the last to read.

    A buffer is reused for a result of the same shape, dtype and spec, so that parameters and
    optimizer state are updated in place.

    Args:
        instructions: the instructions without donations.
        slots: what each slot holds.
        arguments: the slots of the step's arguments, which are donated first.
        kept: the slots that are needed beyond the step, which are not donated.
    """

    def signature(slot: int) -> tuple[Any, ...]:
        held = slots[slot]
        return held.aval.shape, held.aval.dtype, held.spec

    last = {s: i for i, x in enumerate(instructions) for s in x.inputs}
    listed: list[Work] = []
    for i, x in enumerate(instructions):
        if isinstance(x, Run) and x.task is None:
            free = [k for k, s in enumerate(x.inputs) if last[s] == i and s not in kept]
            spare = [signature(s) for s in x.outputs]
            donated = []
            for k in sorted(free, key=lambda k: x.inputs[k] not in arguments):
                if signature(x.inputs[k]) in spare:
                    spare.remove(signature(x.inputs[k]))
                    donated.append(k)
            x = dataclasses.replace(x, donated=tuple(sorted(donated)))
        listed.append(x)
    return listed


def with_frees(instructions: Sequence[Work], kept: frozenset[int]) -> list[Instruction]:
    """Free every slot right after its last use, except those `kept` beyond the step."""
    last: dict[int, int] = {}
    for place, instruction in enumerate(instructions):
        last.update((slot, place) for slot in (*instruction.inputs, *instruction.outputs))
    ends: dict[int, list[int]] = {}
    for slot, place in last.items():
        if slot not in kept:
            ends.setdefault(place, []).append(slot)
    listed: list[Instruction] = []
    for place, instruction in enumerate(instructions):
        listed.append(instruction)
        if place in ends:
            listed.append(Free(tuple(sorted(ends[place]))))
    return listed
