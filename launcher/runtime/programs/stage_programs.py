"""Build the programs of a stage, one for each kind of task that its schedule has.

A task program over one slice of the batch becomes a program over a microbatch: it takes its slice
of each operand and adds its results and gradients to accumulators. Replicas are a
`jax.vmap(spmd_axis_name=…)` axis of every activation, residual and accumulator, so that the only
data-parallel collectives of a program are those that sum its buckets of gradients. Of equal stages
one is traced (`SharedPrograms`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from launcher.partition import (
    DATA,
    Between,
    Bucket,
    GradientSync,
    Layout,
    Name,
    Operand,
    PartitionedStep,
    Slicing,
    Spec,
    StageGraph,
    TaskProgram,
    accumulator_dtype,
    gathered,
    gathering_less,
    gradient_order,
    is_summed_in_every,
    is_summed_in_place,
    stays_packed,
    without_transposes,
)
from launcher.runtime.programs.collectives import bucket_sums, constrained, of_replicas, with_sums
from launcher.runtime.programs.partial_sums import emitted_locally
from launcher.schedule import Kind
from launcher.trace import Loss, Var, captured

_SUMS = ("result", "grad", "per_replica")


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One program of a stage.

    Accumulators are the last of the inputs and the first of the outputs, in one order, so that each
    can keep its buffer. A result or gradient that is not an input is made afresh: that of the only
    microbatch, or one part for each.

    Attributes:
        name: the program's name.
        fun: `fun(microbatch's number, *inputs) -> outputs`, flat, in the order of the names.
        inputs: the names of what it reads.
        outputs: the names of what it makes.
        residuals: the specs of the residuals that it makes, by their variables.
        sync: how the gradients that it makes are summed over the replicas.
        buckets: those of its buckets that this program sums.
        last: the program of the last microbatch, if that is another one: it also sums the buckets
            of `sync.once`, under its backward pass.
    """

    name: str
    fun: Callable[..., tuple[Any, ...]]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    residuals: Mapping[Var, Spec]
    sync: GradientSync
    buckets: tuple[Bucket, ...]
    last: StageProgram | None = None

    @property
    def accumulators(self) -> tuple[Name, ...]:
        """The inputs that the program adds to."""
        return tuple(name for name in self.inputs if name.kind in _SUMS)

    @property
    def in_place(self) -> tuple[int, ...]:
        """The places among the inputs of the accumulators that it returns."""
        places = range(len(self.inputs))
        return tuple(k for k in places if self.inputs[k] in self.outputs)


def stage_programs(cut: PartitionedStep, stage: int, name: str) -> dict[Kind, StageProgram]:
    """Return the program that a stage runs for each kind of task.

    A kind without a program has nothing to do.

    Args:
        cut: the step.
        stage: the stage.
        name: what the names of its programs begin with.
    """
    of, inside = cut.programs(stage)
    maker = _Maker(cut.loss, cut.update.operands, cut.slicing, cut.layout(stage), cut.leaving)
    together, several = Kind.FORWARD not in of.programs, cut.slicing.micro_batches > 1
    programs: dict[Kind, StageProgram] = {}
    for kind, one_slice in of.programs.items():
        word = kind.value if programs or not together else f"forward_{kind.value}"
        closed = emitted_locally(one_slice.closed, inside, cut.slicing.own_replicas)
        sync = cut.gradient_sync(stage, [gradient_order(one_slice)])
        one_slice = dataclasses.replace(one_slice, closed=closed)
        one_slice = gathering_less(one_slice, cut.layout(stage))
        left = {n.of: inside.spec(n.of) for n in one_slice.outputs if n.kind == "residual"}
        made = maker.program(f"{name}.{word}", one_slice, left, sync, last=not several)
        if several and sync.in_pass(last=True) != made.buckets:
            last = maker.program(f"{made.name}.last", one_slice, left, sync, last=True)
            made = dataclasses.replace(made, last=last)
        programs[kind] = made
    return programs


