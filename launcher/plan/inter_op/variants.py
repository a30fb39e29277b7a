"""Plans that differ from one that was found in their schedule, or in their microbatches alone.

They are tried where devices share a machine. There the search's objective is no guide to either,
since a device works faster while another waits, and only the simulated timeline accounts for that.
Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from launcher.partition.assignment import Assignment, Submesh
from launcher.plan.inter_op.interleaved import interleaved_like
from launcher.plan.inter_op.problem import Constraints, Problem
from launcher.plan.inter_op.submeshes import spread_divisors
from launcher.schedule import DEFAULT_SCHEDULE, SCHEDULES, training_schedules


def schedule_variants(
    assignment: Assignment, problem: Problem, wanted: Constraints, every: bool = False
) -> Iterator[Assignment]:
    """Yield an assignment, and the same under every other open schedule that can run it.

    Args:
        assignment: the assignment.
        problem: the problem.
        wanted: what is fixed by the user.
        every: whether to try those schedules, too, that are rarely better (`improves_1f1b`).
    """
    yield assignment
    if wanted.schedule is not None or len(assignment.layers) == 1:
        return
    trained = (SCHEDULES[name] for name in training_schedules())
    others = [schedule for schedule in trained if every or schedule.improves_1f1b]
    for schedule in others:
        may_split = not schedule.splits_backward or set(assignment.remat) == {"none"}
        if may_split and not schedule.interleaves:
            yield dataclasses.replace(assignment, schedule=schedule.name)
    for schedule in others:
        if schedule.interleaves:
            yield from interleaved_like(assignment, problem, wanted, schedule.name)


def on_few_devices(problem: Problem, wanted: Constraints) -> Iterator[Assignment]:
    """Yield the whole step on some of the devices, as replicas; the others idle.

    Where devices share a machine, each is the faster for it.
    """
    count, remat = wanted.num_micro_batches or 1, wanted.remat or "none"
    if wanted.num_stages not in (None, 1):
        return
    for size in problem.sizes:
        slices = count * size
        cuts = problem.batch_size % slices == 0 and (problem.sliced or slices == 1)
        if size == problem.cluster.num_devices or not cuts or slices in problem.refused:
            continue
        yield Assignment(
            method="auto",
            layers=(tuple(layer for group in problem.groups for layer in group),),
            submeshes=(Submesh(tuple(range(size)), (size, 1)),),
            mesh_of=(0,),
            num_micro_batches=count,
            schedule=wanted.schedule or DEFAULT_SCHEDULE,
            remat=(remat,),
            zero=(0,),
            sequence=(False,),
            reduction=wanted.reduction,
        )


def recounted(
    assignment: Assignment, problem: Problem, wanted: Constraints
) -> Iterator[Assignment]:
    """Yield an assignment with other numbers of microbatches."""
    if wanted.num_micro_batches is not None or not problem.sliced:
        return
    data = math.lcm(*(submesh.logical_mesh[0] for submesh in assignment.submeshes))
    for count in spread_divisors(problem.batch_size, problem.batch_size):
        if problem.batch_size % (count * data) == 0 and count != assignment.num_micro_batches:
            yield dataclasses.replace(assignment, num_micro_batches=count)
