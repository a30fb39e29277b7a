"""One layer's forward and backward pass as programs that another process can compile.

They are the task programs that the runtime runs, each over a microbatch of which every copy has
rows of its own, as replicas have. They are traced for an abstract mesh, `copies` × `model`, so that
one program keeps every device at work; and exported as StableHLO, which is data.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from launcher.hardware import ClusterShape
from launcher.partition import (
    MODEL,
    Name,
    Sharding,
    Spec,
    StageGraph,
    StagePrograms,
    TaskProgram,
    accumulator_dtype,
    inside_of,
    trace_stage,
)
from launcher.plan.intra_op.stage_shardings import model_sharding
from launcher.schedule import Kind
from launcher.trace import Jaxpr, Loss, TracedStep, structure_text

COPIES = "copies"


@dataclass(frozen=True)
class Exported:
    """A program as data.

    Attributes:
        data: the serialised program.
        sums: number of its last inputs that are accumulators, whose places its first outputs take.
    """

    data: bytes
    sums: int


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """A layer (or a stage of several) on `copies` × `model` devices.

    Attributes:
        sharding: the sharding of its forward pass.
        key: equal for equal programs on equal meshes, in every process.
    """

    graph: StageGraph
    loss: Loss
    sharding: Sharding
    copies: int
    model: int

    @property
    def key(self) -> str:
        """Hash that is equal for equal programs on equal meshes, in every process."""
        graph = self.graph
        body = Jaxpr(graph.inputs, graph.equations, graph.outs)
        more = {
            "mesh": (self.copies, self.model),
            "specs": [self.sharding.spec(v) for v in (*graph.inputs, *graph.outs)],
            "structure": graph.structure,
        }
        return hashlib.sha256(structure_text(body, more).encode()).hexdigest()[:32]

    @functools.cached_property
    def programs(self) -> StagePrograms:
        """Task programs as the runtime cuts them if a schedule has one kind of backward task."""
        return trace_stage(self.graph, self.loss, "none", {Kind.FORWARD, Kind.BACKWARD})

    def exported(self, platform: str) -> list[Exported]:
        """Return the forward pass, and the backward pass where there is one, for `platform`.

        Both have the inputs and outputs of their `TaskProgram`, with the copies as a leading axis
        of all but the parameters; gradients are added to accumulators, which are the last inputs
        and the first outputs.
        """
        return [self._exported(one, platform) for one in self.programs.programs.values()]

    def _exported(self, one: TaskProgram, platform: str) -> Exported:
        reads = [name for name in one.inputs if name.kind != "seed"]
        sums = [name for name in one.outputs if name.kind == "grad"]
        others = [name for name in one.outputs if name.kind != "grad"]
        shared = [self._is_shared(name) for name in reads]

        def of_slice(*flat: Any) -> tuple[Any, ...]:
            values = dict(zip(reads, flat, strict=True))
            seed = jnp.ones((), self.loss.outvars[0].aval.dtype)
            outs = one.fun(*(values.get(name, seed) for name in one.inputs))
            made = dict(zip(one.outputs, outs, strict=True))
            grads = (made[name].astype(accumulator_dtype(made[name].dtype)) for name in sums)
            return (*grads, *(made[name] for name in others))

        fun = of_slice
        if self.copies > 1:
            axes = tuple(None if alike else 0 for alike in shared)
            fun = jax.vmap(of_slice, in_axes=axes, spmd_axis_name=COPIES, axis_size=self.copies)

        def whole(*flat: Any) -> tuple[Any, ...]:
            outs = fun(*flat[: len(reads)])
            summed = (a + b for a, b in zip(flat[len(reads) :], outs, strict=False))
            return (*summed, *outs[len(sums) :])

        of_sum = [self._shape(name, alike=False) for name in sums]
        of_sum = [jax.ShapeDtypeStruct(x.shape, accumulator_dtype(x.dtype)) for x in of_sum]
        shapes = [*map(self._shape, reads, shared), *of_sum]
        ins = [*map(self._spec, reads, shared), *(self._spec(n, alike=False) for n in sums)]
        outs = [self._spec(name, alike=False) for name in (*sums, *others)]
        how: dict[str, Any] = {}
        if self.copies * self.model > 1:
            sizes, auto = (self.copies, self.model), (AxisType.Auto,) * 2
            mesh = AbstractMesh(sizes, (COPIES, MODEL), axis_types=auto)
            how["in_shardings"] = tuple(NamedSharding(mesh, PartitionSpec(*x)) for x in ins)
            how["out_shardings"] = tuple(NamedSharding(mesh, PartitionSpec(*x)) for x in outs)
        found = export.export(jax.jit(whole, **how), platforms=[platform])(*shapes)
        return Exported(bytes(found.serialize()), len(sums))

    def _is_shared(self, name: Name) -> bool:
        """Return whether all copies read the same value: an operand that is not of the batch."""
        return name.kind == "operand" and self.loss.slice_axes[name.of] is None

    def _value(self, name: Name) -> Any:
        """Return the variable of the joint graph that has the shape and spec of `name`."""
        joint = self.programs.joint
        if name.kind == "grad":
            return joint.inputs[Name("operand", name.of)]
        if name.kind == "residual":
            return name.of
        return joint.inputs[name] if name in joint.inputs else joint.outputs[name]

    def _shape(self, name: Name, alike: bool) -> jax.ShapeDtypeStruct:
        aval = self._value(name).aval
        leading = () if alike or self.copies == 1 else (self.copies,)
        return jax.ShapeDtypeStruct((*leading, *jnp.shape(aval)), aval.dtype)

    def _spec(self, name: Name, alike: bool) -> Spec:
        leading = () if alike or self.copies == 1 else (COPIES,)
        return (*leading, *self._inside.spec(self._value(name)))

    @functools.cached_property
    def _inside(self) -> Sharding:
        return inside_of(self.programs, self.loss, self.sharding)


def layer_program(
    step: TracedStep,
    graph: StageGraph,
    loss: Loss,
    copies: int,
    model: int,
    cluster: ClusterShape,
) -> LayerProgram:
    """Return a layer's program, sharded over `model` devices as the planner would shard it."""
    sharding = model_sharding(step, loss, graph, model, cluster, cluster.link_of_axis(model))
    return LayerProgram(graph, loss, sharding, copies, model)