@dataclass(frozen=True, eq=False)
class _Maker:
    """A maker of programs over a microbatch from task programs over a slice.

    `leaving`: see `PartitionedStep.leaving`.
    """

    loss: Loss
    operands: Sequence[Operand]
    slicing: Slicing
    layout: Layout
    leaving: Set[int]

    def program(
        self,
        name: str,
        one_slice: TaskProgram,
        residuals: Mapping[Var, Spec],
        sync: GradientSync,
        last: bool,
    ) -> StageProgram:
        """Return the program over all replicas' slices of a microbatch.

        Accumulators hold the gradient of each replica until it is summed, and then the sum in its
        place; those of gradients that every microbatch sums hold sums.

        Args:
            name: its name.
            one_slice: what each replica computes.
            residuals: see `StageProgram`.
            sync: see `StageProgram`.
            last: whether it is that of the last microbatch.
        """
        now, made = sync.in_pass(last), one_slice.outputs
        kept = [n for n in made if n.kind in _SUMS and self.is_kept(n)]
        held = [self.accumulator(n) for n in kept]
        form = self.slicing, self.leaving, self.layout.between
        packed = {b for b in now if stays_packed(b, now, *form)}
        sums = bucket_sums(self.layout, now, packed)
        summed = {Name("grad", i): b for b in now for i in b.operands}
        left_as = {n: self.left_as(n, summed.get(n), packed) for n in made}
        left = dict.fromkeys(left_as.values())
        inputs = [*(n for n in one_slice.inputs if n.kind != "seed"), *held]
        reads = [n for n in inputs if n not in summed]
        outputs = [*(n for n in held if n in left), *(n for n in left if n not in held)]

        replicated, closed = self.slicing.own_replicas > 1, one_slice.closed
        if replicated:
            closed = without_transposes(closed)
        computed = with_sums(dataclasses.replace(one_slice, closed=closed), sums)
        gathers = [(Name("operand", i), v) for i, v in gathered(one_slice, self.layout).items()]

        def one(number: Any, *flat: Any) -> tuple[Any, ...]:
            values = dict(zip(reads, flat, strict=True))
            parts = [self.part(n, values.get(n), number) for n in one_slice.inputs]

            def left_of(n: Name, x: Any) -> Any:
                """Return what this microbatch and those before make, given what this one does."""
                x, where = self.widened(x) if n.kind in _SUMS else x, self.accumulator(n)
                return values[where] + x if n in kept and where in values else x

            outs, totals = computed(left_of, *parts)
            return tuple(map(left_of, made, outs)), totals

        fun: Callable[..., Any] = one
        if replicated:
            axes = (None, *(self.replica_axis(n) for n in reads))
            replicas = self.slicing.own_replicas  # said: a stage may read nothing of the batch
            fun = jax.vmap(one, in_axes=axes, axis_size=replicas, spmd_axis_name=DATA)

        def whole(number: Any, *flat: Any) -> tuple[Any, ...]:
            given = dict(zip(inputs, flat, strict=True))
            given.update((n, self.gathered(n, given[n], v.aval.dtype)) for n, v in gathers)
            outs, totals = fun(number, *(given[n] for n in reads))
            values = dict(zip(left_as.values(), outs, strict=True))
            names = [n for each in sums for n in each.names]
            for n, x in zip(names, itertools.chain(*totals), strict=True):
                at = left_as.get(n, n)
                x = of_replicas(self.layout, n.of, x) if at.kind == "grad" else x
                values[at] = given[n] + x if n in given else x
            return tuple(values[n] for n in outputs)

        return StageProgram(name, whole, tuple(inputs), tuple(outputs), residuals, sync, now)

    def left_as(self, name: Name, bucket: Bucket | None, packed: Set[Bucket]) -> Name:
        """Return the name of what a program leaves of a result or gradient.

        Args:
            name: the result or gradient of a microbatch.
            bucket: that which the program sums it in, if it does.
            packed: the buckets whose sums stay packed.
        """
        if bucket in packed:
            return Name("packed", bucket)
        moves = bucket and not is_summed_in_place(self.layout, name.of, self.leaving)
        return name if moves else self.accumulator(name)

    def accumulator(self, name: Name) -> Name:
        """Return the name of an output where the microbatches before are added up.

        It holds each replica's gradient, unless this program sums it.
        """
        later = self.slicing.micro_batches > 1 or self.layout.between is Between.MEMORY
        several = self.slicing.own_replicas > 1 and later
        if name.kind == "grad" and several and not is_summed_in_every(self.layout, name.of):
            return Name("per_replica", name.of)
        return name

    def is_kept(self, name: Name) -> bool:
        """Return whether an accumulator is read and added to, rather than made afresh."""
        word = self.loss.reduce[name.of] if name.kind == "result" else "sum"
        return self.slicing.micro_batches > 1 and word in ("mean", "sum")

    def gathered(self, name: Name, value: Any, dtype: Any) -> Any:
        """Gather a parameter that is kept sharded along `data`, in the type that it is read in."""
        if value.dtype != dtype:
            kept = self.layout.outer(self.operands[name.of].value)
            value = constrained(self.layout, value.astype(dtype), kept)
        return constrained(self.layout, value, self.layout.operand(name.of))

    def widened(self, value: Any) -> Any:
        """Convert a part of a result or gradient to the dtype in which it is accumulated."""
        value = jnp.asarray(value)
        wide = self.slicing.num_slices > 1
        return value.astype(accumulator_dtype(value.dtype)) if wide else value

    def replica_axis(self, name: Name) -> int | None:
        """Return the axis of an input along which its replicas lie; None if they share it."""
        if name.kind != "operand":
            return 0
        return 1 if self.operands[name.of].stacked else None

    def part(self, name: Name, value: Any, number: Any) -> Any:
        """Return an input of a task program as one slice sees it."""
        if name.kind == "seed":
            mean = self.loss.reduce[0] == "mean"
            dtype = self.loss.outvars[0].aval.dtype
            return jnp.asarray(1.0 / self.slicing.num_slices if mean else 1.0, dtype)
        if name.kind != "operand" or self.slicing.num_slices == 1:
            return value
        if self.operands[name.of].stacked:
            row = jax.lax.dynamic_index_in_dim(value, number, 0, keepdims=False)
            axis = self.loss.slice_axes[name.of]
            return jnp.moveaxis(row, 0, axis) if axis else row
        return value


