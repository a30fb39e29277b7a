"""The static instruction list that a worker follows each step. Pure data.

Instructions address *slots*: numbered places that hold one array each. What a slot holds (shape,
stage, layout) is known before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.plan.schedule import Task


@dataclass(frozen=True)
class Slot:
    """What a slot holds: a value of one stage.

    `layout`: "whole" (replicated over the stage's replicas), "replicas" (a leading axis of
    replicas) or "stacked" (microbatches, then replicas where there are several).
    """

    stage: int
    aval: Any
    layout: str


@dataclass(frozen=True)
class Run:
    """Call program `program` on the arrays of `inputs`; `donated` are positions among them.

    An output may name an input's slot: it then takes its place.
    """

    stage: int
    program: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()
    task: Task | None = None


@dataclass(frozen=True)
class Send:
    """Copy arrays from one stage's slots to another's."""

    src: int
    dst: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Free:
    """Forget the arrays of these slots."""

    slots: tuple[int, ...]


Instruction = Run | Send | Free


def with_frees(instructions: list[Run | Send], kept: frozenset[int]) -> list[Instruction]:
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
