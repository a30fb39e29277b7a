"""What a stage's passes need beside the parameters: what each leaves to later ones, and its room to
work in. The passes are those that the runtime will run, cut out of the same joint program. Pure;
used by `plan.memory` and `search.layers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from launcher.plan.joint import Joint, Name, opened, trace_joint
from launcher.plan.passes import Pass, cut, outputs_by_kind
from launcher.plan.sharding.dims import NamedDims, Sharding
from launcher.plan.stages import StageGraph
from launcher.plan.working import Size, working_bytes
from launcher.schedule import Kind
from launcher.trace.graph import Var, is_var, nbytes
from launcher.trace.step import Loss

_SLACK = 1.06  # what the compiler needs more than the values: copies, and places it cannot share


@dataclass(frozen=True)
class Footprint:
    """Of one stage and one slice of the batch, in bytes on one device, by kind of task.

    Attributes:
        left: by how much what is held between tasks has changed when a task is done.
        working: the most that a task needs on top of what was held before it.
    """

    left: Mapping[Kind, float]
    working: Mapping[Kind, float]


@dataclass(frozen=True, eq=False)
class StagePasses:
    """A stage's joint program and its passes. `sliced`: the operands of which each slice reads its
    rows."""

    joint: Joint
    passes: Mapping[Kind, Pass]
    sliced: Set[int]


def stage_passes(graph: StageGraph, loss: Loss, remat: str, kinds: Set[Kind]) -> StagePasses:
    """The passes of a stage whose schedule has these kinds of tasks, each a program."""
    data = [i for i in graph.operands if loss.slice_axes[i] is not None or i not in loss.wrt]
    parts = Kind.BACKWARD_WEIGHT in kinds
    joint = trace_joint(graph, loss, graph.wrt, data, remat, open_checkpoints=parts)
    passes = cut(joint, outputs_by_kind(joint, graph.results, kinds, together=False))
    return StagePasses(joint, passes, {i for i in data if loss.slice_axes[i] is not None})


def as_one(of: StagePasses, graph: StageGraph, kinds: Set[Kind]) -> StagePasses:
    """The same passes, the forward pass as one program with what follows it."""
    groups = outputs_by_kind(of.joint, graph.results, kinds, together=True)
    return StagePasses(of.joint, cut(of.joint, groups), of.sliced)


def inside_of(
    of: StagePasses, loss: Loss, sharding: Sharding, dims: NamedDims | None = None
) -> Sharding:
    """The specs of a joint program's values, by those of its forward pass. `dims`: its own."""
    found = Sharding(dims or NamedDims(of.joint.equations), sharding.sizes)
    for name, var in of.joint.inputs.items():
        if name.kind != "seed":
            first = name.of[0] if name.kind == "cotangent" else name.of
            outside = loss.invars[first] if name.kind == "operand" else first
            found.seed(var, sharding.spec(outside))
    return found


def footprint(of: StagePasses, sharding: Sharding) -> Footprint:
    """What the passes need where `sharding` cuts the joint program's values."""
    size = _sizes(sharding)
    listed = list(of.passes.values())
    held = _held(of.joint, listed, size)
    left = {kind: held[k + 1] - held[k] for k, kind in enumerate(of.passes)}
    working = {
        kind: _SLACK * (_arriving(of, k, size) + _working(listed[k], sharding))
        for k, kind in enumerate(of.passes)
    }
    return Footprint(left, working)


def _sizes(sharding: Sharding) -> Size:
    known: dict[Var, float] = {}

    def size(v: Var) -> float:
        if v not in known:
            known[v] = nbytes(v.aval) / sharding.parts(v)
        return known[v]

    return size


def _working(one: Pass, sharding: Sharding) -> float:
    jaxpr = opened(one.closed).jaxpr  # its variables are others
    inside = Sharding(NamedDims(jaxpr.eqns if sharding.axis_of else ()), sharding.sizes)
    for v, known in zip(jaxpr.invars, one.closed.jaxpr.invars, strict=True):
        inside.seed(v, sharding.spec(known))
    outs = list(zip(one.outputs, jaxpr.outvars, strict=True))
    summed = [v for name, v in outs if name.kind in ("grad", "result")]
    held = [v for name, v in outs if name.kind not in ("grad", "result")]
    return working_bytes(jaxpr.eqns, held, _sizes(inside), summed)


def _held(joint: Joint, passes: list[Pass], size: Size) -> list[float]:
    """What is held before the first pass, and after each: whatever came before and is read after.
    Operands are held anyway, and counted where they live."""
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


def _arriving(of: StagePasses, k: int, size: Size) -> float:
    """What other stages have sent for a pass that none before it has read, and its slice of the
    batch."""
    listed = list(of.passes.values())
    before = {name for one in listed[:k] for name in one.inputs}
    total = 0.0
    for name in listed[k].inputs:
        sent = name.kind in ("activation", "cotangent") and name not in before
        if sent or (name.kind == "operand" and name.of in of.sliced):
            total += _size(of.joint, name, size)
    return total


def _size(joint: Joint, name: Name, size: Size) -> float:
    v = name.of if name.kind == "residual" else joint.inputs.get(name, joint.outputs.get(name))
    return size(v) if is_var(v) else 0.0
