"""The programs of one stage, one for each kind of task that its schedule has.

A task program over one slice of the batch becomes a program over a microbatch: it takes its slice
of each operand and adds its results and gradients to accumulators. Replicas are a
`jax.vmap(spmd_axis_name=…)` axis of every activation, residual and accumulator, so that a backward
program holds no data-parallel collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from launcher.partition.joint_graph import Name
from launcher.partition.partitioned import PartitionedStep
from launcher.partition.sharding.layout import DATA, Layout
from launcher.partition.sharding.named_dims import Spec
from launcher.partition.slicing import Slicing, accumulator_dtype
from launcher.partition.task_programs import TaskProgram
from launcher.partition.update import Operand
from launcher.runtime.collectives import constrained, scatter
from launcher.runtime.partial_sums import emitted_locally
from launcher.schedule import Kind
from launcher.trace import Loss
from launcher.trace.jaxpr import Var

_SUMS = ("result", "grad", "unsummed")


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
    """

    name: str
    fun: Callable[..., tuple[Any, ...]]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    residuals: Mapping[Var, Spec]

    @property
    def accumulators(self) -> tuple[Name, ...]:
        """The inputs that the program adds to and returns."""
        return tuple(name for name in self.inputs if name.kind in _SUMS)


def stage_programs(cut: PartitionedStep, stage: int) -> dict[Kind, StageProgram]:
    """Return the program that a stage runs for each kind of task.

    A kind without a program has nothing to do.
    """
    of, inside = cut.programs(stage)
    maker = _Maker(cut.loss, cut.update.operands, cut.slicing, cut.layout(stage))
    together = Kind.FORWARD not in of.programs
    found: dict[Kind, StageProgram] = {}
    for kind, one_slice in of.programs.items():
        word = kind.value if found or not together else f"forward_{kind.value}"
        closed = emitted_locally(one_slice.closed, inside, cut.slicing.replicas)
        one_slice = dataclasses.replace(one_slice, closed=closed)
        left = {n.of: inside.spec(n.of) for n in one_slice.outputs if n.kind == "residual"}
        found[kind] = maker.program(f"stage.{stage}.{word}", one_slice, left)
    return found


@dataclass(frozen=True, eq=False)
class _Maker:
    """A maker of programs over a microbatch from task programs over a slice."""

    loss: Loss
    operands: Sequence[Operand]
    slicing: Slicing
    layout: Layout

    def program(
        self, name: str, one_slice: TaskProgram, residuals: Mapping[Var, Spec]
    ) -> StageProgram:
        """Return the program over all replicas' slices of a microbatch, with its accumulators."""
        late = {n: Name("unsummed", n.of) for n in one_slice.outputs if self.is_late(n)}
        made = [late.get(n, n) for n in one_slice.outputs]
        kept = [n for n in made if n.kind in _SUMS and self.is_kept(n)]
        inputs = [*(n for n in one_slice.inputs if n.kind != "seed"), *kept]
        outputs = [*kept, *(n for n in made if n not in kept)]

        def one(number: Any, *flat: Any) -> tuple[Any, ...]:
            values = dict(zip(inputs, flat, strict=False))
            parts = [self.part(n, values.get(n), number) for n in one_slice.inputs]
            outs = zip(made, one_slice.fun(*parts), strict=True)
            return tuple(self.widened(x) if n.kind in _SUMS else x for n, x in outs)

        fun, reads = one, len(inputs) - len(kept)
        if self.slicing.replicas > 1:
            axes = (None, *(self.replica_axis(n) for n in inputs[:reads]))
            replicas = self.slicing.replicas  # said: a stage may read nothing of the batch
            fun = jax.vmap(one, in_axes=axes, axis_size=replicas, spmd_axis_name=DATA)

        def whole(number: Any, *flat: Any) -> tuple[Any, ...]:
            read = [self.gathered(n, x) for n, x in zip(inputs[:reads], flat, strict=False)]
            outs = fun(number, *read)
            values = {n: self.summed(n, x) for n, x in zip(made, outs, strict=True)}
            for n, accumulated in zip(kept, flat[reads:], strict=True):
                values[n] = accumulated + values[n]
            return tuple(values[n] for n in outputs)

        return StageProgram(name, whole, tuple(inputs), tuple(outputs), residuals)

    def is_kept(self, name: Name) -> bool:
        """Return whether an accumulator is read and added to, rather than made afresh."""
        word = self.loss.reduce[name.of] if name.kind == "result" else "sum"
        return self.slicing.micro_batches > 1 and word in ("mean", "sum")

    def is_late(self, name: Name) -> bool:
        """Return whether a gradient stays unsummed over the replicas until the pipeline is done.

        The gradient of a parameter that every task program gathers is also summed in every task
        program, since it may not fit in memory unsharded.
        """
        several = self.slicing.micro_batches > 1
        scattered = name.kind == "grad" and self.layout.is_scattered(name.of)
        return scattered and several and not self.layout.is_gathered(name.of)

    def summed(self, name: Name, value: Any) -> Any:
        """Sum a gradient that ends up sharded along the replicas; each replica keeps its shard."""
        if name.kind == "grad" and self.layout.is_scattered(name.of):
            return scatter(self.layout, name.of, value)
        return value

    def gathered(self, name: Name, value: Any) -> Any:
        """Gather a parameter that is kept sharded along `data`."""
        if name.kind == "operand" and self.layout.is_gathered(name.of):
            return constrained(self.layout, value, self.layout.operand(name.of))
        return value

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
