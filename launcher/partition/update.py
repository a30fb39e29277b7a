"""Place the rest of the train step: equations before the loss, and the parameter update.

Decides where every argument and result of the step lives, says how the parts of a result or a
gradient (microbatches, replicas, stages) are combined, and has the equations placed by
`update_placement`. Pure; the planner reads bytes off it and the runtime compiles it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from launcher.partition.slicing import Slicing, accumulator_dtype
from launcher.partition.stages import StageGraph
from launcher.partition.update_placement import Placer, Segment, Send
from launcher.trace import Atom, Aval, Equation, Loss, TracedStep, Var, fold_slices, is_var, splice


@dataclass(frozen=True, eq=False)
class Operand:
    """What holds a loss operand on the meshes that read it: a value, stacked if it is sliced.

    `host` says that it is a leaf of the batch, which the driver hands to each mesh stacked.
    """

    value: Var
    stacked: bool
    host: bool


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """The placed outer program.

    Attributes:
        homes: the mesh where each argument leaf lives; leaves of the batch have none.
        given: leaves of the batch and constants that the outer program reads: `(value, mesh)`.
        argument_sends: arguments sent to other meshes as the step begins.
        before, after: the segments around the pipeline, in order.
        operands: one a loss operand.
        result_parts, grad_parts: `{(result or operand, stage): variables}`: what the stages leave
            behind; one accumulator, or for what is not added up one part a microbatch.
        part_sends: parts sent to other meshes when the pipeline is done.
        outvars, out_homes: the value of each result leaf of the step and the mesh it ends on.
        like: the gradient that a mesh's share of it is laid out like.
    """

    homes: dict[Var, int]
    given: tuple[tuple[Var, int], ...]
    argument_sends: tuple[Send, ...]
    before: tuple[Segment, ...]
    after: tuple[Segment, ...]
    operands: tuple[Operand, ...]
    result_parts: dict[tuple[int, int], tuple[Var, ...]]
    grad_parts: dict[tuple[int, int], tuple[Var, ...]]
    part_sends: tuple[Send, ...]
    outvars: tuple[Atom, ...]
    out_homes: tuple[int, ...]
    like: dict[Var, Var]


def place_update(
    step: TracedStep,
    loss: Loss,
    stages: Sequence[StageGraph],
    slicing: Slicing,
    pinned: Mapping[Var, int] = MappingProxyType({}),
) -> UpdateProgram:
    """Place everything that is not the pipeline itself.

    Args:
        step: the step.
        loss: its loss on one slice.
        stages: the pipeline.
        slicing: how the batch is cut.
        pinned: where arguments live that no stage reads.
    """
    uses: list[list[int]] = [[] for _ in loss.invars]  # the meshes of the stages that read each
    for mesh, i in dict.fromkeys((s.mesh, i) for s in stages for i in s.operands):
        uses[i].append(mesh)
    home = stages[-1].mesh
    batch = frozenset(v for v, is_batch in zip(step.invars, step.batch, strict=True) if is_batch)
    arguments = frozenset(step.invars) - batch
    everywhere = batch | frozenset(step.constants)
    operands, stacking = _operands(step, loss, slicing, batch)
    owners = {operands[i].value: uses[i][0] for i in loss.wrt if uses[i]}
    homes = {v: mesh for v, mesh in {**pinned, **owners}.items() if v in arguments}
    before = Placer(
        (*step.before, *stacking),
        home,
        {v: mesh for v, mesh in owners.items() if v not in arguments},
        homes,
        arguments,
        everywhere,
    )
    combined = _combine(step, loss, stages, slicing)
    after = Placer(
        combined.equations,
        home,
        {**before.placed, **homes, **combined.sources},
        homes,
        arguments,
        everywhere,
        before,
    )
    for i, operand in enumerate(operands):
        if not operand.host:
            for mesh in uses[i]:
                before.export(operand.value, mesh)
    after.export_placed()
    out_homes = _export_results(step, step.outvars, after)
    return UpdateProgram(
        homes={v: homes.get(v, 0) for v in step.invars if v in arguments},
        given=tuple(dict.fromkeys((*before.given, *after.given))),
        argument_sends=tuple(dict.fromkeys((*before.argument_sends, *after.argument_sends))),
        before=before.segments(),
        after=after.segments(),
        operands=operands,
        result_parts=combined.result_parts,
        grad_parts=combined.grad_parts,
        part_sends=tuple(after.source_sends),
        outvars=step.outvars,
        out_homes=out_homes,
        like=combined.like,
    )


def _operands(
    step: TracedStep, loss: Loss, slicing: Slicing, batch: frozenset[Var]
) -> tuple[tuple[Operand, ...], list[Equation]]:
    """Return what holds each operand of the loss, and the equations that stack computed operands.

    Stacked are operands that are cut into slices, and random keys, of which every slice has its
    own.
    """
    operands, equations = [], []
    for i, (v, axis) in enumerate(zip(step.operands, loss.slice_axes, strict=True)):
        is_key = loss.keys[i]
        if not is_key and (axis is None or v in batch):
            operands.append(Operand(v, axis is not None, v in batch))
            continue

        def make(x: Any, i: int = i, is_key: bool = is_key, axis: int = axis or 0) -> Any:
            x = fold_slices(x, loss.raw_keys[i], loss.num_slices) if is_key else x
            return slicing.stack(x, axis)

        extra, (stacked,) = splice(make, [v])
        assert is_var(stacked)
        equations += extra
        operands.append(Operand(stacked, True, False))
    return tuple(operands), equations


@dataclass(frozen=True, eq=False)
class _Combined:
    equations: tuple[Equation, ...]
    sources: dict[Var, int]
    result_parts: dict[tuple[int, int], tuple[Var, ...]]
    grad_parts: dict[tuple[int, int], tuple[Var, ...]]
    like: dict[Var, Var]


def _combine(
    step: TracedStep,
    loss: Loss,
    stages: Sequence[StageGraph],
    slicing: Slicing,
) -> _Combined:
    """Return the update program, with the equations that combine the parts left by the stages.

    They make the loss's results and gradients.
    """
    outs = step.loss_equation.outvars
    used = {v for e in step.after for v in e.invars if is_var(v)} | {
        v for v in step.outvars if is_var(v)
    }
    equations: list[Equation] = []
    result_parts: dict[tuple[int, int], tuple[Var, ...]] = {}
    grad_parts: dict[tuple[int, int], tuple[Var, ...]] = {}
    like: dict[Var, Var] = {}
    for i, word in enumerate(loss.reduce):
        if outs[i] in used:
            stage = next(s.index for s in stages if i in s.results)
            count = slicing.micro_batches if word in ("concat", "max", "min") else 1
            parts = tuple(_part(loss.outvars[i].aval, slicing, True) for _ in range(count))
            combine = _result_combiner(word, outs[i].aval, slicing)
            result_parts[i, stage], extra = _join(outs[i], combine, parts)
            equations += extra
    for k, i in enumerate(loss.wrt):
        whole = outs[len(loss.reduce) + k]
        if whole in used:
            here = sorted((s for s in stages if i in s.wrt), key=lambda s: s.mesh)
            by_mesh = [
                [_part(loss.invars[i].aval, slicing, False) for _ in group]
                for _, group in itertools.groupby(here, key=lambda s: s.mesh)
            ]
            parts, sums, extra = _gradient(whole, by_mesh)
            like.update((share, whole) for share in sums)
            equations += extra
            grad_parts.update(((i, s.index), (v,)) for s, v in zip(here, parts, strict=True))
    named = {**result_parts, **{(-1 - i, s): vs for (i, s), vs in grad_parts.items()}}
    return _Combined(
        equations=(*equations, *step.after),
        sources={v: stages[s].mesh for (_, s), vs in named.items() for v in vs},
        result_parts=result_parts,
        grad_parts=grad_parts,
        like=like,
    )


def _part(aval: Aval, slicing: Slicing, per_replica: bool) -> Var:
    """Return what a stage leaves behind of a result or gradient."""
    lead = (slicing.replicas,) if per_replica and slicing.replicas > 1 else ()
    dtype = accumulator_dtype(aval.dtype) if slicing.num_slices > 1 else aval.dtype
    return Var(jax.core.ShapedArray((*lead, *aval.shape), dtype))


def _join(
    whole: Var, fun: Callable[..., Any], parts: Sequence[Var]
) -> tuple[tuple[Var, ...], list[Equation]]:
    """Return the equations that make `whole` as `fun(*parts)`, in its dtype.

    Where there is nothing to do, the part is `whole` itself.
    """
    equations, (out,) = splice(lambda *xs: fun(*xs).astype(whole.aval.dtype), parts)
    if not is_var(out):  # a literal; an equation has to name it
        value = out.val
        equations, (out,) = splice(lambda: jax.lax.optimization_barrier(value), ())
    if out in parts:
        return tuple(whole if part is out else part for part in parts), equations
    return tuple(parts), [
        e.replace(outvars=[whole if v is out else v for v in e.outvars]) for e in equations
    ]


def _gradient(
    whole: Var, by_mesh: Sequence[Sequence[Var]]
) -> tuple[tuple[Var, ...], list[Var], list[Equation]]:
    """Sum a gradient's parts over each mesh's stages, then the meshes.

    So one array, its share, leaves a mesh. Each part is summed over the replicas already. The sum
    is zeros where the loss does not depend on it.

    Returns:
        The parts, the shares if there are several, and the equations.
    """

    def of_mesh(*parts: Any) -> Any:
        return functools.reduce(operator.add, parts)

    if not by_mesh:
        _, equations = _join(whole, lambda: jnp.zeros(whole.aval.shape, whole.aval.dtype), ())
        return (), [], equations
    if len(by_mesh) == 1 and [v.aval.dtype for v in by_mesh[0]] == [whole.aval.dtype]:
        return (whole,), [], []  # in most models all are so: nothing to trace
    if len(by_mesh) == 1:
        made, equations = _join(whole, of_mesh, by_mesh[0])
        return made, [], equations
    found: list[Var] = []
    equations = []
    sums: list[Var] = []
    for parts in by_mesh:
        sums.append(Var(jax.core.ShapedArray(whole.aval.shape, parts[0].aval.dtype)))
        made, extra = _join(sums[-1], of_mesh, parts)
        found += made
        equations += extra
    _, extra = _join(whole, lambda *xs: functools.reduce(operator.add, xs), sums)
    return tuple(found), sums, equations + extra


def _result_combiner(word: str, whole: Any, slicing: Slicing) -> Callable[..., Any]:
    replicated = slicing.replicas > 1
    if slicing.num_slices == 1:
        return lambda x: x
    if word == "concat":
        return lambda *xs: jnp.stack(xs).reshape(whole.shape)
    if word in ("max", "min"):
        return lambda *xs: getattr(jnp.stack(xs), word)(axis=(0, 1) if replicated else 0)
    if word == "last":
        return lambda x: x[-1] if replicated else x
    scale = 1.0 / slicing.num_slices if word == "mean" else None
    return lambda x: _scaled(x.sum(0) if replicated else x, scale)


def _scaled(x: Any, scale: float | None) -> Any:
    return x if scale is None else x * scale


def _export_results(step: TracedStep, outvars: Sequence[Atom], after: Placer) -> tuple[int, ...]:
    """Bring each result of the step to its place; where that is."""
    places: dict[int, int] = {}
    waiting = []
    for i, atom in enumerate(outvars):
        argument = step.invars[step.aliases[i]] if i in step.aliases else None
        at = after.placed.get(atom) if is_var(atom) else None
        if argument is None:
            places[i] = after.home if at is None else at
        elif argument in after.homes or at is not None:
            places[i] = after.homes.setdefault(argument, -1 if at is None else at)
        else:
            waiting.append((i, argument))
    for i, mesh in places.items():
        if is_var(atom := outvars[i]):
            after.export(atom, mesh)
    for i, argument in waiting:
        places[i] = after.homes.setdefault(argument, 0)
        if is_var(atom := outvars[i]):
            after.export(atom, places[i])
    return tuple(places[i] for i in range(len(outvars)))
