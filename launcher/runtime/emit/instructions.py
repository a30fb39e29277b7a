"""Instructions that a worker follows each step, the lifetimes of arrays, and proofs of order. Pure.

Instructions address *slots*: numbered places that hold one array each. What a slot holds (shape,
mesh, spec) is known before the first step.

An instruction has a *turn*: its place in the order that all workers follow, which is that of the
plan's simulated timeline. Each worker lists only the instructions in which one of its devices takes
part, by ascending turns, so that none deadlocks. Transfers by collectives (`transport.permute`) are
distinguished only by their order: two that are swapped in one process mean silently wrong data, or
a process that waits for ever.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from launcher.partition import Bucket, Spec
from launcher.plan import PlanError
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
        server: the number of the server that makes the whole; -1: the processes of a mesh do, in
            memory that they share.
        axis: the axis along which a "gather" joins parts.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    server: int = -1
    axis: int = 0


@dataclass(frozen=True)
class Exchange:
    """An instruction to exchange arrays of one mesh, between programs.

    Through parameter servers every worker gives its own; each gets the sums, or what is gathered
    from all. In memory that processes share, those of the mesh sum what each replica has.

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


def participants(x: Work) -> tuple[int, ...]:
    """Return the meshes that take part in an instruction; of a transfer, the source first."""
    return (x.src, x.dst) if isinstance(x, Send) else (x.mesh,)


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

    @property
    def given(self) -> list[int]:
        """The slots that are filled before the first instruction."""
        slots = [slot for _, slot in (*self.arguments, *self.constants)]
        return slots + [slot for _, slot, _ in self.batches]


def with_lifetimes(emitted: Emitted, donated: Sequence[bool], here: Set[int]) -> Emitted:
    """Return the instructions with the donation of buffers and the end of each slot.

    Args:
        emitted: the instructions without.
        donated: for each argument leaf, whether a call may consume it.
        here: the worker's meshes; what is in the slots of others is not its own.
    """
    kept = {slot for slot, _, _ in emitted.results if slot is not None}
    kept |= {slot for _, slot in emitted.constants}
    kept |= {slot for i, slot in emitted.arguments if not donated[i]}
    lent = kept | {slot for _, slot, _ in emitted.batches}  # may be the caller's own array
    listed = _with_donations(emitted, lent)
    kept |= {number for number, slot in enumerate(emitted.slots) if slot.mesh not in here}
    return dataclasses.replace(emitted, instructions=tuple(_with_frees(listed, kept)))


def _with_donations(emitted: Emitted, kept: Set[int]) -> list[Work]:
    """Let the programs around the pipeline reuse the buffers that they are the last to read.

    A buffer is reused for a result of the same shape, dtype and spec, so that parameters and
    optimizer state are updated in place. Arguments are donated first, slots that are `kept` not.
    """

    def signature(slot: int) -> tuple[Any, ...]:
        held = emitted.slots[slot]
        return held.aval.shape, held.aval.dtype, held.spec

    arguments = {slot for _, slot in emitted.arguments}
    work = [x for x in emitted.instructions if not isinstance(x, Free)]
    last = {s: i for i, x in enumerate(work) for s in x.inputs}
    for i, x in enumerate(work):
        if isinstance(x, Run) and x.task is None:
            free = [k for k, s in enumerate(x.inputs) if last[s] == i and s not in kept]
            spare = [signature(s) for s in x.outputs]
            donated = []
            for k in sorted(free, key=lambda k: x.inputs[k] not in arguments):
                if signature(x.inputs[k]) in spare:
                    spare.remove(signature(x.inputs[k]))
                    donated.append(k)
            work[i] = dataclasses.replace(x, donated=tuple(sorted(donated)))
    return work


def _with_frees(work: Sequence[Work], kept: Set[int]) -> Iterator[Instruction]:
    """Free every slot right after its last use, except those `kept` beyond the step."""
    last = {slot: place for place, x in enumerate(work) for slot in (*x.inputs, *x.outputs)}
    ends: dict[int, list[int]] = {}
    for slot, place in last.items():
        if slot not in kept:
            ends.setdefault(place, []).append(slot)
    for place, x in enumerate(work):
        yield x
        if place in ends:
            yield Free(tuple(sorted(ends[place])))


