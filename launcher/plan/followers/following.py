"""The assignment of a loss that follows another one of its step: its layers go where they can read.

Pure.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from launcher.partition import Assignment, PlanError, Submesh, layer_flops
from launcher.plan.followers.places import Devices, Places
from launcher.schedule import DEFAULT_SCHEDULE, FORWARD_SCHEDULE
from launcher.trace import (
    ANY_LAYER,
    TracedStep,
    Var,
    free_vars,
    is_var,
    nbytes,
    needed,
    source_line,
)


def following_assignment(part: TracedStep, lead: Assignment, places: Places) -> Assignment:
    """Return the assignment of a part that follows the leading one's.

    Raises:
        PlanError: it has too few layers to cut the batch as the leading one does.
    """
    loss, meshes = part.loss(1), lead.submeshes
    away = _bytes_away(part, places, [mesh.devices for mesh in meshes])
    at = home_of_each(layer_flops(loss), away)
    layers, mesh_of, schedule = lead.layers, lead.mesh_of, lead.schedule
    stage_of = {layer: s for s, group in enumerate(layers) for layer in group}
    own = [mesh_of[stage_of[i]] for i in range(loss.num_layers)] if len(stage_of) == len(at) else []
    if own and moved(own, away) <= moved(at, away):
        stages, used = list(range(len(layers))), list(range(len(meshes)))
    else:
        used = sorted(set(at))
        layers = tuple(tuple(i for i, m in enumerate(at) if m == mesh) for mesh in used)
        stages = [mesh_of.index(mesh) for mesh in used]
        mesh_of = tuple(range(len(used)))
        schedule = schedule if len(lead.layers) == len(meshes) else DEFAULT_SCHEDULE
    remat = tuple(lead.remat[s] if loss.wrt else "none" for s in stages)
    found = Assignment(
        method=lead.method,
        layers=layers,
        submeshes=tuple(meshes[mesh] for mesh in used),
        mesh_of=mesh_of,
        num_micro_batches=lead.num_micro_batches,
        schedule=schedule if loss.wrt else FORWARD_SCHEDULE,
        remat=remat,
        zero=tuple(lead.zero_of(s) for s in stages),
        reduction=lead.reduction,
    )
    if found.num_replicas != lead.num_replicas:
        raise PlanError(
            f"the loss at {source_line(part.loss_equation)} has too few layers for all of "
            f"{_shapes(meshes)} devices, and alone on {_shapes(found.submeshes)} it would cut the "
            "batch otherwise than the other losses of the step; give all submeshes the same "
            "logical mesh, or mark more layers in that loss"
        )
    return found


def _shapes(meshes: Sequence[Submesh]) -> str:
    return " and ".join("{}x{}".format(*mesh.logical_mesh) for mesh in meshes)


def _bytes_away(part: TracedStep, places: Places, meshes: Sequence[Devices]) -> list[list[int]]:
    """Return for each layer, by submesh, the bytes of what it reads that live on another."""
    loss = part.loss(1)
    holders = dict(zip(loss.invars, part.operands, strict=True))
    reads: list[dict[Var, None]] = [{} for _ in range(loss.num_layers)]
    for eqn, layer in zip(loss.equations, loss.layers, strict=True):
        if layer != ANY_LAYER:
            of_layer = (holders[v] for v in eqn.invars if is_var(v) and v in holders)
            reads[layer].update((root, None) for v in of_layer for root in _roots(part, v))
    found = []
    for roots in reads:
        known = [(nbytes(v.aval), home) for v in roots if (home := places.home(v)) is not None]
        found.append([sum(size for size, home in known if home != mesh) for mesh in meshes])
    return found


def _roots(part: TracedStep, var: Var) -> list[Var]:
    """Return what an operand of the loss is computed from."""
    return free_vars(needed(part.before, [var]), [var])


def home_of_each(costs: Sequence[float], away: Sequence[Sequence[int]]) -> list[int]:
    """Return the submesh of each layer: layers in order, on submeshes in order.

    The fewest bytes are read from other submeshes; of those choices the costliest submesh is as
    cheap as can be, and the work as even. A submesh may be left out.

    Args:
        costs: the work of each layer.
        away: for each layer, by submesh, the bytes that it reads from others.
    """
    count = len(away[0])
    work = [0.0, *itertools.accumulate(costs)]
    read = [[0, *itertools.accumulate(of[mesh] for of in away)] for mesh in range(count)]

    @functools.cache
    def best(first: int, mesh: int) -> tuple[float, float, float, tuple[int, ...]]:
        """Return the best choice for the layers from `first` on submeshes from `mesh` on."""
        options = []
        for end in range(len(costs) if mesh == count - 1 else first, len(costs) + 1):
            cost = work[end] - work[first]
            here = read[mesh][end] - read[mesh][first]
            rest = (0.0, 0.0, 0.0, ()) if mesh == count - 1 else best(end, mesh + 1)
            squares = cost * cost + rest[2]
            at = (*(mesh,) * (end - first), *rest[3])
            options.append((here + rest[0], max(cost, rest[1]), squares, at))
        return min(options)

    return list(best(0, 0)[3])


def moved(at: Sequence[int], away: Sequence[Sequence[int]]) -> float:
    """Return the bytes that layers on these submeshes read from others."""
    return sum(of[mesh] for mesh, of in zip(at, away, strict=True))
