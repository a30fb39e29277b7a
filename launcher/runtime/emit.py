"""Lowering of a placed step to instructions: what runs, in which order, on which slots. Pure.

The order is that of the simulated timeline, so that a single thread can issue it and every mesh
gets its work early enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from launcher.partition.joint_graph import Name
from launcher.partition.partitioned import PartitionedStep, partition
from launcher.partition.stages import StageGraph
from launcher.partition.update_placement import Segment
from launcher.plan import Plan, timeline
from launcher.runtime.chain import chained
from launcher.runtime.collectives import scatter
from launcher.runtime.emitted import Emitted
from launcher.runtime.instructions import (
    Free,
    Run,
    Send,
    with_donations,
    with_frees,
)
from launcher.runtime.slots import Slots
from launcher.runtime.stage_programs import StageProgram, stage_programs
from launcher.schedule import Kind, Task
from launcher.trace.jaxpr import Var, is_var, jaxpr_as_fun, program
from launcher.trace.step import TracedStep


def emit(step: TracedStep, plan: Plan) -> Emitted:
    """Return the instruction list of a plan, with the tasks in the order of its timeline."""
    parts = [_emit_part(part, one) for part, one in zip(step.parts, plan.parts, strict=True)]
    whole = chained(step, plan, parts) if step.further else parts[0]
    return _with_lifetimes(whole, step.whole.donated)


def _emit_part(step: TracedStep, plan: Plan) -> Emitted:
    """Return the instructions of one loss, without donations and frees."""
    cut = partition(step.cut_at(plan.layer_ends), plan.assignment)
    return _Emitter(cut, [timed.task for timed in timeline(plan)], Slots(cut)).emit()


def _with_lifetimes(emitted: Emitted, donated: Sequence[bool]) -> Emitted:
    """Return the instructions with the donation of buffers and the end of each slot.

    Args:
        emitted: the instructions without.
        donated: for each argument leaf, whether a call may consume it.
    """
    kept = {slot for slot, _, _ in emitted.results if slot is not None}
    kept |= {slot for _, slot in emitted.constants}
    kept |= {slot for i, slot in emitted.arguments if not donated[i]}
    first = frozenset(slot for _, slot in emitted.arguments)
    lent = kept | {slot for _, slot, _ in emitted.batches}  # may be the caller's own array
    listed = [x for x in emitted.instructions if not isinstance(x, Free)]
    listed = with_donations(listed, emitted.slots, first, frozenset(lent))
    ended = tuple(with_frees(listed, frozenset(kept)))
    return dataclasses.replace(emitted, instructions=ended)


@dataclass(eq=False)
class _Emitter:
    cut: PartitionedStep
    order: Sequence[Task]
    slots: Slots
    programs: dict[str, Callable[..., tuple[Any, ...]]] = field(default_factory=dict)
    listed: list[Run | Send] = field(default_factory=list)

    def emit(self) -> Emitted:
        slots = self.slots
        arguments = [
            (i, slots.of_outer(v, self.cut.update.homes[v]))
            for i, v in enumerate(self.cut.step.invars)
            if not self.cut.step.batch[i]
        ]
        self.give()
        self.sends(self.cut.update.argument_sends)
        for i, segment in enumerate(self.cut.update.before):
            self.segment(f"before.{i}", segment)
        self.pipeline()
        self.sends(self.cut.update.part_sends)
        for i, segment in enumerate(self.cut.update.after):
            self.segment(f"update.{i}", segment)
        results = []
        for atom, mesh in zip(self.cut.update.outvars, self.cut.update.out_homes, strict=True):
            slot = slots.of_outer(atom, mesh) if is_var(atom) else None
            results.append((slot, None if is_var(atom) else atom, mesh))
        return Emitted(
            slots=tuple(slots.slots),
            programs=self.programs,
            instructions=tuple(self.listed),
            arguments=tuple(arguments),
            batches=tuple(slots.batches),
            constants=tuple(slots.constants),
            results=tuple(results),
            slicing=self.cut.slicing,
        )

    # -- around the pipeline ---------------------------------------------------------------------

    def give(self) -> None:
        """Add the batch leaves and constants that the update program reads whole."""
        for var, mesh in self.cut.update.given:
            slot = self.slots.of_outer(var, mesh)
            if var in self.cut.step.constants:
                self.slots.constants.append((self.cut.step.constants[var], slot))
            else:
                self.slots.batches.append((self.cut.step.invars.index(var), slot, None))

    def sends(self, sends: Sequence[tuple[Var, int, int]]) -> None:
        links: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for var, src, dst in sends:
            pair = self.slots.of_outer(var, src), self.slots.of_outer(var, dst)
            links.setdefault((src, dst), []).append(pair)
        self.transfers(links)

    def transfers(self, links: Mapping[tuple[int, int], Sequence[tuple[int, int]]]) -> None:
        for (src, dst), pairs in links.items():
            inputs, outputs = zip(*pairs, strict=True)
            self.listed.append(Send(src, dst, inputs, outputs))

    def segment(self, name: str, segment: Segment) -> None:
        def slots(variables: Sequence[Var]) -> tuple[int, ...]:
            return tuple(self.slots.of_outer(v, segment.mesh) for v in variables)

        self.programs[name] = jaxpr_as_fun(
            program(segment.inputs, segment.equations, segment.outputs)
        )
        self.listed.append(Run(segment.mesh, name, slots(segment.inputs), slots(segment.outputs)))
        self.sends([(v, segment.mesh, to) for v, to in segment.sends])

    # -- the pipeline ----------------------------------------------------------------------------

    def pipeline(self) -> None:
        if not self.cut.loss.num_layers:
            return
        programs = [self.stage(graph) for graph in self.cut.stages]
        for task in self.order:
            made = programs[task.stage].get(task.kind)
            if made is not None:
                self.task(task, made)
        for graph, made_of in zip(self.cut.stages, programs, strict=True):
            self.reduce(graph, list(made_of.values()))

    def stage(self, graph: StageGraph) -> dict[Kind, StageProgram]:
        """Return a stage's programs, and emit the zeroing of its accumulators."""
        programs = stage_programs(self.cut, graph.index)
        self.programs.update((made.name, made.fun) for made in programs.values())
        for made in programs.values():
            self.slots.residuals.update(made.residuals)
        names = [name for made in programs.values() for name in made.accumulators]
        if names:
            slots = tuple(self.slots.of_stage(name, graph, 0) for name in names)
            avals = [self.slots.slots[slot].aval for slot in slots]
            zeros = f"stage.{graph.index}.zeros"
            self.programs[zeros] = lambda: tuple(jnp.zeros(a.shape, a.dtype) for a in avals)
            self.listed.append(Run(graph.mesh, zeros, (), slots))
        return programs

    def task(self, task: Task, made: StageProgram) -> None:
        graph, m = self.cut.stages[task.stage], task.microbatch
        inputs = [self.slots.of_stage(name, graph, m) for name in made.inputs]
        outputs = [self.slots.of_stage(name, graph, m) for name in made.outputs]
        number = self.slots.number(m, graph.mesh)
        count = len(made.accumulators)
        donated = tuple(range(1 + len(inputs) - count, 1 + len(inputs)))
        self.listed.append(
            Run(graph.mesh, made.name, (number, *inputs), tuple(outputs), donated, task)
        )
        self.send_on(graph, made.outputs, m)

    def reduce(self, graph: StageGraph, programs: Sequence[StageProgram]) -> None:
        """Emit the sum of the gradients that stay unsummed until the pipeline is done.

        These are kept for each replica, and end up sharded along the replicas.
        """
        late = [n for made in programs for n in made.accumulators if n.kind == "unsummed"]
        if not late:
            return
        name, layout = f"stage.{graph.index}.reduce", self.cut.layouts[graph.mesh]
        self.programs[name] = lambda *parts: tuple(
            scatter(layout, n.of, part) for n, part in zip(late, parts, strict=True)
        )
        inputs = [self.slots.of_stage(n, graph, 0) for n in late]
        outputs = [self.slots.of_stage(Name("grad", n.of), graph, 0) for n in late]
        self.listed.append(Run(graph.mesh, name, tuple(inputs), tuple(outputs)))

    def send_on(self, graph: StageGraph, made: Sequence[Name], m: int) -> None:
        """Emit the transfers of what a task made.

        Activations go to the meshes that read them, cotangents to the mesh that made the
        activation. What is used on its own mesh needs no transfer.
        """
        readers = dict(zip(graph.activations_out, graph.consumers, strict=True))
        links: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for name in made:
            if name.kind == "activation":
                meshes = dict.fromkeys(self.cut.stages[to].mesh for to in readers[name.of])
            elif name.kind == "cotangent":
                meshes = {g.mesh: None for g in self.cut.stages if name.of[0] in g.activations_out}
            else:
                continue
            for mesh in meshes:
                if mesh != graph.mesh:
                    here = self.slots.exchanged(name, graph.mesh, m)
                    there = self.slots.exchanged(name, mesh, m)
                    links.setdefault((graph.mesh, mesh), []).append((here, there))
        self.transfers(links)
