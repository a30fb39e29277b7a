"""Emit the instructions of a step's pipeline: the tasks of all microbatches. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from launcher.partition import Name, PartitionedStep, Pieces, StageGraph
from launcher.runtime.emit.instructions import Run
from launcher.runtime.emit.listing import EmittedProgram, Listing
from launcher.runtime.programs.collectives import sum_buckets
from launcher.runtime.programs.stage_programs import SharedPrograms, StageProgram
from launcher.schedule import Kind, Task
from launcher.trace import Var


@dataclass(frozen=True, eq=False)
class PipelineEmitter:
    """The tasks of a step.

    Attributes:
        pieces: the step, its stages cut into pieces where they are; `cut` is of these.
        order: all tasks of its stages, in the order of the plan's timeline.
        listing: takes the instructions.
    """

    pieces: Pieces
    order: Sequence[Task]
    listing: Listing
    _ways: dict[str, dict[int, list[Name]]] = field(default_factory=dict)

    @property
    def cut(self) -> PartitionedStep:
        """The step, cut into these stages."""
        return self.pieces.cut

    @functools.cached_property
    def shared(self) -> SharedPrograms:
        """The programs of its stages."""
        return SharedPrograms(self.cut, self.pieces.names)

    @functools.cached_property
    def makers(self) -> dict[Var, list[int]]:
        """The meshes whose stages make each activation."""
        found: dict[Var, list[int]] = {}
        for graph in self.cut.stages:
            for v in graph.activations_out:
                found.setdefault(v, []).append(graph.mesh)
        return found

    @functools.cached_property
    def neighbours(self) -> list[set[int]]:
        """The meshes to which the tasks of each stage may send arrays."""
        found = []
        for graph in self.cut.stages:
            readers = {self.cut.stages[to].mesh for group in graph.consumers for to in group}
            makers = {mesh for v in graph.activations_in for mesh in self.makers[v]}
            found.append((readers | makers) - {graph.mesh})
        return found

    @functools.cached_property
    def programs(self) -> dict[int, dict[Kind, StageProgram]]:
        """The programs of the stages that run here and of those that send something here.

        There are none without a loss.
        """
        here, stages = self.listing.here, self.cut.stages if self.cut.loss.num_layers else ()
        return {
            graph.index: self.shared.programs(graph.index)
            for graph in stages
            if graph.mesh in here or not here.isdisjoint(self.neighbours[graph.index])
        }

    def emit(self) -> dict[Var, tuple[int, int]]:
        """Emit the pipeline.

        Returns:
            The gradients whose sum has taken the place of each replica's: their operands, and the
                slots with the copies.
        """
        if not self.cut.loss.num_layers:
            return {}
        for graph, turn in self.each_stage():
            self.begin(graph, turn)
        self.tasks()
        copies = {}
        for graph, turn in self.each_stage():
            made_of = self.programs[graph.index].values()
            self.reduce(graph, list(made_of), turn)
            for name in (n for made in made_of if made.last for n in made.last.outputs):
                if name.kind == "per_replica":
                    (var,) = self.cut.update.grad_parts[name.of, graph.index]
                    copies[var] = name.of, self.listing.slots.of_stage(name, graph, 0)
        return copies

    def each_stage(self) -> Iterator[tuple[StageGraph, int]]:
        """Give each stage a turn, and return those that run here with theirs."""
        first = self.listing.take_turns(len(self.cut.stages))
        for graph in self.cut.stages:
            if graph.mesh in self.listing.here:
                yield graph, first + graph.index

    def begin(self, graph: StageGraph, turn: int) -> None:
        """Add a stage's programs, and emit the zeroing of its accumulators."""
        listing, programs = self.listing, self.programs[graph.index]
        name, key = self.pieces.names[graph.index], self.shared.key(graph.index)
        for made in (each for one in programs.values() for each in (one, one.last) if each):
            alike = key, made.name.removeprefix(name)
            listing.programs[made.name] = EmittedProgram(made.fun, alike, made.buckets)
            listing.slots.residuals.update(made.residuals)
        names = [name for made in programs.values() for name in made.accumulators]
        if names:
            slots = tuple(listing.slots.of_stage(name, graph, 0) for name in names)
            avals = [listing.slots.slots[slot].aval for slot in slots]
            zeros = f"{name}.zeros"
            made_of = lambda: tuple(jnp.zeros(a.shape, a.dtype) for a in avals)  # noqa: E731
            listing.programs[zeros] = EmittedProgram(made_of, (key, "zeros"))
            listing.run(turn, graph.mesh, zeros, (), slots)

    def tasks(self) -> None:
        """Emit the tasks that run here, and the transfers from and to here.

        Each task has as many turns as any may need: its run, and a transfer to each neighbour.
        """
        width = 1 + max(map(len, self.neighbours))
        first = self.listing.take_turns(width * len(self.order))
        mine = [(k, task) for k, task in enumerate(self.order) if task.stage in self.programs]
        last = {(task.stage, task.kind): k for k, task in mine}
        for k, task in mine:
            made = self.programs[task.stage].get(task.kind)
            if made is not None:
                is_last = k == last[task.stage, task.kind]
                self.task(task, made.last if is_last and made.last else made, first + width * k)

    def task(self, task: Task, made: StageProgram, turn: int) -> None:
        """Emit a task and the transfers of what it makes."""
        graph, m, slots = self.cut.stages[task.stage], task.microbatch, self.listing.slots
        if graph.mesh in self.listing.here:
            inputs = [slots.of_stage(name, graph, m) for name in made.inputs]
            outputs = [slots.of_stage(name, graph, m) for name in made.outputs]
            number = slots.number(m, graph.mesh)
            donated = tuple(1 + k for k in made.in_place)
            of_stage = task.on_stage(self.pieces.stage_of[task.stage])
            self.listing.listed.append(
                Run(
                    graph.mesh,
                    made.name,
                    (number, *inputs),
                    tuple(outputs),
                    donated,
                    of_stage,
                    turn,
                )
            )

        def slot(name: Name, mesh: int) -> int:
            return slots.exchanged(name, mesh, m)

        for n, (mesh, names) in enumerate(self.ways(graph, made).items(), 1):
            self.listing.send(turn + n, graph.mesh, mesh, names, slot)

    def ways(self, graph: StageGraph, made: StageProgram) -> dict[int, list[Name]]:
        """Return what a program makes for other meshes, by the mesh.

        Activations go to the meshes that read them, cotangents to the mesh that made the
        activation. What is used on its own mesh needs no transfer.
        """
        if made.name not in self._ways:
            readers = dict(zip(graph.activations_out, graph.consumers, strict=True))
            found: dict[int, list[Name]] = {}
            for name in made.outputs:
                meshes: Sequence[int] = ()
                if name.kind == "activation":
                    meshes = [self.cut.stages[to].mesh for to in readers[name.of]]
                elif name.kind == "cotangent":
                    meshes = self.makers[name.of[0]]
                for mesh in dict.fromkeys(meshes):
                    if mesh != graph.mesh:
                        found.setdefault(mesh, []).append(name)
            self._ways[made.name] = found
        return self._ways[made.name]

    def reduce(self, graph: StageGraph, programs: Sequence[StageProgram], turn: int) -> None:
        """Emit the sum over the replicas of the gradients that no task program sums."""
        listing = self.listing
        buckets = [b for made in programs for b in made.sync.after_pass]
        if not buckets:
            return
        name = f"{self.pieces.names[graph.index]}.reduce"
        layout = self.cut.layouts[graph.mesh]
        late = [i for bucket in buckets for i in bucket.operands]

        def summed(*parts: Any) -> tuple[Any, ...]:
            found = sum_buckets(layout, buckets, dict(zip(late, parts, strict=True)))
            return tuple(found[i] for i in late)

        alike = self.shared.key(graph.index), "reduce"
        listing.programs[name] = EmittedProgram(summed, alike, tuple(buckets))
        inputs = [listing.slots.of_stage(Name("per_replica", i), graph, 0) for i in late]
        outputs = [listing.slots.of_stage(Name("grad", i), graph, 0) for i in late]
        listing.run(turn, graph.mesh, name, inputs, outputs)
