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
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from launcher.partition.assignment import Slicing, accumulator_dtype
from launcher.partition.stages import StageGraph
from launcher.partition.update_placement import Placer, Segment, Send
from launcher.trace import Atom, Aval, Equation, Loss, TracedStep, Var, is_var, splice


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
    batch = step.batch_vars
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
    left = [*combined.result_parts.items(), *combined.grad_parts.items()]
    sources = {v: stages[s].mesh for (_, s), parts in left for v in parts}
    after = Placer(
        (*combined.equations, *step.after),
        home,
        {**before.placed, **homes, **sources},
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
    out_homes = _export_results(step, after)
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

    Stacked are operands that are cut into slices.
    """
    operands, equations = [], []
    for v, axis in zip(step.operands, loss.slice_axes, strict=True):
        if axis is None or v in batch:
            operands.append(Operand(v, axis is not None, v in batch))
            continue
        extra, (stacked,) = splice(functools.partial(slicing.stack, axis=axis), [v])
        assert is_var(stacked)
        equations += extra
        operands.append(Operand(stacked, True, False))
    return tuple(operands), equations


@dataclass(eq=False)
class _Combined:
    """The equations that make the loss's results and gradients of the parts that stages leave.

    Attributes:
        equations: the equations.
        result_parts, grad_parts, like: see `UpdateProgram`.
    """

    equations: list[Equation] = field(default_factory=list)
    result_parts: dict[tuple[int, int], tuple[Var, ...]] = field(default_factory=dict)
    grad_parts: dict[tuple[int, int], tuple[Var, ...]] = field(default_factory=dict)
    like: dict[Var, Var] = field(default_factory=dict)

    def join(self, whole: Var, fun: Callable[..., Any], parts: Sequence[Var]) -> tuple[Var, ...]:
        """Make `whole` as `fun(*parts)`, in its dtype, and return the parts.

        Where there is nothing to do, the part is `whole` itself.
        """
        equations, (out,) = splice(lambda *xs: fun(*xs).astype(whole.aval.dtype), parts)
        if not is_var(out):  # a literal; an equation has to name it
            value = out.val
            equations, (out,) = splice(lambda: jax.lax.optimization_barrier(value), ())
        if out in parts:
            self.equations += equations
            return tuple(whole if part is out else part for part in parts)
        self.equations += [
            e.replace(outvars=[whole if v is out else v for v in e.outvars]) for e in equations
        ]
        return tuple(parts)

    def gradient(self, whole: Var, by_mesh: Sequence[Sequence[Var]]) -> tuple[Var, ...]:
        """Sum a gradient's parts over each mesh's stages, then the meshes; return the parts.

        So one array, its share, leaves a mesh. Each part is summed over the replicas already. The
        sum is zeros where the loss does not depend on it.
        """
        if not by_mesh:
            return self.join(whole, lambda: jnp.zeros(whole.aval.shape, whole.aval.dtype), ())
        if len(by_mesh) == 1 and [v.aval.dtype for v in by_mesh[0]] == [whole.aval.dtype]:
            return (whole,)  # in most models all are so: nothing to trace
        if len(by_mesh) == 1:
            return self.join(whole, _sum, by_mesh[0])
        dtype = by_mesh[0][0].aval.dtype
        shares = [Var(jax.core.ShapedArray(whole.aval.shape, dtype)) for _ in by_mesh]
        pairs = zip(shares, by_mesh, strict=True)
        made = [self.join(share, _sum, parts) for share, parts in pairs]
        self.join(whole, _sum, shares)
        self.like.update(dict.fromkeys(shares, whole))
        return tuple(itertools.chain(*made))


def _combine(
    step: TracedStep, loss: Loss, stages: Sequence[StageGraph], slicing: Slicing
) -> _Combined:
    """Combine the parts that the stages leave of the results and gradients that the step uses."""
    outs = step.loss_equation.outvars
    used = {
        v for atoms in (step.outvars, *(e.invars for e in step.after)) for v in atoms if is_var(v)
    }
    combined = _Combined()
    for i, word in enumerate(loss.reduce):
        if outs[i] in used:
            stage = next(s.index for s in stages if i in s.results)
            count = slicing.micro_batches if word in ("concat", "max", "min") else 1
            parts = [_part(loss.outvars[i].aval, slicing, True) for _ in range(count)]
            combine = _result_combiner(word, outs[i].aval, slicing)
            combined.result_parts[i, stage] = combined.join(outs[i], combine, parts)
    for k, i in enumerate(loss.wrt, len(loss.reduce)):
        if outs[k] in used:
            here = sorted((s for s in stages if i in s.wrt), key=lambda s: s.mesh)
            by_mesh = [
                [_part(loss.invars[i].aval, slicing, False) for _ in group]
                for _, group in itertools.groupby(here, key=lambda s: s.mesh)
            ]
            made = combined.gradient(outs[k], by_mesh)
            combined.grad_parts.update(
                ((i, s.index), (v,)) for s, v in zip(here, made, strict=True)
            )
    return combined


def _part(aval: Aval, slicing: Slicing, per_replica: bool) -> Var:
    """Return what a stage leaves behind of a result or gradient."""
    lead = (slicing.replicas,) if per_replica and slicing.replicas > 1 else ()
    dtype = accumulator_dtype(aval.dtype) if slicing.num_slices > 1 else aval.dtype
    return Var(jax.core.ShapedArray((*lead, *aval.shape), dtype))


def _sum(*parts: Any) -> Any:
    return functools.reduce(operator.add, parts)


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

    def total(x: Any) -> Any:
        x = x.sum(0) if replicated else x
        return x * (1.0 / slicing.num_slices) if word == "mean" else x

    return total


def _export_results(step: TracedStep, after: Placer) -> tuple[int, ...]:
    """Bring each result of the step to its place; where that is."""
    places: dict[int, int] = {}
    waiting = []
    for i, atom in enumerate(step.outvars):
        argument = step.invars[step.aliases[i]] if i in step.aliases else None
        at = after.placed.get(atom) if is_var(atom) else None
        if argument is None:
            places[i] = after.home if at is None else at
        elif argument in after.homes or at is not None:
            places[i] = after.homes.setdefault(argument, -1 if at is None else at)
        else:
            waiting.append((i, argument))
    for i, mesh in places.items():
        if is_var(atom := step.outvars[i]):
            after.export(atom, mesh)
    for i, argument in waiting:
        places[i] = after.homes.setdefault(argument, 0)
        if is_var(atom := step.outvars[i]):
            after.export(atom, places[i])
    return tuple(places[i] for i in range(len(step.outvars)))
