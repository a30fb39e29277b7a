"""Number a step's values: one slot for each, on each mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from launcher.partition import DATA, Axis, Name, PartitionedStep, Spec, StageGraph, packed_form
from launcher.runtime.emit.instructions import Slot
from launcher.trace import Var


@dataclass(eq=False)
class Slots:
    """The slots of one step, each made when it is first asked for.

    Attributes:
        cut: the partitioned step.
        residuals: the specs of the stages' residuals.
        slots: what each slot holds.
        constants: see `emit.Emitted`.
        batches: see `emit.Emitted`.
    """

    cut: PartitionedStep
    residuals: dict[Var, Spec] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    constants: list[tuple[Any, int]] = field(default_factory=list)
    batches: list[tuple[int, int, int | None]] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _parts: dict[Var, tuple[str, int]] = field(default_factory=dict)
    _specs: dict[tuple[Var, int], Spec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, operand in enumerate(self.cut.update.operands):
            if operand.stacked and not operand.host:
                self._parts[operand.value] = "stacked", i
        for (i, _), parts in self.cut.update.result_parts.items():
            self._parts.update((var, ("result", i)) for var in parts)
        for (i, _), parts in self.cut.update.grad_parts.items():
            self._parts.update((var, ("grad", i)) for var in parts)

    def of_outer(self, var: Var, mesh: int) -> int:
        """Return the slot of a value of the update program on a mesh."""
        key = "outer", var, mesh
        if key not in self._numbers:
            aval = self._own(var.aval) if self.is_stacked(var) else var.aval
            self._slot(key, mesh, aval, self._outer_spec(var, mesh))
        return self._numbers[key]

    def is_stacked(self, var: Var) -> bool:
        """Return whether a value is cut into slices, of which each worker holds its own."""
        return self._parts.get(var, ("", 0))[0] == "stacked"

    def of_rows(self, leaf: Var, mesh: int) -> int:
        """Return the slot of the rows of a batch leaf that this worker has, stacked."""
        aval = jax.ShapeDtypeStruct(leaf.aval.shape, leaf.aval.dtype)
        spec = (None, *self._replica_axis(), *(None for _ in aval.shape))
        return self._of_leaf(leaf, mesh, 0, aval, spec)

    def number(self, microbatch: int, mesh: int) -> int:
        """Return the slot of a microbatch's number, which is a constant."""
        key = ("number", microbatch, mesh)
        if key not in self._numbers:
            slot = self._slot(key, mesh, jax.ShapeDtypeStruct((), np.int32), ())
            self.constants.append((np.int32(microbatch), slot))
        return self._numbers[key]

    def of_stage(self, name: Name, graph: StageGraph, microbatch: int) -> int:
        """Return the slot of a value that a program of a stage reads or makes."""
        if name.kind == "operand":
            return self._operand(name.of, graph.mesh)
        if name.kind in ("result", "grad"):
            part = self._part(name, graph, microbatch)
            several = self.cut.slicing.workers > 1
            return self.of_worker(part, graph.mesh) if several else self.of_outer(part, graph.mesh)
        if name.kind == "per_replica":
            (part,) = self.cut.update.grad_parts[name.of, graph.index]
            spec = self.cut.layouts[graph.mesh].operand(name.of)
            return self._per_replica((name, graph.index), graph.mesh, part.aval, spec)
        if name.kind == "packed":
            count, spec = packed_form(name.of, self.cut.layouts[graph.mesh])
            aval = jax.ShapeDtypeStruct((count,), name.of.dtype)
            return self._per_replica((name, graph.index), graph.mesh, aval, spec)
        if name.kind == "residual":
            spec = self.residuals[name.of]
            return self._per_replica(
                (name, graph.index, microbatch), graph.mesh, name.of.aval, spec
            )
        return self.exchanged(name, graph.mesh, microbatch)

    def of_worker(self, part: Var, mesh: int) -> int:
        """Return the slot of a worker's share of what its stage leaves behind."""
        kind, i = self._parts[part]
        if kind == "grad":
            spec = self.cut.layouts[mesh].gradient(i)
            return self._slot(("worker", part), mesh, part.aval, spec)
        lead = (n,) if (n := self.cut.slicing.own_replicas) > 1 else ()
        aval = jax.ShapeDtypeStruct((*lead, *part.aval.shape[1:]), part.aval.dtype)
        return self._slot(("worker", part), mesh, aval, self._replica_axis())

    def exchanged(self, name: Name, mesh: int, microbatch: int) -> int:
        """Return the slot of an activation or a cotangent on a mesh."""
        key = name, microbatch, mesh
        if key in self._numbers:
            return self._numbers[key]
        var = name.of if name.kind == "activation" else name.of[0]
        if (var, mesh) not in self._specs:
            self._specs[var, mesh] = self.cut.layouts[mesh].activation(var)
        return self._per_replica(key, mesh, var.aval, self._specs[var, mesh])

    def _part(self, name: Name, graph: StageGraph, microbatch: int) -> Var:
        """Return the variable that holds a stage's share of a result or a gradient.

        It is an accumulator, or one part for each microbatch.
        """
        update = self.cut.update
        parts = update.result_parts if name.kind == "result" else update.grad_parts
        variables = parts[name.of, graph.index]
        return variables[microbatch if len(variables) > 1 else 0]

    def _operand(self, index: int, mesh: int) -> int:
        operand = self.cut.update.operands[index]
        if not operand.host:
            return self.of_outer(operand.value, mesh)
        axis = self.cut.loss.slice_axes[index]
        spec = self.cut.layouts[mesh].operand(index)
        if axis is not None:
            spec = self._stacked(index, mesh)
        aval = operand.value.aval
        whole = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return self._of_leaf(operand.value, mesh, axis, whole, spec)

    def _of_leaf(self, leaf: Var, mesh: int, axis: int | None, whole: Any, spec: Spec) -> int:
        """Return the slot of a batch leaf; `axis`: along which it is stacked, if it is."""
        number = self.cut.step.invars.index(leaf)
        key = ("batch", number, axis, mesh)
        if key not in self._numbers:
            aval = whole
            if axis is not None:
                aval = self._own(jax.eval_shape(lambda x: self.cut.slicing.stack(x, axis), whole))
            slot = self._slot(key, mesh, aval, spec)
            self.batches.append((number, slot, axis))
        return self._numbers[key]

    def _own(self, stacked: Any) -> Any:
        """Return the shape of a worker's share of a stacked value."""
        plain = jax.ShapeDtypeStruct(stacked.shape, stacked.dtype)
        return jax.eval_shape(lambda x: self.cut.slicing.own(x, 0), plain)

    def _replica_axis(self) -> tuple[Axis, ...]:
        """Return the spec of the dimension of the replicas that run as one program, if any."""
        return (DATA,) if self.cut.slicing.own_replicas > 1 else ()

    def _outer_spec(self, var: Var, mesh: int) -> Spec:
        layout = self.cut.layouts[mesh]
        kind, i = self._parts.get(var, ("", 0))
        if kind == "stacked":
            return self._stacked(i, mesh)
        if kind == "result" and var in layout.explicit:  # whole, in the place of an argument
            return layout.explicit[var]
        if kind == "result":
            return () if self.cut.slicing.workers > 1 else self._replica_axis()
        if kind == "grad":
            return layout.gradient(i)
        return layout.outer(self.cut.update.like.get(var, var))

    def _stacked(self, index: int, mesh: int) -> Spec:
        """Return the spec of a sliced operand.

        Its dimensions are microbatches, replicas if there are several, and those of a slice, rows
        first.
        """
        of_slice: list[Axis] = list(self.cut.layouts[mesh].operand(index))
        rows = of_slice.pop(self.cut.loss.slice_axes[index] or 0)
        return (None, *self._replica_axis(), rows, *of_slice)

    def _per_replica(self, key: Any, mesh: int, aval: Any, spec: Spec) -> int:
        """Return the slot of a value of one microbatch, of which each replica has its own."""
        replicas = self.cut.slicing.own_replicas
        if replicas == 1:
            return self._slot(key, mesh, aval, spec)
        whole = jax.ShapeDtypeStruct((replicas, *aval.shape), aval.dtype)
        return self._slot(key, mesh, whole, (DATA, *spec))

    def _slot(self, key: Any, mesh: int, aval: Any, spec: Spec) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.slots)
            plain = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            self.slots.append(Slot(mesh, plain, spec))
        return self._numbers[key]
