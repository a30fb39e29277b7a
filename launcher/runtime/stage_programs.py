"""The programs of one stage, one for each kind of task that its schedule has.

A pass over one slice of the batch (`runtime.passes`) becomes a program over a microbatch: it takes
its slice of each operand and adds its results and gradients to accumulators. Replicas are a
`jax.vmap(spmd_axis_name=…)` axis of every activation, residual and accumulator, so that a backward
program holds no data-parallel collective. Used by `runtime.emit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from launcher.plan.outer import Operand, Slicing, accumulator_dtype
from launcher.plan.schedule import Kind, Task, backward_follows
from launcher.plan.stages import StageGraph
from launcher.runtime.joint import Name, trace_joint
from launcher.runtime.passes import Pass, cut, outputs_by_kind
from launcher.trace.step import Loss

DATA = "data"  # the mesh axis of the replicas
_SUMS = ("result", "grad")


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One program: `fun(microbatch's number, *inputs) -> outputs`, flat, in the order of the names.

    Accumulators are the last of the inputs and the first of the outputs, in one order, so that each
    can keep its buffer. A result or gradient that is no input is made afresh: of the only
    microbatch, or a part for each.
    """

    name: str
    fun: Callable[..., tuple[Any, ...]]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]

    @property
    def accumulators(self) -> tuple[Name, ...]:
        """The inputs that the program adds to and gives back."""
        return tuple(name for name in self.inputs if name.kind in _SUMS)


def stage_programs(
    graph: StageGraph,
    loss: Loss,
    operands: Sequence[Operand],
    slicing: Slicing,
    remat: str,
    results: Sequence[int],
    grads: Sequence[int],
    tasks: Sequence[Task],
) -> dict[Kind, StageProgram]:
    """The program that a stage runs for each kind of task; a kind without one has nothing to do.

    Args:
        operands: what holds each of the loss's. results, grads: those that the step uses.
        tasks: of the stage's mesh, in order.
    """
    maker = _Maker(loss, operands, slicing)
    kinds = {task.kind for task in tasks if task.stage == graph.index}
    together = not graph.activations_out and backward_follows(tasks, graph.index)
    joint = trace_joint(
        graph,
        loss,
        [i for i in graph.wrt if i in grads],
        [i for i in graph.operands if maker.varies(i)],
        "none" if together else remat,  # what is used at once need not be computed again
        open_checkpoints=Kind.BACKWARD_WEIGHT in kinds,
    )
    found: dict[Kind, StageProgram] = {}
    for kind, one_slice in cut(joint, outputs_by_kind(joint, results, kinds, together)).items():
        word = kind.value if found or not together else f"forward_{kind.value}"
        found[kind] = maker.program(f"stage.{graph.index}.{word}", one_slice)
    return found


@dataclass(frozen=True, eq=False)
class _Maker:
    """Makes programs over a microbatch out of passes over a slice."""

    loss: Loss
    operands: Sequence[Operand]
    slicing: Slicing

    def varies(self, i: int) -> bool:
        """Whether an operand differs from slice to slice; of the only slice: may be data."""
        if self.slicing.num_slices == 1:
            return i not in self.loss.wrt
        return self.operands[i].stacked or self.loss.keys[i]

    def program(self, name: str, one_slice: Pass) -> StageProgram:
        """All replicas' slices of a microbatch, and its accumulators."""
        sums = [n for n in one_slice.outputs if n.kind in _SUMS]
        kept = [n for n in sums if self.is_kept(n)]
        inputs = [*(n for n in one_slice.inputs if n.kind != "seed"), *kept]
        outputs = [*kept, *(n for n in one_slice.outputs if n not in kept)]

        def one(number: Any, replica: Any, *flat: Any) -> tuple[Any, ...]:
            values = dict(zip(inputs, flat, strict=True))
            parts = [self.part(n, values.get(n), number, replica) for n in one_slice.inputs]
            made = dict(zip(one_slice.outputs, one_slice.fun(*parts), strict=True))
            for n in sums:
                made[n] = self.widened(made[n])
            for n in kept:
                made[n] = values[n] + made[n]
            return tuple(made[n] for n in outputs)

        fun, replicas = one, self.slicing.replicas
        if replicas > 1:
            axes = (None, 0, *(self.replica_axis(n) for n in inputs))
            fun = jax.vmap(one, in_axes=axes, spmd_axis_name=DATA)

        def whole(number: Any, *flat: Any) -> tuple[Any, ...]:
            return fun(number, jnp.arange(replicas) if replicas > 1 else 0, *flat)

        return StageProgram(name, whole, tuple(inputs), tuple(outputs))

    def is_kept(self, name: Name) -> bool:
        """Whether an accumulator is read and added to, rather than made afresh."""
        word = self.loss.reduce[name.of] if name.kind == "result" else "sum"
        return self.slicing.micro_batches > 1 and word in ("mean", "sum")

    def widened(self, value: Any) -> Any:
        """A part of a result or gradient as it is accumulated."""
        value = jnp.asarray(value)
        wide = self.slicing.num_slices > 1
        return value.astype(accumulator_dtype(value.dtype)) if wide else value

    def replica_axis(self, name: Name) -> int | None:
        """Where an input has its replicas; None: they share it."""
        if name.kind != "operand":
            return 0
        return 1 if self.operands[name.of].stacked else None

    def part(self, name: Name, value: Any, number: Any, replica: Any) -> Any:
        """An input of a pass as one slice sees it."""
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
        if self.loss.keys[name.of]:
            return jax.random.fold_in(value, number * self.slicing.replicas + replica)
        return value