@dataclass(frozen=True, eq=False)
class SharedPrograms:
    """The programs of the stages of a step.

    Attributes:
        cut: the step.
        names: what the names of each stage's programs begin with.
    """

    cut: PartitionedStep
    names: tuple[str, ...]
    _made: dict[str, tuple[StageGraph, dict[Kind, StageProgram]]] = field(default_factory=dict)

    def programs(self, stage: int) -> dict[Kind, StageProgram]:
        """Return the program that a stage runs for each kind of task; see `stage_programs`."""
        graph, key, name = self.cut.stages[stage], self.key(stage), self.names[stage]
        if key not in self._made:
            self._made[key] = graph, stage_programs(self.cut, stage, name)
        first, programs = self._made[key]
        if first is graph:
            return programs
        rename, was = _renamed(first, graph), self.names[first.index]
        return {
            kind: _as_of(program, rename, lambda word: name + word.removeprefix(was))
            for kind, program in programs.items()
        }

    def key(self, stage: int) -> str:
        """Return a key that is equal for stages whose programs are the same functions."""
        cut, layout, apart = self.cut, self.cut.layout(stage), self.cut.leaving
        graph = cut.stages[stage]
        how = [
            (
                layout.is_gathered(i),
                i in apart,
                layout.gradient(i) if (i, stage) in cut.update.grad_parts else None,
                cut.update.operands[i].stacked,
                cut.loss.slice_axes[i],
            )
            for i in graph.operands
        ]
        held = [id(x) for x in captured(graph.equations)]
        words = [cut.loss.reduce[i] for i in graph.results]
        text = repr((cut.likeness(stage), how, words, held))
        return hashlib.sha256(text.encode()).hexdigest()


def _as_of(
    program: StageProgram, rename: Callable[[Name], Name], named: Callable[[str], str]
) -> StageProgram:
    def buckets(given: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        return tuple(rename(Name("packed", bucket)).of for bucket in given)

    return dataclasses.replace(
        program,
        name=named(program.name),
        inputs=tuple(map(rename, program.inputs)),
        outputs=tuple(map(rename, program.outputs)),
        sync=dataclasses.replace(
            program.sync, every=buckets(program.sync.every), once=buckets(program.sync.once)
        ),
        buckets=buckets(program.buckets),
        last=program.last and _as_of(program.last, rename, named),
    )


def _renamed(a: StageGraph, b: StageGraph) -> Callable[[Name], Name]:
    """Return what renames the values of a stage to those of an equal one."""
    operands = dict(zip(a.operands, b.operands, strict=True))
    crossing = dict(zip(a.activations_in, b.activations_in, strict=True))
    crossing |= zip(a.activations_out, b.activations_out, strict=True)
    back = {(v, a.index): (crossing[v], b.index) for v in a.activations_in}
    for v, mine, others in zip(a.activations_out, a.consumers, b.consumers, strict=True):
        back |= {(v, s): (crossing[v], t) for s, t in zip(mine, others, strict=True)}
    values: dict[str, dict[Any, Any]] = {
        **dict.fromkeys(("operand", "grad", "per_replica"), operands),
        "result": dict(zip(a.results, b.results, strict=True)),
        "activation": crossing,
        "cotangent": back,
    }

    def rename(name: Name) -> Name:
        if name.kind == "packed":
            own = tuple(operands[i] for i in name.of.operands)
            return Name("packed", dataclasses.replace(name.of, operands=own))
        return Name(name.kind, values[name.kind][name.of]) if name.kind in values else name

    return rename
