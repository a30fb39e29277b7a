"""The static instruction list that a worker follows each step, and when arrays in it die. Pure.

Instructions address *slots*: numbered places that hold one array each. What a slot holds (shape,
mesh, spec) is known before the first step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.partition.sharding.named_dims import Spec
from launcher.schedule import Task


@dataclass(frozen=True)
class Slot:
    """What a slot holds: a value on one mesh. `spec`: how the mesh's devices share it."""

    mesh: int
    aval: Any
    spec: Spec


@dataclass(frozen=True)
class Run:
    """Call program `program` on the arrays of `inputs`; `donated` are positions among them.

    An output may name an input's slot: it then takes its place. `task`: the pipeline's, if it is
    one's program.
    """

    mesh: int
    program: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()
    task: Task | None = None


@dataclass(frozen=True)
class Send:
    """Copy arrays from one mesh's slots to another's."""

    src: int
    dst: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Free:
    """Forget the arrays of these slots."""

    slots: tuple[int, ...]


Instruction = Run | Send | Free


def with_donations(
    instructions: Sequence[Run | Send],
    slots: Sequence[Slot],
    arguments: frozenset[int],
    kept: frozenset[int],
) -> list[Run | Send]:
    """Let the programs around the pipeline reuse the buffers they read last, the step's `arguments`
    first, where a result of the same kind is made: so parameters and optimizer state change in
    place. Slots that are `kept` beyond the step stay as they are."""

    def signature(slot: int) -> tuple[Any, ...]:
        held = slots[slot]
        return held.aval.shape, held.aval.dtype, held.spec

    last = {s: i for i, x in enumerate(instructions) for s in x.inputs}
    listed: list[Run | Send] = []
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


def with_frees(instructions: Sequence[Run | Send], kept: frozenset[int]) -> list[Instruction]:
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
