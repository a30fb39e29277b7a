"""The one order that all processes follow, and the proof that none of them deadlocks. Pure.

It is the order of the instruction list, which is that of the plan's simulated timeline. Each
process does its part of it: the instructions in which one of its devices takes part. Transfers by
collectives (`runtime.permute`) are told apart only by their order, so two transfers that are
swapped in one process mean silently wrong data, or a process that waits for ever.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set

from launcher.plan import PlanError
from launcher.runtime.instructions import Exchange, Free, Instruction, Run, Send, Slot

Parts = Mapping[int, Sequence[int]]  # process -> places in the list of instructions


def parts_of(instructions: Sequence[Instruction], owners: Sequence[Set[int]]) -> Parts:
    """Return what each process does, in order.

    Args:
        instructions: the instruction list.
        owners: for every mesh, the processes that own one of its devices.
    """
    parts: dict[int, list[int]] = {process: [] for process in sorted(set().union(*owners))}
    for place, x in enumerate(instructions):
        for process in _together(x, owners):
            parts[process].append(place)
    return parts


def prove(
    instructions: Sequence[Instruction],
    owners: Sequence[Set[int]],
    parts: Parts,
    slots: Sequence[Slot],
    given: Iterable[int],
) -> None:
    """Prove that processes that do these parts all finish, with the right arrays.

    Each process may prove its own part alone, if all have shown by the `digest` that they follow
    one list.

    The proof: take the first instruction in the list that is not done yet. Its arrays were made
    before it, on the mesh that reads them, and each process that takes part in it has done
    everything before it. So it is done next, however long any process waits for it, and so on to
    the last one. What two processes do together they do in the same order, so that neither mistakes
    one transfer for another.

    Args:
        instructions: the instruction list.
        owners: for every mesh, the processes that own one of its devices.
        parts: what each process does, as positions in the list.
        slots: what each slot holds.
        given: the slots that are filled before the first instruction.

    Raises:
        PlanError: an instruction is out of order, or reads what is not there.
    """
    wanted_of = parts_of(instructions, owners)
    for process, places in parts.items():
        for wanted, found in itertools.zip_longest(wanted_of.get(process, ()), places):
            if wanted != found:
                raise PlanError(
                    f"process {process} has to do {_told(wanted, instructions)} and does "
                    f"{_told(found, instructions)}"
                )
    there = set(given)
    for place, x in enumerate(instructions):
        if isinstance(x, Free):
            there.difference_update(x.slots)
            continue
        here, to = (x.src, x.dst) if isinstance(x, Send) else (x.mesh, x.mesh)
        absent = [s for s in x.inputs if s not in there or slots[s].mesh != here]
        if absent or any(slots[s].mesh != to for s in x.outputs):
            raise PlanError(f"{_told(place, instructions)} needs slots {absent}, not there")
        there.update(x.outputs)


def digest(
    instructions: Sequence[Instruction],
    owners: Sequence[Set[int]],
    slots: Sequence[Slot],
    exchanges: Sequence[str],
) -> str:
    """Return a hash that is equal for processes that follow the same order.

    Their arrays are also of the same kinds, and the same pieces go between the same devices.

    Args:
        instructions: the instruction list.
        owners: for every mesh, the processes that own one of its devices.
        slots: what each slot holds.
        exchanges: the descriptions of the exchanges, `Shipment.description`.
    """
    kinds = [(s.mesh, s.aval.shape, str(s.aval.dtype), s.spec) for s in slots]
    text = repr((instructions, list(map(sorted, owners)), kinds, list(exchanges)))
    return hashlib.sha256(text.encode()).hexdigest()


def _together(x: Instruction, owners: Sequence[Set[int]]) -> Set[int]:
    """Return the processes that do an instruction together. Freeing a slot waits for nobody."""
    if isinstance(x, Free):
        return set()
    return owners[x.src] | owners[x.dst] if isinstance(x, Send) else owners[x.mesh]


def _told(place: int | None, instructions: Sequence[Instruction]) -> str:
    if place is None:
        return "nothing"
    x = instructions[place]
    if isinstance(x, Run):
        return f"instruction {place}, {x.program} on mesh {x.mesh}"
    if isinstance(x, Send):
        return f"instruction {place}, a transfer from mesh {x.src} to {x.dst}"
    what = "an exchange" if isinstance(x, Exchange) else "the end of slots"
    return f"instruction {place}, {what}"
