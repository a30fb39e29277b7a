"""Lowering of a placed step to instructions: what runs, in which order, on which slots. Pure.

The order is that of the simulated timeline, so that a single thread can issue it and every mesh
gets its work early enough.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from launcher.partition.buckets import Bucket
from launcher.partition.joint_graph import Name
from launcher.partition.partitioned import PartitionedStep, partition
from launcher.partition.pieces import Pieces, in_pieces
from launcher.partition.stages import StageGraph
from launcher.partition.update_pieces import split_segment
from launcher.partition.update_placement import Segment
from launcher.plan import Plan, ServerExchange, timeline
from launcher.runtime.chain import chained
from launcher.runtime.collectives import of_copies, sum_buckets
from launcher.runtime.emit_exchanges import exchange_instructions
from launcher.runtime.emitted import Emitted
from launcher.runtime.instructions import (
    Free,
    Run,
    Send,
    Work,
    with_donations,
    with_frees,
)
from launcher.runtime.shared_programs import SharedPrograms
from launcher.runtime.slots import Slots
from launcher.runtime.stage_programs import StageProgram
from launcher.schedule import Kind, Task
from launcher.trace.jaxpr import Var, captured, is_var, jaxpr_as_fun, program
from launcher.trace.step import TracedStep
from launcher.trace.structure_text import structure_text


def emit(step: TracedStep, plan: Plan, rank: int = 0) -> Emitted:
    """Return the instruction list of a plan, with the tasks in the order of its timeline.

    Args:
        step: the step.
        plan: the plan.
        rank: the number of the worker whose list it is, where parameter servers sum.

    Raises:
        PlanError: the plan's exchanges are not those of the step.
    """
    parts = [_emit_part(part, one, rank) for part, one in zip(step.parts, plan.parts, strict=True)]
    whole = chained(step, plan, parts) if step.further else parts[0]
    return _with_lifetimes(whole, step.whole.donated)


def _emit_part(step: TracedStep, plan: Plan, rank: int) -> Emitted:
    """Return the instructions of one loss, without donations and frees."""
    cut = partition(step.cut_at(plan.layer_ends), plan.assignment)
    pieces = in_pieces(cut)
    order = pieces.tasks([timed.task for timed in timeline(plan)])
    return _Emitter(pieces, order, Slots(pieces.cut), plan.exchanges, rank).emit()


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
    """The instructions so far.

    Attributes:
        pieces: the step, its stages cut into pieces where they are; `cut` is of these.
        order: the tasks of its stages.
        planned: what workers exchange, by the plan.
        rank: this worker's number.
        copies: the gradients whose sum has taken the place of each replica's: their operands, and
            the slots with the copies.
    """

    pieces: Pieces
    order: Sequence[Task]
    slots: Slots
    planned: Sequence[ServerExchange]
    rank: int
    programs: dict[str, Callable[..., tuple[Any, ...]]] = field(default_factory=dict)
    summing: dict[str, tuple[Bucket, ...]] = field(default_factory=dict)
    alike: dict[str, object] = field(default_factory=dict)
    copies: dict[Var, tuple[int, int]] = field(default_factory=dict)
    listed: list[Work] = field(default_factory=list)

    @property
    def cut(self) -> PartitionedStep:
        return self.pieces.cut

    @functools.cached_property
    def shared(self) -> SharedPrograms:
        return SharedPrograms(self.cut, self.pieces.names)

    @functools.cached_property
    def makers(self) -> dict[Var, list[int]]:
        """The meshes whose stages make each activation."""
        found: dict[Var, list[int]] = {}
        for graph in self.cut.stages:
            for v in graph.activations_out:
                found.setdefault(v, []).append(graph.mesh)
        return found

    def emit(self) -> Emitted:
        slots = self.slots
        arguments = [
            (i, slots.of_outer(v, self.cut.update.homes[v]))
            for i, v in enumerate(self.cut.step.invars)
            if not self.cut.step.batch[i]
        ]
        programs = self.stage_programs()
        once = [bucket for of in programs for made in of.values() for bucket in made.once]
        before, after = exchange_instructions(self.cut, self.slots, once, self.planned)
        self.give()
        self.listed += before
        self.sends(self.cut.update.argument_sends)
        for i, segment in enumerate(self.cut.update.before):
            self.segment(f"before.{i}", segment)
        self.pipeline(programs)
        self.listed += after
        self.sends(self.cut.update.part_sends)
        for i, segment in enumerate(self.cut.update.after):
            owners = self.pieces.owners
            for k, one in enumerate(split_segment(segment, owners)):
                self.segment(f"update.{i}.piece.{k}" if owners else f"update.{i}", one)
        results = []
        for atom, mesh in zip(self.cut.update.outvars, self.cut.update.out_homes, strict=True):
            slot = slots.of_outer(atom, mesh) if is_var(atom) else None
            results.append((slot, None if is_var(atom) else atom, mesh))
        return Emitted(
            slots=tuple(slots.slots),
            programs=self.programs,
            summing=self.summing,
            instructions=tuple(self.listed),
            arguments=tuple(arguments),
            batches=tuple(slots.batches),
            constants=tuple(slots.constants),
            results=tuple(results),
            slicing=self.cut.slicing,
            rank=self.rank,
            alike=self.alike,
        )

    # -- around the pipeline ---------------------------------------------------------------------

    def give(self) -> None:
        """Add the batch leaves and constants that the update program reads whole.

        Several workers gather the leaves, of which each has its own rows.
        """
        for var, mesh in self.cut.update.given:
            slot = self.slots.of_outer(var, mesh)
            if var in self.cut.step.constants:
                self.slots.constants.append((self.cut.step.constants[var], slot))
            elif self.cut.slicing.workers == 1 or not var.aval.shape:
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
        of_outer, mesh, layout = self.slots.of_outer, segment.mesh, self.cut.layouts[segment.mesh]
        closed = program(segment.inputs, segment.equations, segment.outputs)
        fun = jaxpr_as_fun(closed)
        copies = {k: self.copies[v] for k, v in enumerate(segment.inputs) if v in self.copies}

        stacked = {k for k, v in enumerate(segment.outputs) if self.slots.is_stacked(v)}
        own, rank = self.cut.slicing.own, self.rank  # not the emitter itself: it holds the programs

        def whole(*values: Any) -> tuple[Any, ...]:
            read = list(values)
            for k, (i, _) in copies.items():
                read[k] = of_copies(layout, i, read[k])
            found = fun(*read)
            return tuple(own(x, rank) if k in stacked else x for k, x in enumerate(found))

        self.programs[name] = whole
        if ".piece." in name:
            how = {
                "copies": [(k, layout.operand(i)) for k, (i, _) in copies.items()],
                "held": [id(x) for x in captured(segment.equations)],
            }
            self.alike[name] = structure_text(closed.jaxpr, how)
        inputs = [of_outer(v, mesh) for v in segment.inputs]
        for k, (_, slot) in copies.items():
            inputs[k] = slot
        outputs = tuple(of_outer(v, mesh) for v in segment.outputs)
        self.listed.append(Run(mesh, name, tuple(inputs), outputs))
        self.sends([(v, mesh, to) for v, to in segment.sends])

    # -- the pipeline ----------------------------------------------------------------------------

    def stage_programs(self) -> list[dict[Kind, StageProgram]]:
        """Return the programs of every stage; none without a loss."""
        stages = self.cut.stages if self.cut.loss.num_layers else ()
        return [self.shared.programs(graph.index) for graph in stages]

    def pipeline(self, programs: Sequence[dict[Kind, StageProgram]]) -> None:
        if not programs:
            return
        for graph, of_stage in zip(self.cut.stages, programs, strict=True):
            self.begin(graph, of_stage)
        last = {(task.stage, task.kind): task for task in self.order}
        for task in self.order:
            made = programs[task.stage].get(task.kind)
            if made is not None:
                is_last = task == last[task.stage, task.kind]
                self.task(task, made.last if is_last and made.last else made)
        for graph, made_of in zip(self.cut.stages, programs, strict=True):
            self.reduce(graph, list(made_of.values()))
            for name in (n for made in made_of.values() if made.last for n in made.last.outputs):
                if name.kind == "per_replica":
                    (var,) = self.cut.update.grad_parts[name.of, graph.index]
                    self.copies[var] = name.of, self.slots.of_stage(name, graph, 0)

    def begin(self, graph: StageGraph, programs: Mapping[Kind, StageProgram]) -> None:
        """Add a stage's programs, and emit the zeroing of its accumulators."""
        name, key = self.pieces.names[graph.index], self.shared.key(graph.index)
        for made in (each for one in programs.values() for each in (one, one.last) if each):
            self.programs[made.name] = made.fun
            self.alike[made.name] = key, made.name.removeprefix(name)
            self.slots.residuals.update(made.residuals)
            if made.buckets:
                self.summing[made.name] = made.buckets
        names = [name for made in programs.values() for name in made.accumulators]
        if names:
            slots = tuple(self.slots.of_stage(name, graph, 0) for name in names)
            avals = [self.slots.slots[slot].aval for slot in slots]
            zeros = f"{name}.zeros"
            self.programs[zeros] = lambda: tuple(jnp.zeros(a.shape, a.dtype) for a in avals)
            self.alike[zeros] = key, "zeros"
            self.listed.append(Run(graph.mesh, zeros, (), slots))

    def task(self, task: Task, made: StageProgram) -> None:
        graph, m = self.cut.stages[task.stage], task.microbatch
        inputs = [self.slots.of_stage(name, graph, m) for name in made.inputs]
        outputs = [self.slots.of_stage(name, graph, m) for name in made.outputs]
        number = self.slots.number(m, graph.mesh)
        donated = tuple(1 + k for k in made.in_place)
        of_stage = task._replace(stage=self.pieces.stage_of[task.stage])
        self.listed.append(
            Run(graph.mesh, made.name, (number, *inputs), tuple(outputs), donated, of_stage)
        )
        self.send_on(graph, made.outputs, m)

    def reduce(self, graph: StageGraph, programs: Sequence[StageProgram]) -> None:
        """Emit the sum over the replicas of the gradients that no task program sums."""
        unsummed = [
            [n.of for n in made.outputs if n.kind == "per_replica"]
            for made in programs
            if made.last is None
        ]
        buckets = [b for order in unsummed for b in self.cut.buckets(graph.index, order)[1]]
        if not buckets:
            return
        name = f"{self.pieces.names[graph.index]}.reduce"
        layout = self.cut.layouts[graph.mesh]
        late = [i for bucket in buckets for i in bucket.operands]

        def summed(*parts: Any) -> tuple[Any, ...]:
            found = sum_buckets(layout, buckets, dict(zip(late, parts, strict=True)))
            return tuple(found[i] for i in late)

        self.programs[name] = summed
        self.alike[name] = self.shared.key(graph.index), "reduce"
        self.summing[name] = tuple(buckets)
        inputs = [self.slots.of_stage(Name("per_replica", i), graph, 0) for i in late]
        outputs = [self.slots.of_stage(Name("grad", i), graph, 0) for i in late]
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
                meshes = dict.fromkeys(self.makers[name.of[0]])
            else:
                continue
            for mesh in meshes:
                if mesh != graph.mesh:
                    here = self.slots.exchanged(name, graph.mesh, m)
                    there = self.slots.exchanged(name, mesh, m)
                    links.setdefault((graph.mesh, mesh), []).append((here, there))
        self.transfers(links)
