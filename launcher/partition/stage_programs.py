"""Trace the programs of a stage on one slice of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from launcher.partition.joint_graph import JointGraph, Known, trace_joint
from launcher.partition.sharding.named_dims import NamedDims, Sharding
from launcher.partition.stages import StageGraph
from launcher.partition.task_programs import TaskProgram, cut, outputs_by_kind
from launcher.schedule import Kind
from launcher.trace import Loss


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """A stage's joint graph, and the task programs that it is cut into.

    Attributes:
        results: those of the loss that are wanted.
        sliced: the operands of which each slice reads its rows.
    """

    joint: JointGraph
    programs: Mapping[Kind, TaskProgram]
    results: Sequence[int]
    sliced: Set[int]


@dataclass(frozen=True)
class StageUse:
    """What of a stage a step uses.

    Attributes:
        grads: the operands whose gradients are wanted.
        varying: the operands that differ from slice to slice.
        results: the results of the loss that are wanted.
    """

    grads: Sequence[int]
    varying: Sequence[int]
    results: Sequence[int]


def trace_stage(
    graph: StageGraph,
    loss: Loss,
    remat: str,
    kinds: Set[Kind],
    wanted: StageUse | None = None,
    known: Known | None = None,
) -> StagePrograms:
    """Trace a stage, and cut it into a program for each kind of task.

    Args:
        graph: the stage.
        loss: the loss that it is a part of.
        remat: what the backward pass recomputes, a string of `base.names`.
        kinds: those that the schedule has.
        wanted: what the step uses; by default all, and all but the parameters differ from slice
            to slice.
        known: see `trace_joint`.
    """
    sliced = {i for i in graph.operands if loss.slice_axes[i] is not None}
    if wanted is None:
        varying = [i for i in graph.operands if i in sliced or i not in loss.wrt]
        wanted = StageUse(graph.wrt, varying, graph.results)
    parts = Kind.BACKWARD_WEIGHT in kinds
    joint = trace_joint(graph, loss, wanted.grads, wanted.varying, remat, parts, known)
    programs = cut(joint, outputs_by_kind(joint, wanted.results, kinds, together=False))
    return StagePrograms(joint, programs, wanted.results, sliced)


def as_one(of: StagePrograms, kinds: Set[Kind]) -> StagePrograms:
    """Return the same with the forward pass in one program with what follows it."""
    groups = outputs_by_kind(of.joint, of.results, kinds, together=True)
    return dataclasses.replace(of, programs=cut(of.joint, groups))


def inside_of(
    of: StagePrograms, loss: Loss, sharding: Sharding, dims: NamedDims | None = None
) -> Sharding:
    """Return the specs of a joint program's values, by its forward pass's; `dims`: its own."""
    found = Sharding(dims or NamedDims(of.joint.equations), sharding.sizes)
    for name, var in of.joint.inputs.items():
        if name.kind != "seed":
            first = name.of[0] if name.kind == "cotangent" else name.of
            outside = loss.invars[first] if name.kind == "operand" else first
            found.seed(var, sharding.spec(outside))
    return found
