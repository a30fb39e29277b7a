"""Pipelines of equal stages on whole hosts, as they are written by hand.

Stages of less than a host are priced as if the next one were on the same host, so that behind slow
links the search comes late to those that each have hosts of their own. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np

from launcher.partition.assignment import Assignment, Submesh
from launcher.plan.inter_op.problem import Problem
from launcher.plan.inter_op.recompute import FEWEST
from launcher.plan.inter_op.stage_choices import Outline, StageChoice
from launcher.plan.inter_op.stage_cost import SearchPoint
from launcher.plan.inter_op.submeshes import place_submeshes


@dataclass(frozen=True)
class EqualStages:
    """A pipeline of equal stages on equal submeshes.

    Attributes:
        seconds: what a step takes at least.
        num_stages: number of stages.
        point: what they have in common.
        choice: how each uses its devices.
    """

    seconds: float
    num_stages: int
    point: SearchPoint
    choice: StageChoice


def equal_stages(problem: Problem, point: SearchPoint, known: Outline) -> list[EqualStages]:
    """Return the best pipelines on all devices and whole hosts.

    They are one for each number of stages and policy of rematerialisation; where it is open what is
    computed again, with all, selectively and with nothing. Which of them fits the memory, only an
    estimate tells.
    """
    cluster, of = problem.cluster, known.candidates
    sizes, remats = np.array(of.sizes), np.array([one.remat for one in known.choices])
    most, found = min(len(problem.groups), cluster.hosts), []
    for stages, remat in itertools.product(range(1, most + 1), point.remats):
        ways = np.flatnonzero((sizes == cluster.num_devices // stages) & (remats == remat))
        if cluster.hosts % stages or not len(ways):
            continue
        cuts = _cuts(len(problem.groups), stages)
        at = cuts[:-1], cuts[1:]
        seconds, rest = of.seconds[0][at][:, ways], of.rest[0][at][:, ways]
        every = seconds.sum(0) + rest.max(0)
        best = int(every.argmin())
        if np.isfinite(every[best]):
            some = ("selective",) if problem.table.selective else ()
            words = ("none", *some, "full") if remat == FEWEST else (remat,)
            one = known.choices[int(ways[best])]
            found += [
                EqualStages(float(every[best]), stages, point, dataclasses.replace(one, remat=word))
                for word in words
            ]
    return found


def assignment_of(of: EqualStages, problem: Problem) -> Assignment:
    """Return equal stages as an assignment."""
    groups, count, point = problem.groups, of.num_stages, of.point
    cuts = _cuts(len(groups), count)
    devices = place_submeshes([problem.cluster.num_devices // count] * count, problem.cluster)
    return Assignment(
        method="auto",
        layers=tuple(
            tuple(layer for group in groups[first:end] for layer in group)
            for first, end in itertools.pairwise(cuts)
        ),
        submeshes=tuple(Submesh(of_stage, of.choice.logical_mesh) for of_stage in devices),
        mesh_of=tuple(range(count)),
        num_micro_batches=point.num_micro_batches,
        schedule=point.schedule,
        remat=(of.choice.remat,) * count,
        zero=(of.choice.zero,) * count,
        sequence=(of.choice.sequence,) * count,
        reduction=point.reduction,
    )


def _cuts(layers: int, stages: int) -> np.ndarray:
    return np.linspace(0, layers, stages + 1).round().astype(int)
