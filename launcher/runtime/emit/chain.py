"""Chain the instruction lists of a step with several losses.

A value that one part hands to a later one stays in its slot. It is sent or resharded if the later
part needs it on another mesh or with another spec, and so is a result that replaces an argument.
Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from launcher.partition import Spec, axes
from launcher.plan import Plan
from launcher.runtime.emit.instructions import (
    Emitted,
    EmittedProgram,
    Exchange,
    Free,
    Instruction,
    Run,
    Send,
    Slot,
)
from launcher.trace import TracedStep, Var, is_var


def chained(
    step: TracedStep, plan: Plan, parts: Sequence[Emitted], here: AbstractSet[int]
) -> Emitted:
    """Return the instructions of a step, given those of its parts.

    Args:
        step: the step.
        plan: its plan.
        parts: a worker's instructions of each part.
        here: the meshes of the plan on which the worker has a device.
    """
    chain, meshes, first_stage = _Chain(step, here), plan.all_meshes, 0
    for number, (part, part_plan, emitted) in enumerate(
        zip(step.parts, plan.parts, parts, strict=True)
    ):
        mesh_of = [meshes.index(devices) for devices in part_plan.meshes]
        chain.add(part, emitted, mesh_of, f"loss.{number}." if number else "", first_stage)
        first_stage += len(part_plan.stages)
    return chain.emitted(meshes.index(plan.parts[-1].stages[-1].devices))


@dataclass(eq=False)
class _Chain:
    """The instructions so far.

    Attributes:
        here: the worker's meshes.
        turns: the number of turns so far.
        read: the slots of arguments that are read so far.
        at: the slots of values that one part hands to another.
        given: the slots of batch leaves and constants that a part has been given.
    """

    step: TracedStep
    here: AbstractSet[int]
    turns: int = 0
    read: set[int] = field(default_factory=set)
    slots: list[Slot] = field(default_factory=list)
    programs: dict[str, EmittedProgram] = field(default_factory=dict)
    listed: list[Instruction] = field(default_factory=list)
    arguments: list[tuple[int, int]] = field(default_factory=list)
    batches: list[tuple[int, int, int | None]] = field(default_factory=list)
    constants: list[tuple[Any, int]] = field(default_factory=list)
    at: dict[Var, int] = field(default_factory=dict)
    given: dict[Any, int] = field(default_factory=dict)

    def add(
        self,
        part: TracedStep,
        emitted: Emitted,
        mesh_of: Sequence[int],
        prefix: str,
        first_stage: int,
    ) -> None:
        """Add a part's instructions.

        Args:
            part: the part.
            emitted: its instructions.
            mesh_of: the number in the whole step of each of its meshes.
            prefix: what the names of its programs begin with.
            first_stage: the number in the whole step of its first stage.
        """
        index = {v: i for i, v in enumerate(self.step.whole.invars)}
        slots = [dataclasses.replace(x, mesh=mesh_of[x.mesh]) for x in emitted.slots]
        renamed: dict[int, int] = {}
        moves = []
        for i, slot in emitted.arguments:
            var = part.invars[i]
            if var not in self.at:
                renamed[slot] = self.at[var] = self._new(slots[slot])
                self.arguments.append((index[var], self.at[var]))
            elif self._lies(self.at[var], slots[slot]):
                renamed[slot] = self.at[var]
            else:
                renamed[slot] = self._new(slots[slot])
                moves.append((self.at[var], renamed[slot]))
            if i in emitted.used:
                self.read.add(renamed[slot])
        for i, slot, axis in emitted.batches:
            leaf = index[part.invars[i]]
            is_new, renamed[slot] = self._given(("batch", leaf, axis), slots[slot])
            self.batches += [(leaf, renamed[slot], axis)] if is_new else []
        for value, slot in emitted.constants:
            is_new, renamed[slot] = self._given(("constant", id(value)), slots[slot])
            self.constants += [(value, renamed[slot])] if is_new else []
        for number, slot_now in enumerate(slots):
            if number not in renamed:
                renamed[number] = self._new(slot_now)
        self._move(moves, f"{prefix}reshard")
        named = emitted.programs.items()
        self.programs.update((prefix + name, _in_part(made, prefix)) for name, made in named)
        for x in emitted.instructions:
            self.listed.append(_renamed(x, renamed, mesh_of, prefix, first_stage, self.turns))
        self.turns += emitted.turns
        for v, (result, _, _) in zip(part.outvars, emitted.results, strict=True):
            if is_var(v) and result is not None:
                self.at[v] = renamed[result]

    def emitted(self, home: int) -> Emitted:
        """Return all instructions; `home`: the mesh of results that no argument gives a place."""
        whole = self.step.whole
        argument_slot = dict(self.arguments)
        results: list[tuple[int | None, Any, int]] = []
        moves = []
        for i, atom in enumerate(whole.outvars):
            place = argument_slot.get(whole.aliases.get(i, -1))
            if not is_var(atom):
                mesh = home if place is None else self.slots[place].mesh
                results.append((None, atom, mesh))
                continue
            slot = self.at[atom]
            if place is not None and not self._lies(slot, self.slots[place]):
                moves.append((slot, self._new(self.slots[place])))
                slot = moves[-1][1]
            results.append((slot, None, self.slots[slot].mesh))
        self._move(moves, "reshard")
        read = self.read | {slot for slot, _, _ in results}
        return Emitted(
            slots=tuple(self.slots),
            programs=self.programs,
            instructions=tuple(self.listed),
            turns=self.turns,
            arguments=tuple(self.arguments),
            used=frozenset(i for i, slot in self.arguments if slot in read),
            batches=tuple(self.batches),
            constants=tuple(self.constants),
            results=tuple(results),
        )

    def _new(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def _lies(self, number: int, like: Slot) -> bool:
        """Return whether what a slot holds lies as another slot says."""
        slot = self.slots[number]
        return (slot.mesh, _plain(slot.spec)) == (like.mesh, _plain(like.spec))

    def _given(self, what: tuple[Any, ...], slot: Slot) -> tuple[bool, int]:
        """Return whether a given value needs a new slot, and its slot."""
        key = *what, slot.mesh, slot.aval.shape, _plain(slot.spec)
        is_new = key not in self.given
        if is_new:
            self.given[key] = self._new(slot)
        return is_new, self.given[key]

    def _move(self, moves: Iterable[tuple[int, int]], name: str) -> None:
        """Send values to other meshes; reshard those that stay on theirs by a program `name`."""
        links: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for src, dst in moves:
            self.read.add(src)
            link = self.slots[src].mesh, self.slots[dst].mesh
            links.setdefault(link, []).append((src, dst))
        for turn, ((src, dst), pairs) in enumerate(links.items(), self.turns):
            if self.here.isdisjoint((src, dst)):
                continue
            inputs, outputs = zip(*pairs, strict=True)
            if src != dst:
                self.listed.append(Send(src, dst, inputs, outputs, turn))
                continue
            program = f"{name}.{src}"
            self.programs[program] = EmittedProgram(lambda *values: values)
            self.listed.append(Run(src, program, inputs, outputs, turn=turn))
        self.turns += len(links)


def _in_part(program: EmittedProgram, prefix: str) -> EmittedProgram:
    """Return a program with a key that differs from those of programs of other losses."""
    return dataclasses.replace(program, alike=program.alike and (prefix, program.alike))


def _plain(spec: Spec) -> tuple[tuple[str, ...], ...]:
    """Return a spec without the trailing dimensions that are not sharded."""
    last = max((d + 1 for d, axis in enumerate(spec) if axis), default=0)
    return tuple(axes(axis) for axis in spec[:last])


def _renamed(
    x: Instruction,
    slots: dict[int, int],
    mesh_of: Sequence[int],
    prefix: str,
    first_stage: int,
    first_turn: int,
) -> Instruction:
    """Return an instruction of a part with the numbers and names of the whole step."""
    assert not isinstance(x, Free)  # added to the whole
    changes: dict[str, Any] = {
        "inputs": tuple(slots[s] for s in x.inputs),
        "outputs": tuple(slots[s] for s in x.outputs),
        "turn": first_turn + x.turn,
    }
    if isinstance(x, Send):
        return dataclasses.replace(x, src=mesh_of[x.src], dst=mesh_of[x.dst], **changes)
    changes["mesh"] = mesh_of[x.mesh]
    if isinstance(x, Exchange):
        specs = tuple(dataclasses.replace(s, name=prefix + s.name) for s in x.specs)
        return dataclasses.replace(x, specs=specs, **changes)
    task = x.task and x.task.on_stage(x.task.stage + first_stage)
    return dataclasses.replace(x, program=prefix + x.program, task=task, **changes)
