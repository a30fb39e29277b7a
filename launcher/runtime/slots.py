"""Numbering the values of a step: which slot holds what, on which mesh. Used by `runtime.emit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from launcher.plan.outer import OuterProgram, Slicing
from launcher.plan.stages import StageGraph
from launcher.runtime.instructions import Slot
from launcher.runtime.joint import Name
from launcher.trace.graph import Var
from launcher.trace.step import Loss, TracedStep


@dataclass(eq=False)
class Slots:
    """The slots of one step, made when they are first asked for.

    Attributes:
        slots: what each holds. constants, batches: see `emit.Emitted`.
    """

    step: TracedStep
    loss: Loss
    outer: OuterProgram
    slicing: Slicing
    slots: list[Slot] = field(default_factory=list)
    constants: list[tuple[Any, int]] = field(default_factory=list)
    batches: list[tuple[int, int, int | None]] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def of_outer(self, var: Var, mesh: int, layout: str = "whole") -> int:
        """A value of the outer program."""
        return self._slot(("outer", var, mesh), mesh, var.aval, layout)

    def number(self, microbatch: int, mesh: int) -> int:
        """The microbatch's number, a constant."""
        key = ("number", microbatch, mesh)
        if key not in self._numbers:
            slot = self._slot(key, mesh, jax.ShapeDtypeStruct((), jnp.int32), "whole")
            self.constants.append((jnp.int32(microbatch), slot))
        return self._numbers[key]

    def of_stage(self, name: Name, graph: StageGraph, microbatch: int) -> int:
        """A value that a program of a stage reads or makes."""
        if name.kind == "operand":
            return self._operand(name.of, graph.mesh)
        if name.kind in ("result", "grad"):
            return self.part(name, graph, microbatch)
        if name.kind == "residual":
            return self._per_replica((name, microbatch), graph.mesh, name.of.aval)
        return self.exchanged(name, graph.mesh, microbatch)

    def exchanged(self, name: Name, mesh: int, microbatch: int) -> int:
        """An activation or a cotangent, as a mesh has it."""
        var = name.of if name.kind == "activation" else name.of[0]
        return self._per_replica((name, microbatch, mesh), mesh, var.aval)

    def part(self, name: Name, graph: StageGraph, microbatch: int) -> int:
        """What a stage leaves behind of a result or a gradient: an accumulator, or a part for each
        microbatch."""
        parts = self.outer.result_parts if name.kind == "result" else self.outer.grad_parts
        variables = parts[name.of, graph.index]
        var = variables[microbatch if len(variables) > 1 else 0]
        return self.of_outer(var, graph.mesh, self._layout)

    def _operand(self, index: int, mesh: int) -> int:
        operand = self.outer.operands[index]
        if not operand.host:
            return self.of_outer(operand.value, mesh, "stacked" if operand.stacked else "whole")
        axis = self.loss.slice_axes[index]
        leaf = self.step.invars.index(operand.value)
        key = ("batch", leaf, axis, mesh)
        if key not in self._numbers:
            aval = operand.value.aval
            if axis is not None:
                aval = jax.eval_shape(
                    lambda x: self.slicing.stack(x, axis),
                    jax.ShapeDtypeStruct(aval.shape, aval.dtype),
                )
            slot = self._slot(key, mesh, aval, "whole" if axis is None else "stacked")
            self.batches.append((leaf, slot, axis))
        return self._numbers[key]

    @property
    def _layout(self) -> str:
        return "replicas" if self.slicing.replicas > 1 else "whole"

    def _per_replica(self, key: Any, mesh: int, aval: Any) -> int:
        """A value of one microbatch, of which each replica has its own."""
        replicas = self.slicing.replicas
        shape = (replicas, *aval.shape) if replicas > 1 else aval.shape
        return self._slot(key, mesh, jax.ShapeDtypeStruct(shape, aval.dtype), self._layout)

    def _slot(self, key: Any, mesh: int, aval: Any, layout: str) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.slots)
            plain = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            self.slots.append(Slot(mesh, plain, layout))
        return self._numbers[key]
