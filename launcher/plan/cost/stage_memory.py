"""Activation memory of a stage: what a task keeps for later ones, and its peak temporaries.

The task programs are those that the runtime will run, cut out of the same joint graph. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.partition.joint_graph import JointGraph, Name, opened
from launcher.partition.sharding.named_dims import NamedDims, Sharding
from launcher.partition.stage_programs import StagePrograms
from launcher.partition.task_programs import TaskProgram
from launcher.plan.cost.liveness import Size, working_bytes
from launcher.schedule import Kind
from launcher.trace.jaxpr import Var, is_var, nbytes

_SLACK = 1.06  # what the compiler needs more than the values: copies, and places it cannot share


@dataclass(frozen=True)
class Footprint:
    """Memory of one stage and one slice of the batch, in bytes on one device, by kind of task.

    Attributes:
        left: change in the memory held between tasks when a task is done.
        working: the most that a task needs on top of what was held before it.
    """

    left: Mapping[Kind, float]
    working: Mapping[Kind, float]


def footprint(of: StagePrograms, sharding: Sharding) -> Footprint:
    """Return the memory of the task programs where `sharding` cuts the joint graph's values."""
    size = _sizes(sharding)
    listed = list(of.programs.values())
    held = _held(of.joint, listed, size)
    left = {kind: held[k + 1] - held[k] for k, kind in enumerate(of.programs)}
    working = {
        kind: _SLACK * (_arriving(of, k, size) + _working(listed[k], sharding))
        for k, kind in enumerate(of.programs)
    }
    return Footprint(left, working)


def _sizes(sharding: Sharding) -> Size:
    known: dict[Var, float] = {}

    def size(v: Var) -> float:
        if v not in known:
            known[v] = nbytes(v.aval) / sharding.parts(v)
        return known[v]

    return size


def _working(one: TaskProgram, sharding: Sharding) -> float:
    jaxpr = opened(one.closed).jaxpr  # its variables are others
    inside = Sharding(NamedDims(jaxpr.eqns if sharding.axis_of else ()), sharding.sizes)
    for v, known in zip(jaxpr.invars, one.closed.jaxpr.invars, strict=True):
        inside.seed(v, sharding.spec(known))
    outs = list(zip(one.outputs, jaxpr.outvars, strict=True))
    summed = [v for name, v in outs if name.kind in ("grad", "result")]
    held = [v for name, v in outs if name.kind not in ("grad", "result")]
    return working_bytes(jaxpr.eqns, held, _sizes(inside), summed)


def _held(joint: JointGraph, passes: list[TaskProgram], size: Size) -> list[float]:
    """Return the bytes held before the first task program, and after each.

    A value is held from the task program that first has it to the last one that reads it. Operands
    are held anyway, and counted where they live.
    """
    first: dict[Name, int] = {}
    last: dict[Name, int] = {}
    for k, one in enumerate(passes):
        for name in (*one.inputs, *one.outputs):
            if name.kind in ("activation", "cotangent", "residual"):
                first.setdefault(name, k)
        last.update((name, k) for name in one.inputs if name in first)
    sizes = {name: _size(joint, name, size) for name in last}
    return [0.0] + [
        sum(b for name, b in sizes.items() if first[name] <= k < last[name])
        for k in range(len(passes))
    ]


def _arriving(of: StagePrograms, k: int, size: Size) -> float:
    """Return the bytes of a task program's inputs that come from elsewhere.

    They are what other stages have sent that no earlier task program has read, and its slice of the
    batch.
    """
    listed = list(of.programs.values())
    before = {name for one in listed[:k] for name in one.inputs}
    total = 0.0
    for name in listed[k].inputs:
        sent = name.kind in ("activation", "cotangent") and name not in before
        if sent or (name.kind == "operand" and name.of in of.sliced):
            total += _size(of.joint, name, size)
    return total


def _size(joint: JointGraph, name: Name, size: Size) -> float:
    v = name.of if name.kind == "residual" else joint.inputs.get(name, joint.outputs.get(name))
    return size(v) if v is not None and is_var(v) else 0.0
