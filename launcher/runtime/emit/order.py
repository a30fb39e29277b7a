"""The one order that all processes follow, and the proof that none of them deadlocks. Pure.

It is the order of the plan's simulated timeline: each instruction has its turn in it. Each process
lists only the instructions in which one of its devices takes part, by ascending turns. Transfers by
collectives (`runtime.permute`) are distinguished only by their order, so two transfers that are
swapped in one process mean silently wrong data, or a process that waits for ever.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from launcher.plan import PlanError
from launcher.runtime.emit.instructions import Free, Instruction, Run, Send, Slot, Work


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
    for wanted, found in itertools.zip_longest(listed, done):
        if wanted is not found:
            raise PlanError(f"this process has to do {_told(wanted)} and does {_told(found)}")
        if wanted is None or wanted.turn <= turn:
            raise PlanError(f"this process does {_told(wanted)} after turn {turn}")
        turn = wanted.turn
    there = set(given)
    for x in instructions:
        if isinstance(x, Free):
            there.difference_update(x.slots)
            continue
        at, to = (x.src, x.dst) if isinstance(x, Send) else (x.mesh, x.mesh)
        is_here = at in here  # elsewhere another process proves that arrays are there
        absent = [s for s in x.inputs if slots[s].mesh != at or (is_here and s not in there)]
        if absent or any(slots[s].mesh != to for s in x.outputs):
            raise PlanError(f"{_told(x)} needs slots {absent}, not there")
        there.update(x.outputs)


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
        meshes = (x.src, x.dst) if isinstance(x, Send) else (x.mesh,)
        group = tuple(sorted(set().union(*(owners[mesh] for mesh in meshes))))
        if len(group) == 1:
            continue
        own = numbers.setdefault(group, {})
        arrays = [(own.setdefault(s, len(own)), *_kind(slots[s])) for s in (*x.inputs, *x.outputs)]
        what = (x.program, x.donated) if isinstance(x, Run) else shipments.get(x.turn)
        told = x.turn, meshes, what, len(x.inputs), arrays
        if group not in hashes:
            hashes[group] = hashlib.sha256(repr(group).encode())
        hashes[group].update(repr(told).encode())
    return {found.hexdigest(): len(group) for group, found in hashes.items()}


def _kind(slot: Slot) -> tuple[Any, ...]:
    return slot.mesh, slot.aval.shape, str(slot.aval.dtype), slot.spec


def _told(x: Work | None) -> str:
    if x is None:
        return "nothing"
    if isinstance(x, Run):
        return f"instruction {x.turn}, {x.program} on mesh {x.mesh}"
    if isinstance(x, Send):
        return f"instruction {x.turn}, a transfer from mesh {x.src} to {x.dst}"
    return f"instruction {x.turn}, an exchange"
