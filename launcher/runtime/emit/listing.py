"""A worker's instruction list and the programs that it runs, while written and complete. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeVar

from launcher.partition import Bucket, Slicing
from launcher.runtime.emit.instructions import Instruction, Run, Send, Slot, Work
from launcher.runtime.emit.slots import Slots
from launcher.trace import Var

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class EmittedProgram:
    """A program before it is compiled.

    Attributes:
        fun: its function.
        alike: a key that is equal for programs that are the same function; None: it is like none.
        buckets: the gradients that it sums over the replicas.
    """

    fun: Callable[..., tuple[Any, ...]]
    alike: object = None
    buckets: tuple[Bucket, ...] = ()

    def in_part(self, prefix: str) -> EmittedProgram:
        """Return it with a key that differs from those of programs of other losses."""
        return dataclasses.replace(self, alike=self.alike and (prefix, self.alike))


@dataclass(frozen=True, eq=False)
class Emitted:
    """A step that is ready to be compiled by one worker.

    Attributes:
        slots: what each slot holds.
        programs: the programs, by name.
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
    """

    slots: tuple[Slot, ...]
    programs: dict[str, EmittedProgram]
    instructions: tuple[Instruction, ...]
    turns: int
    arguments: tuple[tuple[int, int], ...]
    used: frozenset[int]
    batches: tuple[tuple[int, int, int | None], ...]
    constants: tuple[tuple[Any, int], ...]
    results: tuple[tuple[int | None, Any, int], ...]
    slicing: Slicing
    rank: int


@dataclass(eq=False)
class Listing:
    """One worker's instructions so far.

    Every instruction of the step has its turn, whether it is listed here or not, so that what
    several workers do together has the same turn in all their lists. Some turns may be nobody's.

    Attributes:
        slots: the slots of the worker's own arrays, and of the far ends of its transfers.
        here: the meshes on which the worker has a device.
        turns: the number of turns so far.
        listed: the instructions.
        programs: see `Emitted`.
    """

    slots: Slots
    here: AbstractSet[int]
    turns: int = 0
    listed: list[Work] = field(default_factory=list)
    programs: dict[str, EmittedProgram] = field(default_factory=dict)

    def take_turns(self, count: int = 1) -> int:
        """Take turns for `count` instructions and return the first."""
        self.turns += count
        return self.turns - count

    def run(
        self, turn: int, mesh: int, program: str, inputs: Iterable[int], outputs: Iterable[int]
    ) -> None:
        """Add the run of a program around the pipeline on a mesh of this worker."""
        self.listed.append(Run(mesh, program, tuple(inputs), tuple(outputs), turn=turn))

    def send(
        self,
        turn: int,
        src: int,
        dst: int,
        values: Sequence[_T],
        slot: Callable[[_T, int], int],
    ) -> None:
        """Add a transfer of values, if this worker takes part in it.

        Args:
            turn: its turn.
            src: the mesh that has them.
            dst: the mesh that gets them.
            values: the values.
            slot: returns the slot of a value on a mesh.
        """
        if src in self.here or dst in self.here:
            inputs = tuple(slot(value, src) for value in values)
            outputs = tuple(slot(value, dst) for value in values)
            self.listed.append(Send(src, dst, inputs, outputs, turn))

    def sends(self, sends: Sequence[tuple[Var, int, int]]) -> None:
        """Add transfers of values of the update program, one from each mesh to each other.

        Args:
            sends: `(value, from mesh, to mesh)`.
        """
        links: dict[tuple[int, int], list[Var]] = {}
        for var, src, dst in sends:
            links.setdefault((src, dst), []).append(var)
        for (src, dst), values in links.items():
            self.send(self.take_turns(), src, dst, values, self.slots.of_outer)
