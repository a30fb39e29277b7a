"""Lower a partitioned step to instruction lists. Pure.

The order is that of the simulated timeline, so that a single thread can issue it and every mesh
gets its work early enough. Each worker has the list of what runs on its own devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from launcher.partition import (
    Bucket,
    Exchanged,
    PartitionedStep,
    Pieces,
    PlanError,
    Segment,
    exchanges,
    in_pieces,
    partition,
    split_segment,
)
from launcher.plan import Plan, ServerExchange, timeline
from launcher.runtime.emit.chain import chained
from launcher.runtime.emit.emit_pipeline import PipelineEmitter
from launcher.runtime.emit.instructions import (
    Exchange,
    ExchangeSpec,
    Free,
    with_donations,
    with_frees,
)
from launcher.runtime.emit.listing import Emitted, EmittedProgram, Listing
from launcher.runtime.emit.slots import Slots
from launcher.runtime.programs.collectives import of_copies
from launcher.runtime.transport.transfer import plain_aval
from launcher.trace import Jaxpr, TracedStep, Var, captured, is_var, jaxpr_as_fun, structure_text


def emit(
    step: TracedStep, plan: Plan, rank: int = 0, devices: AbstractSet[int] | None = None
) -> Emitted:
    """Return the instruction list of a worker, with the tasks in the order of the plan's timeline.

    Its cost grows with the tasks of this worker and its neighbours, plus that of the timeline.

    Args:
        step: the step.
        plan: the plan.
        rank: the number of the worker, where parameter servers sum.
        devices: the worker's devices, by the plan's numbers; None: all of them.

    Raises:
        PlanError: the plan's exchanges are not those of the step.
    """
    here = _here(plan.all_meshes, devices)
    parts = [
        _emit_part(part, one, rank, _here(one.meshes, devices))
        for part, one in zip(step.parts, plan.parts, strict=True)
    ]
    whole = chained(step, plan, parts, here) if step.other_losses else parts[0]
    return _with_lifetimes(whole, step.whole.donated, here)


def _here(meshes: Sequence[tuple[int, ...]], devices: AbstractSet[int] | None) -> AbstractSet[int]:
    """Return the numbers of the meshes that have one of these devices."""
    found = enumerate(meshes)
    return frozenset(m for m, mesh in found if devices is None or not devices.isdisjoint(mesh))


def _emit_part(step: TracedStep, plan: Plan, rank: int, here: AbstractSet[int]) -> Emitted:
    """Return the instructions of one loss, without donations and frees."""
    cut = partition(step.cut_at(plan.layer_ends), plan.assignment)
    pieces = in_pieces(cut)
    order = pieces.tasks([timed.task for timed in timeline(plan)])
    listing = Listing(Slots(pieces.cut), here)
    emitter = _Emitter(pieces, listing, PipelineEmitter(pieces, order, listing), rank)
    return emitter.emit(plan)


def _with_lifetimes(emitted: Emitted, donated: Sequence[bool], here: AbstractSet[int]) -> Emitted:
    """Return the instructions with the donation of buffers and the end of each slot.

    Args:
        emitted: the instructions without.
        donated: for each argument leaf, whether a call may consume it.
        here: the worker's meshes; what is in the slots of others is not its own.
    """
    kept = {slot for slot, _, _ in emitted.results if slot is not None}
    kept |= {slot for _, slot in emitted.constants}
    kept |= {slot for i, slot in emitted.arguments if not donated[i]}
    first = frozenset(slot for _, slot in emitted.arguments)
    lent = kept | {slot for _, slot, _ in emitted.batches}  # may be the caller's own array
    listed = [x for x in emitted.instructions if not isinstance(x, Free)]
    listed = with_donations(listed, emitted.slots, first, frozenset(lent))
    kept |= {number for number, slot in enumerate(emitted.slots) if slot.mesh not in here}
    ended = tuple(with_frees(listed, frozenset(kept)))
    return dataclasses.replace(emitted, instructions=ended)


@dataclass(eq=False)
class _Emitter:
    """What emits a step's instructions.

    Attributes:
        pieces: the step, its stages cut into pieces where they are; `cut` is of these.
        listing: takes the instructions.
        tasks: the tasks of its stages.
        rank: this worker's number.
        copies: see `PipelineEmitter.emit`.
    """

    pieces: Pieces
    listing: Listing
    tasks: PipelineEmitter
    rank: int
    copies: dict[Var, tuple[int, int]] = field(default_factory=dict)

    @property
    def cut(self) -> PartitionedStep:
        return self.pieces.cut

    @property
    def slots(self) -> Slots:
        return self.listing.slots

    def emit(self, plan: Plan) -> Emitted:
        listing, slots, update = self.listing, self.slots, self.cut.update
        arguments = [
            (i, slots.of_outer(v, update.homes[v]))
            for i, v in enumerate(self.cut.step.invars)
            if not self.cut.step.batch[i]
        ]
        programs = self.tasks.programs.values()
        once = [bucket for of in programs for made in of.values() for bucket in made.sync.once]
        first, then = _exchange_instructions(self.cut, slots, once, plan.exchanges)
        self.give()
        self.exchange(first)
        listing.sends(update.argument_sends)
        for i, segment in enumerate(update.before):
            self.segment(f"before.{i}", segment)
        self.copies = self.tasks.emit()
        self.exchange(then)
        listing.sends(update.part_sends)
        for i, segment in enumerate(update.after):
            owners = self.pieces.owners
            for k, one in enumerate(split_segment(segment, owners)):
                self.segment(f"update.{i}.piece.{k}" if owners else f"update.{i}", one)
        results = []
        for atom, mesh in zip(update.outvars, update.out_homes, strict=True):
            slot = slots.of_outer(atom, mesh) if is_var(atom) else None
            results.append((slot, None if is_var(atom) else atom, mesh))
        used = self.used()
        return Emitted(
            slots=tuple(slots.slots),
            programs=listing.programs,
            instructions=tuple(listing.listed),
            turns=listing.turns,
            arguments=tuple(arguments),
            used=frozenset(i for i, _ in arguments if self.cut.step.invars[i] in used),
            batches=tuple(slots.batches),
            constants=tuple(slots.constants),
            results=tuple(results),
            slicing=self.cut.slicing,
            rank=self.rank,
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

    def give(self) -> None:
        """Add the batch leaves and constants that the update program reads whole.

        Several workers gather the leaves, of which each has its own rows.
        """
        for var, mesh in self.cut.update.given:
            if mesh not in self.listing.here:
                continue
            slot = self.slots.of_outer(var, mesh)
            if var in self.cut.step.constants:
                self.slots.constants.append((self.cut.step.constants[var], slot))
            elif self.cut.slicing.workers == 1 or not var.aval.shape:
                self.slots.batches.append((self.cut.step.invars.index(var), slot, None))

    def exchange(self, exchanges: Sequence[Exchange]) -> None:
        for x in exchanges:
            turn = self.listing.take_turns()
            self.listing.listed.append(dataclasses.replace(x, turn=turn))

    def segment(self, name: str, segment: Segment) -> None:
        turn = self.listing.take_turns()
        if segment.mesh in self.listing.here:
            self.own_segment(name, segment, turn)
        self.listing.sends([(v, segment.mesh, to) for v, to in segment.sends])

    def own_segment(self, name: str, segment: Segment, turn: int) -> None:
        of_outer, mesh, layout = self.slots.of_outer, segment.mesh, self.cut.layouts[segment.mesh]
        closed = Jaxpr(segment.inputs, segment.equations, segment.outputs)
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

        alike = None
        if ".piece." in name:
            how = {
                "copies": [(k, layout.operand(i)) for k, (i, _) in copies.items()],
                "held": [id(x) for x in captured(segment.equations)],
            }
            alike = structure_text(closed, how)
        self.listing.programs[name] = EmittedProgram(whole, alike)
        inputs = [of_outer(v, mesh) for v in segment.inputs]
        for k, (_, slot) in copies.items():
            inputs[k] = slot
        self.listing.run(turn, mesh, name, inputs, [of_outer(v, mesh) for v in segment.outputs])


def _exchange_instructions(
    cut: PartitionedStep, slots: Slots, once: Sequence[Bucket], planned: Sequence[ServerExchange]
) -> tuple[list[Exchange], list[Exchange]]:
    """Return the exchanges before the loss and those after it: one instruction each, or none.

    Args:
        cut: the partitioned step.
        slots: its slots.
        once: the buckets of gradients that are summed once a step.
        planned: the exchanges by the plan, with their servers.

    Raises:
        PlanError: they are not those of the step.
    """
    found = exchanges(cut, once)
    own = [(x.when, x.kind, x.dtype, x.nbytes) for x in found]
    servers = cut.assignment.reduction.servers
    if own != [(x.when, x.kind, x.dtype, x.bytes) for x in planned] or not all(
        0 <= x.server < servers for x in planned
    ):
        raise PlanError(
            f"the plan's exchanges are not those of this step on {servers} servers; plan again"
        )
    both = list(zip(found, planned, strict=True))
    before = [(x, _spec(cut, x, by)) for x, by in both if x.when == "before"]
    after = [(x, _spec(cut, x, by)) for x, by in both if x.when != "before"]
    return _instruction(before, slots, cut.slicing.micro_batches), _instruction(after, slots)


def _spec(cut: PartitionedStep, x: Exchanged, by: ServerExchange) -> ExchangeSpec:
    """Return the shape of a part: a sum is flat; of what is gathered a row of bytes a replica."""
    if x.kind == "sum":
        shape: tuple[int, ...] = (sum(v.aval.size for v in x.values),)
    else:
        plain = [plain_aval(v.aval)[0] for v in x.values]
        size = sum(aval.size * aval.dtype.itemsize for aval in plain)
        shape = cut.slicing.own_replicas, size // cut.slicing.replicas
    return ExchangeSpec(by.name, x.kind, shape, x.dtype, by.server)


def _instruction(
    crossing: Sequence[tuple[Exchanged, ExchangeSpec]], slots: Slots, stacked: int = 0
) -> list[Exchange]:
    """Return the instruction; `stacked`: of batch leaves, how many microbatches they hold."""
    values = [v for x, _ in crossing for v in x.values]
    if not crossing:
        return []
    own = slots.of_rows if stacked else slots.of_worker
    return [
        Exchange(
            mesh=0,
            specs=tuple(spec for _, spec in crossing),
            counts=tuple(len(x.values) for x, _ in crossing),
            inputs=tuple(own(v, 0) for v in values),
            outputs=tuple(slots.of_outer(v, 0) for v in values),
            micro_batches=stacked or 1,
        )
    ]