def prove(
    instructions: Sequence[Instruction],
    done: Iterable[Work],
    here: Set[int],
    slots: Sequence[Slot],
    given: Iterable[int],
) -> None:
    """Prove that a process that does this finishes, with the right arrays, if all prove theirs.

    All must also have shown by `digests` that what they do together has the same turns.

    The proof: take, of the instructions that are not done yet, that of the lowest turn. Each
    process that takes part in it has done everything before it, and has made or got the arrays
    that it gives. So it is done next, however long any process waits for it, and so on to the last
    one. What two processes do together they do in the same order, so that neither mistakes one
    transfer for another.

    Args:
        instructions: the instruction list of the process.
        done: what the process does, in order.
        here: the meshes on which it has a device.
        slots: what each slot holds.
        given: the slots that are filled before the first instruction.

    Raises:
        PlanError: an instruction is out of order, or reads what is not there.
    """
    listed = (x for x in instructions if not isinstance(x, Free))
    turn = -1
    for wanted, actual in itertools.zip_longest(listed, done):
        if wanted is not actual:
            raise PlanError(f"this process has to do {_named(wanted)} and does {_named(actual)}")
        if wanted is None or wanted.turn <= turn:
            raise PlanError(f"this process does {_named(wanted)} after turn {turn}")
        turn = wanted.turn
    filled = set(given)
    for x in instructions:
        if isinstance(x, Free):
            filled.difference_update(x.slots)
            continue
        meshes = participants(x)
        src, dst = meshes[0], meshes[-1]
        is_here = src in here  # elsewhere another process proves that arrays are there
        absent = [s for s in x.inputs if slots[s].mesh != src or (is_here and s not in filled)]
        if absent or any(slots[s].mesh != dst for s in x.outputs):
            raise PlanError(f"{_named(x)} needs slots {absent}, not there")
        filled.update(x.outputs)


def digest(turns: int, owners: Sequence[Set[int]]) -> str:
    """Return a hash of what must be the same in all processes.

    Args:
        turns: the number of turns.
        owners: for every mesh, the processes that own one of its devices.
    """
    return hashlib.sha256(repr((turns, list(map(sorted, owners)))).encode()).hexdigest()


def digests(
    instructions: Sequence[Instruction],
    owners: Sequence[Set[int]],
    slots: Sequence[Slot],
    shipments: Mapping[int, str],
) -> dict[str, int]:
    """Return a hash of what a process does together with each group of others.

    All processes of a group return the same one if they do the same together, at the same turns,
    with arrays of the same kinds, and the same pieces go between the same devices.

    Args:
        instructions: the instruction list of the process.
        owners: for every mesh, the processes that own one of its devices.
        slots: what each slot holds.
        shipments: by turn, what goes between processes, `Shipment.description`.

    Returns:
        By hash, the number of processes of the group.
    """
    hashes = {}
    numbers: dict[tuple[int, ...], dict[int, int]] = {}  # of a group's slots, by their turns
    for x in instructions:
        if isinstance(x, Free):
            continue
        meshes = participants(x)
        group = tuple(sorted(set().union(*(owners[mesh] for mesh in meshes))))
        if len(group) == 1:
            continue
        own = numbers.setdefault(group, {})
        arrays = [(own.setdefault(s, len(own)), *_kind(slots[s])) for s in (*x.inputs, *x.outputs)]
        what = (x.program, x.donated) if isinstance(x, Run) else shipments.get(x.turn)
        work = x.turn, meshes, what, len(x.inputs), arrays
        if group not in hashes:
            hashes[group] = hashlib.sha256(repr(group).encode())
        hashes[group].update(repr(work).encode())
    return {each.hexdigest(): len(group) for group, each in hashes.items()}


def _kind(slot: Slot) -> tuple[Any, ...]:
    return slot.mesh, slot.aval.shape, str(slot.aval.dtype), slot.spec


def _named(x: Work | None) -> str:
    if x is None:
        return "nothing"
    if isinstance(x, Run):
        return f"instruction {x.turn}, {x.program} on mesh {x.mesh}"
    if isinstance(x, Send):
        return f"instruction {x.turn}, a transfer from mesh {x.src} to {x.dst}"
    return f"instruction {x.turn}, an exchange"
