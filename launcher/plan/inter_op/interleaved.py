"""Pipelines with several short stages on each of some submeshes, and what they take at least.

The stages go round the submeshes in turn. Equal runs of layers on equal submeshes are searched with
a bound; others, unequal ones too, are made from a pipeline with a stage on each. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from launcher.base import parse_remat
from launcher.partition import Assignment
from launcher.plan.inter_op.estimate import grouped_layers
from launcher.plan.inter_op.layer_table import LayerTable
from launcher.plan.inter_op.problem import (
    ZERO_LEVELS,
    Constraints,
    Problem,
    assignment_of,
    choice_on,
    meshes_of,
    recompute_in,
)
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.submeshes import SearchPoint
from launcher.schedule import SCHEDULES, Schedule

_MOST_STAGES_A_MESH = 4

Bounded = tuple[float, Assignment]
Groups = tuple[tuple[int, ...], ...]


def interleaved_plans(
    problem: Problem,
    wanted: Constraints,
    point: SearchPoint,
    below: float,
    device_seconds: float = 0.0,
) -> list[Bounded]:
    """Return lower bounds on the step of interleaved pipelines, and these; the least first.

    Those that are not below `below` seconds are left out.

    Args:
        problem: the problem.
        wanted: what is fixed by the user.
        point: what is fixed here.
        below: the seconds to stay below.
        device_seconds: the least time that all layers take of the devices together.
    """
    if wanted.num_stages is not None or not problem.sliced:
        return []
    found, table = [], problem.table
    every = ((mesh, size) for size in problem.sizes for mesh in meshes_of(problem, point, size))
    for mesh, size in every:
        cuts = [
            of
            for of in _cuts(len(problem.groups), problem.cluster.num_devices // size)
            if device_seconds < below * size * of[0]
        ]
        if not cuts:
            continue
        # The last stage's passes may be one program: see `backward_follows`.
        costs = StageCosts(table, [mesh], problem.cluster, point, back_at_once=True)
        for zero in ZERO_LEVELS if mesh.data > 1 else (0,):
            bounds = _Bounds(costs, zero, point, table)
            for remats, (meshes, each) in itertools.product(bounds.remats, cuts):
                seconds = bounds.least(remats, meshes, meshes * each)
                if seconds < below:
                    stages, (remat, last) = meshes * each, remats
                    one = choice_on(mesh, zero, remat, table)
                    choices = [one] * (stages - 1) + [dataclasses.replace(one, remat=last)]
                    length = len(problem.groups) // stages
                    runs = [(s * length, (s + 1) * length) for s in range(stages)]
                    found.append((seconds, assignment_of(problem, point, runs, choices, meshes)))
    return sorted(found, key=lambda one: one[0])


def _cuts(layers: int, most_meshes: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of submeshes, and of stages on each, that cut the layers into equal runs."""
    for meshes in range(2, min(most_meshes, layers // 2) + 1):
        for each in range(2, _MOST_STAGES_A_MESH + 1):
            if layers % (meshes * each) == 0:
                yield meshes, each


class _Bounds:
    """What pipelines take at least whose stages use their devices in the same way."""

    def __init__(self, costs: StageCosts, zero: int, point: SearchPoint, table: LayerTable) -> None:
        self._count, self._schedule = point.num_micro_batches, SCHEDULES[point.schedule]
        self._held, self._memory = costs.held(zero)[0], point.memory_bytes or np.inf
        every = {remat: recompute_in(remat, table) for remat in point.remats}
        self._left = {remat: costs.working(of)[0][0] for remat, of in every.items()}
        passes = {remat: costs.passes(zero, of) for remat, of in every.items()}
        self._one = {r: np.asarray(of.forward + of.backward)[0] for r, of in passes.items()}
        self._once = {remat: costs.once(zero, of)[0] for remat, of in every.items()}

    @property
    def remats(self) -> Iterator[tuple[str, str]]:
        """The policies of all stages but the last, and of the last."""
        return itertools.product(self._one, self._one)

    def least(self, remats: tuple[str, str], meshes: int, stages: int) -> float:
        """Return a lower bound on the seconds of a step of so many stages on so many meshes.

        It is infinite where they cannot fit.

        A mesh cannot begin before the first microbatch has come through the stages before its
        first one, and the last microbatch has them to go back through when it is done.
        """
        each, last = (self._one[remat] for remat in remats)
        ends = np.arange(stages + 1) * (len(each) // stages)
        at = ends[:-1], ends[1:]
        if not self._fits(at, remats[0], meshes):
            return np.inf
        one, once = each[at].copy(), self._once[remats[0]][at].copy()
        one[-1], once[-1] = last[at][-1], self._once[remats[1]][at][-1]
        before = np.cumsum(one)[:meshes] - one[:meshes]
        by_mesh = one.reshape(-1, meshes).sum(0), once.reshape(-1, meshes).sum(0)
        busy = before + self._count * by_mesh[0] + by_mesh[1]
        return float(max(busy.max(), one.sum()))

    def _fits(self, at: tuple[np.ndarray, np.ndarray], remat: str, meshes: int) -> bool:
        """Return whether the stages may fit, of all meshes but the last.

        At least the lightest activations are held of as many microbatches as are in flight.
        """
        held, left = (of[at].reshape(-1, meshes)[:, :-1] for of in (self._held, self._left[remat]))
        in_flight = _in_flight(self._schedule, meshes, self._count, len(held))
        return bool((held.sum(0) + in_flight * left.min(0) <= self._memory).all())


@functools.lru_cache(maxsize=1024)
def _in_flight(schedule: Schedule, meshes: int, count: int, each: int) -> np.ndarray:
    """Return the microbatches in flight on every mesh but the last, of so many stages on each."""
    bound = schedule.in_flight_bound
    return np.array([bound(mesh, meshes, count, each) for mesh in range(meshes - 1)])


def interleaved_like(
    assignment: Assignment, problem: Problem, wanted: Constraints, schedule: str
) -> Iterator[Assignment]:
    """Yield the interleaved pipelines on the submeshes of another one, which may be unequal.

    Each submesh is used in the same way and holds as many groups of layers, in several stages; or
    all hold equally many. None has several stages of the given one.
    """
    count, total = len(assignment.submeshes), len(problem.groups)
    if wanted.num_stages is not None:
        return
    ends = {group[-1] for group in problem.groups}
    # Stages are shorter: where some layers were recomputed all are. The last stage does both
    # passes at once, and holds few microbatches, unlike those before it.
    *remats, last = (wanted.remat or parse_remat(word).policy for word in assignment.remat)
    for each in range(2, _MOST_STAGES_A_MESH + 1):
        stages = each * count
        shares = {(total // count,) * count} if total % stages == 0 else set()
        if all(layers[-1] in ends for layers in assignment.layers):
            shares.add(tuple(map(len, grouped_layers(assignment, problem))))
        for share in sorted(shares):
            if min(share) < each:
                continue
            yield dataclasses.replace(
                assignment,
                layers=_turns(problem.groups, share, each),
                mesh_of=tuple(s % count for s in range(stages)),
                schedule=schedule,
                remat=(*((*remats, remats[-1]) * each)[:-1], last),
                zero=assignment.zero * each,
                sequence=assignment.sequence * each,
            )


@functools.cache
def _turns(groups: Groups, share: tuple[int, ...], each: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of every stage where submeshes take turns, as evenly as can be.

    Args:
        groups: the layers that stay together.
        share: how many groups each submesh holds.
        each: number of stages of each.
    """
    lengths = [held // each + (turn < held % each) for turn in range(each) for held in share]
    upcoming = iter(groups)
    return tuple(
        tuple(layer for group in itertools.islice(upcoming, length) for layer in group)
        for length in lengths
    )
