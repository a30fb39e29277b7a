"""Cutting the data along a dimension other than its rows: a text's positions, for example.

Every device then has all parameters and a part of each row's activations. What the positions
exchange, keys and values in attention, is gathered, and the gradients of all parameters are summed
in every microbatch (cf. Li et al. 2021, arXiv 2105.13120). That pays where activations are large
compared with the parameters. Pure.
"""

from __future__ import annotations

from collections import Counter

from launcher.partition import MODEL, NamedDims, Sharding, Spec, StageGraph, batch_axes
from launcher.trace import Loss, TracedStep, Var


def sequence_class(step: TracedStep, loss: Loss, dims: NamedDims, model: int) -> int | None:
    """Return the class of the batch's sequence dimension, or None if there is none.

    It is the dimension that most leaves of the batch have beside their rows, among those that
    `model` devices can share; the first of several.

    Args:
        step: the traced step.
        loss: its loss.
        dims: the named dimensions of the loss.
        model: number of devices of the model axis.
    """
    found: Counter[int] = Counter()
    rows = {c for var, axis in _leaves(step, loss) for c in [dims.classes(var)[axis]]}
    for var, _ in _leaves(step, loss):
        found.update(c for c in set(dims.classes(var)) if c not in rows and _fits(dims, c, model))
    return max(found, key=lambda c: (found[c], -c)) if found else None


def batch_specs(step: TracedStep, loss: Loss, dims: NamedDims, of: int) -> dict[Var, Spec]:
    """Return the spec along the model axis of every batch leaf of class `of`."""
    holders = dict(zip(loss.invars, step.operands, strict=True))
    found: dict[Var, Spec] = {}
    for var, _ in _leaves(step, loss):
        classes = dims.classes(var)
        if of in classes:
            at = classes.index(of)
            found[holders[var]] = tuple(MODEL if d == at else None for d in range(len(classes)))
    return found


def sequence_sharding(
    graph: StageGraph, loss: Loss, dims: NamedDims, of: int, model: int
) -> Sharding:
    """Return a stage's sharding with the class `of` cut over `model` devices.

    The class is one of the loss's named dimensions `dims`.
    """
    cut = Sharding(NamedDims(graph.equations), {MODEL: model})
    for var in (*(loss.invars[i] for i in graph.operands), *graph.activations_in):
        for outside, inside in zip(dims.classes(var), cut.dims.classes(var), strict=True):
            if outside == of:
                cut.axis_of[inside] = (MODEL,)
    return cut


def _fits(dims: NamedDims, of: int, devices: int) -> bool:
    return dims.size(of) > 1 and dims.size(of) % devices == 0


def _leaves(step: TracedStep, loss: Loss) -> list[tuple[Var, int]]:
    """Return the operands that are leaves of the batch, with the axis of their rows."""
    batch = step.batch_vars
    operands = zip(step.operands, loss.invars, batch_axes(step, loss), strict=True)
    return [(inner, axis) for outer, inner, axis in operands if outer in batch and axis is not None]
