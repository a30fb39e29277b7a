"""A step as slots, programs and instructions: what is emitted and then compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.partition.gradient_sync import Bucket
from launcher.partition.slicing import Slicing
from launcher.runtime.emit.instructions import Instruction, Slot


@dataclass(frozen=True, eq=False)
class Emitted:
    """A step that is ready to be compiled by one worker.

    Attributes:
        slots: what each slot holds.
        programs: the function of every program, by name.
        summing: the buckets of the programs that sum gradients over the replicas, by name.
        instructions: what the worker runs, in order.
        turns: the number of turns of all workers' instructions.
        arguments: `(argument leaf, slot)`: where each is put before the step, here or elsewhere.
        used: the argument leaves, of these, that a worker reads or that are results.
        batches: `(argument leaf, slot, stacked along axis | None)`: copies of batch leaves.
        constants: `(array, slot)`, put once.
        results: for each result leaf, here or elsewhere, `(slot, literal, mesh)`, where either the
            slot or the literal is None.
        slicing: how the batch is cut.
        rank: the number of the worker that it is for, where parameter servers sum.
        alike: a key of some programs, equal for those that are the same function.
    """

    slots: tuple[Slot, ...]
    programs: dict[str, Callable[..., tuple[Any, ...]]]
    summing: dict[str, tuple[Bucket, ...]]
    instructions: tuple[Instruction, ...]
    turns: int
    arguments: tuple[tuple[int, int], ...]
    used: frozenset[int]
    batches: tuple[tuple[int, int, int | None], ...]
    constants: tuple[tuple[Any, int], ...]
    results: tuple[tuple[int | None, Any, int], ...]
    slicing: Slicing
    rank: int
    alike: Mapping[str, object] = field(default_factory=dict)
