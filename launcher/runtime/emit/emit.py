"""Lower a partitioned step to instruction lists. Pure.

The order is that of the simulated timeline, so that a single thread can issue it and every mesh
gets its work early enough. Each worker has the list of what runs on its own devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import jax.numpy as jnp

from launcher.partition import (
    DATA,
    Between,
    Bucket,
    Exchanged,
    Name,
    PartitionedStep,
    Pieces,
    PlanError,
    Segment,
    StageGraph,
    exchanges,
    in_pieces,
    partition,
    split_segment,
)
from launcher.plan import Plan, ServerExchange, timeline
from launcher.runtime.emit.chain import chained
from launcher.runtime.emit.instructions import (
    Emitted,
    EmittedProgram,
    Exchange,
    ExchangeSpec,
    Run,
    Send,
    Work,
    with_lifetimes,
)
from launcher.runtime.emit.slots import Slots
from launcher.runtime.programs.collectives import bucket_sums, of_replicas, sum_buckets
from launcher.runtime.programs.stage_programs import SharedPrograms, StageProgram
from launcher.runtime.transport.transfer import plain_aval
from launcher.schedule import Kind, Task
from launcher.trace import Jaxpr, TracedStep, Var, captured, is_var, jaxpr_as_fun, structure_text

_T = TypeVar("_T")
# The medium between so many replicas on these devices, by the plan's numbers.
Media: TypeAlias = Callable[[tuple[int, ...], int], Between]


def emit(
    step: TracedStep,
    plan: Plan,
    rank: int = 0,
    devices: AbstractSet[int] | None = None,
    media: Media = lambda devices, replicas: Between.LINKS,
) -> Emitted:
    """Return the instruction list of a worker, with the tasks in the order of the plan's timeline.

    Its cost grows with the tasks of this worker and its neighbours, plus that of the timeline.

    Args:
        step: the step.
        plan: the plan.
        rank: the number of the worker, where parameter servers sum.
        devices: the worker's devices, by the plan's numbers; None: all of them.
        media: returns the medium between the replicas of a mesh.

    Raises:
        PlanError: the plan's exchanges are not those of the step.
    """
    here = _here(plan.all_meshes, devices)
    parts = [
        _emit_part(part, one, rank, _here(one.meshes, devices), media)
        for part, one in zip(step.parts, plan.parts, strict=True)
    ]
    whole = chained(step, plan, parts, here) if step.other_losses else parts[0]
    return with_lifetimes(whole, step.whole.donated, here)


def _here(meshes: Sequence[tuple[int, ...]], devices: AbstractSet[int] | None) -> AbstractSet[int]:
    """Return the numbers of the meshes that have one of these devices."""
    numbered = enumerate(meshes)
    return frozenset(m for m, mesh in numbered if devices is None or not devices.isdisjoint(mesh))


def _emit_part(
    step: TracedStep, plan: Plan, rank: int, here: AbstractSet[int], media: Media
) -> Emitted:
    """Return the instructions of one loss, without donations and frees."""
    cut = partition(step.cut_at(plan.layer_ends), plan.assignment)
    for layout, mesh in zip(cut.layouts, plan.meshes, strict=True):
        layout.between = media(mesh, layout.sizes[DATA])
    pieces = in_pieces(cut)
    order = pieces.tasks([timed.task for timed in timeline(plan)])
    return _Emitter(pieces, order, here, rank, Slots(pieces.cut)).emit(plan.exchanges)


@dataclass(frozen=True, eq=False)
class _Summed:
    """Gradients in the form that the pass leaves in which they are summed.

    Attributes:
        slot: what holds them: each replica's copy of one, or a bucket packed.
        gradients: the gradients.
        read: returns them, given what the slot holds.
        how: a key that is equal where they are read alike.
    """

    slot: int
    gradients: tuple[Var, ...]
    read: Callable[[Any], Sequence[Any]]
    how: object


@dataclass(eq=False)
class _Emitter:
    """One worker's instructions so far, and what emits them.

    Every instruction of the step has its turn, whether it is listed here or not, so that what
    several workers do together has the same turn in all their lists. Some turns may be nobody's.

    Attributes:
        pieces: the step, its stages cut into pieces where they are; `cut` is of these.
        order: all tasks of its stages, in the order of the plan's timeline.
        here: the meshes on which the worker has a device.
        rank: the worker's number.
        slots: the slots of the worker's own arrays, and of the far ends of its transfers.
        turns: the number of turns so far.
        listed: the instructions.
        programs: see `Emitted`.
        summed: where the sums of gradients are that their stages leave as no value of the update.
    """

    pieces: Pieces
    order: Sequence[Task]
    here: AbstractSet[int]
    rank: int
    slots: Slots
    turns: int = 0
    listed: list[Work] = field(default_factory=list)
    programs: dict[str, EmittedProgram] = field(default_factory=dict)
    summed: dict[Var, _Summed] = field(default_factory=dict)

    @property
    def cut(self) -> PartitionedStep:
        return self.pieces.cut

    def emit(self, planned: Sequence[ServerExchange]) -> Emitted:
        """Emit the step; `planned`: the plan's exchanges, with their servers."""
        slots, step, update = self.slots, self.cut.step, self.cut.update
        arguments = [
            (i, slots.of_outer(v, update.homes[v]))
            for i, v in enumerate(step.invars)
            if not step.batch[i]
        ]
        before, after = self.planned_exchanges(planned)
        self.give()
        self.exchange(before)
        self.sends(update.argument_sends)
        for i, segment in enumerate(update.before):
            self.segment(f"before.{i}", segment)
        self.pipeline()
        self.exchange(after)
        self.sends(update.part_sends)
        owners = self.pieces.owners
        for i, segment in enumerate(update.after):
            for k, one in enumerate(split_segment(segment, owners)):
                self.segment(f"update.{i}.piece.{k}" if owners else f"update.{i}", one)
        results = [
            (slots.of_outer(atom, mesh), None, mesh) if is_var(atom) else (None, atom, mesh)
            for atom, mesh in zip(update.outvars, update.out_homes, strict=True)
        ]
        used = self.used()
        return Emitted(
            slots=tuple(slots.slots),
            programs=self.programs,
            instructions=tuple(self.listed),
            turns=self.turns,
            arguments=tuple(arguments),
            used=frozenset(i for i, _ in arguments if step.invars[i] in used),
            batches=tuple(slots.batches),
            constants=tuple(slots.constants),
            results=tuple(results),
        )

    def used(self) -> AbstractSet[Any]:
        """Return the values that something reads, whichever worker, or that are results."""
        update, operands = self.cut.update, self.cut.update.operands
        return {
            *(operands[i].value for graph in self.cut.stages for i in graph.operands),
            *(v for segment in (*update.before, *update.after) for v in segment.inputs),
            *(v for v, _, _ in (*update.argument_sends, *update.part_sends)),
            *filter(is_var, update.outvars),
        }

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
        self, turn: int, src: int, dst: int, values: Sequence[_T], slot: Callable[[_T, int], int]
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

    # -- around the pipeline ---------------------------------------------------------------------

    def give(self) -> None:
        """Add the batch leaves and constants that the update program reads whole.

        Several workers gather the leaves, of which each has its own rows.
        """
        for var, mesh in self.cut.update.given:
            if mesh not in self.here:
                continue
            slot = self.slots.of_outer(var, mesh)
            if var in self.cut.step.constants:
                self.slots.constants.append((self.cut.step.constants[var], slot))
            elif self.cut.slicing.workers == 1 or not var.aval.shape:
                self.slots.batches.append((self.cut.step.invars.index(var), slot, None))

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

    def planned_exchanges(
        self, planned: Sequence[ServerExchange]
    ) -> tuple[Exchange | None, Exchange | None]:
        """Return the exchange before the loss and the one after it, as far as there are any.

        Raises:
            PlanError: those of the plan are not those of the step.
        """
        programs = self.stage_programs.values()
        once = [bucket for of in programs for made in of.values() for bucket in made.sync.once]
        own = exchanges(self.cut, once)
        kinds = [(x.when, x.kind, x.dtype, x.nbytes) for x in own]
        servers = range(self.cut.assignment.reduction.servers)
        fit = kinds == [(x.when, x.kind, x.dtype, x.bytes) for x in planned]
        if not fit or any(x.server not in servers for x in planned):
            raise PlanError("the plan's exchanges are not those of this step; plan again")
        both = list(zip(own, planned, strict=True))
        return (
            self.exchanged([pair for pair in both if pair[0].when == "before"], before=True),
            self.exchanged([pair for pair in both if pair[0].when != "before"], before=False),
        )

    def exchanged(
        self, crossing: Sequence[tuple[Exchanged, ServerExchange]], before: bool
    ) -> Exchange | None:
        """Return the instruction of what crosses together; `before`: of batch leaves."""
        if not crossing:
            return None
        values = [v for x, _ in crossing for v in x.values]
        own = self.slots.of_rows if before else self.slots.of_worker
        return Exchange(
            mesh=0,
            specs=tuple(_spec(self.cut, x, by) for x, by in crossing),
            counts=tuple(len(x.values) for x, _ in crossing),
            inputs=tuple(own(v, 0) for v in values),
            outputs=tuple(self.slots.of_outer(v, 0) for v in values),
            micro_batches=self.cut.slicing.micro_batches if before else 1,
        )

    def exchange(self, x: Exchange | None) -> None:
        if x is not None:
            self.listed.append(replace(x, turn=self.take_turns()))

    def segment(self, name: str, segment: Segment) -> None:
        turn = self.take_turns()
        if segment.mesh in self.here:
            self.own_segment(name, segment, turn)
        self.sends([(v, segment.mesh, to) for v, to in segment.sends])

    def own_segment(self, name: str, segment: Segment, turn: int) -> None:
        of_outer, mesh = self.slots.of_outer, segment.mesh
        closed = Jaxpr(segment.inputs, segment.equations, segment.outputs)
        fun = jaxpr_as_fun(closed)
        sums = list(dict.fromkeys(self.summed[v] for v in segment.inputs if v in self.summed))
        given = [v for v in segment.inputs if v not in self.summed]
        stacked = {k for k, v in enumerate(segment.outputs) if self.slots.is_stacked(v)}
        own, rank = self.cut.slicing.own, self.rank  # not the emitter itself: it holds the programs

        def whole(*values: Any) -> tuple[Any, ...]:
            known = dict(zip(given, values, strict=False))
            for each, x in zip(sums, values[len(given) :], strict=True):
                known.update(zip(each.gradients, each.read(x), strict=True))
            outs = fun(*(known[v] for v in segment.inputs))
            return tuple(own(x, rank) if k in stacked else x for k, x in enumerate(outs))

        alike = None
        if ".piece." in name:
            numbers = {v: k for k, v in enumerate(segment.inputs)}
            how = {
                "sums": [([numbers.get(v) for v in x.gradients], x.how) for x in sums],
                "held": [id(x) for x in captured(segment.equations)],
            }
            alike = structure_text(closed, how)
        self.programs[name] = EmittedProgram(whole, alike)
        inputs = [*(of_outer(v, mesh) for v in given), *(each.slot for each in sums)]
        self.run(turn, mesh, name, inputs, [of_outer(v, mesh) for v in segment.outputs])

    # -- the pipeline: the tasks of all microbatches ---------------------------------------------

    @functools.cached_property
    def shared(self) -> SharedPrograms:
        """The programs of its stages."""
        return SharedPrograms(self.cut, self.pieces.names)

    @functools.cached_property
    def makers(self) -> dict[Var, list[int]]:
        """The meshes whose stages make each activation."""
        meshes: dict[Var, list[int]] = {}
        for graph in self.cut.stages:
            for v in graph.activations_out:
                meshes.setdefault(v, []).append(graph.mesh)
        return meshes

    @functools.cached_property
    def neighbours(self) -> list[set[int]]:
        """The meshes to which the tasks of each stage may send arrays."""
        neighbours = []
        for graph in self.cut.stages:
            readers = {self.cut.stages[to].mesh for group in graph.consumers for to in group}
            makers = {mesh for v in graph.activations_in for mesh in self.makers[v]}
            neighbours.append((readers | makers) - {graph.mesh})
        return neighbours

    @functools.cached_property
    def stage_programs(self) -> dict[int, dict[Kind, StageProgram]]:
        """The programs of the stages that run here and of those that send something here.

        There are none without a loss.
        """
        here, stages = self.here, self.cut.stages if self.cut.loss.num_layers else ()
        return {
            graph.index: self.shared.programs(graph.index)
            for graph in stages
            if graph.mesh in here or not here.isdisjoint(self.neighbours[graph.index])
        }

    def pipeline(self) -> None:
        """Emit the pipeline, if there is a loss."""
        if not self.cut.loss.num_layers:
            return
        for graph, turn in self.each_stage():
            self.begin(graph, turn)
        self.tasks()
        for graph, turn in self.each_stage():
            programs = self.stage_programs[graph.index].values()
            self.reduce(graph, [b for made in programs for b in made.sync.after_pass], turn)
            for made in programs:
                self.keep_sums(graph, made.last or made)

    def keep_sums(self, graph: StageGraph, made: StageProgram) -> None:
        """Note where a stage's last backward pass leaves sums that are not yet gradients."""
        layout, left = self.cut.layouts[graph.mesh], set(made.outputs)
        packed = {name.of for name in left if name.kind == "packed"}
        for each in bucket_sums(layout, made.buckets, packed):
            operands = each.bucket.operands
            if each.stays_packed:
                self.keep(graph, Name("packed", each.bucket), operands, each.gradients)
            for i in operands:
                if (name := Name("per_replica", i)) in left:
                    self.keep(graph, name, (i,), lambda x, _, i=i: [of_replicas(layout, i, x)])

    def keep(
        self, graph: StageGraph, name: Name, operands: Sequence[int], read: Callable[..., Any]
    ) -> None:
        """Note that a stage leaves the sums of these operands' gradients as `name`."""
        layout, grads = self.cut.layouts[graph.mesh], self.cut.update.grad_parts
        parts = tuple(grads[i, graph.index][0] for i in operands)
        avals = [v.aval for v in parts]
        cut = [(layout.operand(i), layout.gradient(i)) for i in operands]
        kind = (name.of.collective, name.of.dtype) if name.kind == "packed" else name.kind
        slot = self.slots.of_stage(name, graph, 0)
        one = _Summed(slot, parts, lambda x: read(x, avals), (kind, avals, cut))
        self.summed.update(dict.fromkeys(parts, one))

    def each_stage(self) -> Iterator[tuple[StageGraph, int]]:
        """Give each stage a turn, and return those that run here with theirs."""
        first = self.take_turns(len(self.cut.stages))
        for graph in self.cut.stages:
            if graph.mesh in self.here:
                yield graph, first + graph.index

    def begin(self, graph: StageGraph, turn: int) -> None:
        """Add a stage's programs, and emit the zeroing of its accumulators."""
        programs = self.stage_programs[graph.index]
        name, key = self.pieces.names[graph.index], self.shared.key(graph.index)
        for made in (each for one in programs.values() for each in (one, one.last) if each):
            alike = key, made.name.removeprefix(name)
            self.programs[made.name] = EmittedProgram(made.fun, alike, made.buckets)
            self.slots.residuals.update(made.residuals)
        names = [name for made in programs.values() for name in made.accumulators]
        if names:
            slots = tuple(self.slots.of_stage(name, graph, 0) for name in names)
            avals = [self.slots.slots[slot].aval for slot in slots]

            def zeros() -> tuple[Any, ...]:
                return tuple(jnp.zeros(a.shape, a.dtype) for a in avals)

            self.programs[f"{name}.zeros"] = EmittedProgram(zeros, (key, "zeros"))
            self.run(turn, graph.mesh, f"{name}.zeros", (), slots)

    def tasks(self) -> None:
        """Emit the tasks that run here, and the transfers from and to here.

        Each task has as many turns as any may need: its run, and a transfer to each neighbour.
        """
        width = 1 + max(map(len, self.neighbours))
        first = self.take_turns(width * len(self.order))
        mine = [(k, task) for k, task in enumerate(self.order) if task.stage in self.stage_programs]
        last = {(task.stage, task.kind): k for k, task in mine}
        ways: dict[str, dict[int, list[Name]]] = {}
        for k, task in mine:
            if (made := self.stage_programs[task.stage].get(task.kind)) is None:
                continue
            if made.last and k == last[task.stage, task.kind]:
                made = made.last
            if made.name not in ways:
                ways[made.name] = self.ways(self.cut.stages[task.stage], made)
            self.task(task, made, ways[made.name], first + width * k)

    def task(self, task: Task, made: StageProgram, ways: dict[int, list[Name]], turn: int) -> None:
        """Emit a task and the transfers of what it makes; `ways`: see the method."""
        graph, m, slots = self.cut.stages[task.stage], task.microbatch, self.slots
        if graph.mesh in self.here:
            inputs = [slots.of_stage(name, graph, m) for name in made.inputs]
            outputs = tuple(slots.of_stage(name, graph, m) for name in made.outputs)
            inputs.insert(0, slots.number(m, graph.mesh))
            donated = tuple(1 + k for k in made.in_place)
            of_stage = task.on_stage(self.pieces.stage_of[task.stage])
            run = Run(graph.mesh, made.name, tuple(inputs), outputs, donated, of_stage, turn)
            self.listed.append(run)

        def slot(name: Name, mesh: int) -> int:
            return slots.exchanged(name, mesh, m)

        for n, (mesh, names) in enumerate(ways.items(), 1):
            self.send(turn + n, graph.mesh, mesh, names, slot)

    def ways(self, graph: StageGraph, made: StageProgram) -> dict[int, list[Name]]:
        """Return what a program makes for other meshes, by the mesh.

        Activations go to the meshes that read them, cotangents to the mesh that made the
        activation. What is used on its own mesh needs no transfer.
        """
        readers = dict(zip(graph.activations_out, graph.consumers, strict=True))
        ways: dict[int, list[Name]] = {}
        for name in made.outputs:
            meshes: Sequence[int] = ()
            if name.kind == "activation":
                meshes = [self.cut.stages[to].mesh for to in readers[name.of]]
            elif name.kind == "cotangent":
                meshes = self.makers[name.of[0]]
            for mesh in dict.fromkeys(meshes):
                if mesh != graph.mesh:
                    ways.setdefault(mesh, []).append(name)
        return ways

    def reduce(self, graph: StageGraph, buckets: Sequence[Bucket], turn: int) -> None:
        """Emit the sum over the replicas of the gradients that no task program sums."""
        if not buckets:
            return
        name = f"{self.pieces.names[graph.index]}.reduce"
        layout = self.cut.layouts[graph.mesh]
        late = [i for bucket in buckets for i in bucket.operands]
        inputs = [self.slots.of_stage(Name("per_replica", i), graph, 0) for i in late]
        outputs = [self.slots.of_stage(Name("grad", i), graph, 0) for i in late]
        if layout.between is Between.MEMORY:
            dtypes = [bucket.dtype for bucket in buckets for _ in bucket.operands]
            shapes = [self.slots.slots[slot].aval.shape for slot in outputs]
            specs = (ExchangeSpec(name, "sum", *x) for x in zip(shapes, dtypes, strict=True))
            slots = (1,) * len(late), tuple(inputs), tuple(outputs)
            self.listed.append(Exchange(graph.mesh, tuple(specs), *slots, turn=turn))
            return

        def summed(*parts: Any) -> tuple[Any, ...]:
            sums = sum_buckets(layout, buckets, dict(zip(late, parts, strict=True)))
            return tuple(sums[i] for i in late)

        alike = self.shared.key(graph.index), "reduce"
        self.programs[name] = EmittedProgram(summed, alike, tuple(buckets))
        self.run(turn, graph.mesh, name, inputs, outputs)


def _spec(cut: PartitionedStep, x: Exchanged, by: ServerExchange) -> ExchangeSpec:
    """Return the shape of a part: a sum is flat; of what is gathered a row of bytes a replica."""
    if x.kind == "sum":
        shape: tuple[int, ...] = (sum(v.aval.size for v in x.values),)
    else:
        plain = [plain_aval(v.aval)[0] for v in x.values]
        size = sum(aval.size * aval.dtype.itemsize for aval in plain)
        shape = cut.slicing.own_replicas, size // cut.slicing.replicas
    return ExchangeSpec(by.name, x.kind, shape, x.dtype, by.server)
