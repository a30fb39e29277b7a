"""Estimates of an assignment's plan from the search's own table, with its schedule simulated.

An estimate is far cheaper than building the plan, and close to it: by estimates the search decides
which plans are worth building, also between schedules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from launcher.partition.assignment import Assignment
from launcher.plan.inter_op.problem import Problem, Wanted, spread_divisors
from launcher.plan.inter_op.stage_costs import Setting, StageCosts
from launcher.plan.pipeline import Estimate, Pipeline, estimated
from launcher.plan.profile.measured_layers import MeasuredLayers
from launcher.plan.stage_plan import StagePlan, Transfer
from launcher.schedule import SCHEDULES, Tasks, backward_follows, make_tasks, max_in_flight

_MOST_STAGES_A_MESH = 4


def variants(assignment: Assignment, problem: Problem, wanted: Wanted) -> Iterator[Assignment]:
    """Yield an assignment, and the same under every other open schedule that can run it."""
    yield assignment
    if wanted.schedule is not None or len(assignment.layers) == 1:
        return
    others = [schedule for schedule in SCHEDULES.values() if schedule.improves_1f1b]
    for schedule in others:
        may_split = not schedule.splits_backward or set(assignment.remat) == {"none"}
        if may_split and not schedule.interleaves:
            yield dataclasses.replace(assignment, schedule=schedule.name)
    for schedule in others:
        if schedule.interleaves:
            yield from _interleaved(assignment, problem, wanted, schedule.name)


def recounted(assignment: Assignment, problem: Problem, wanted: Wanted) -> Iterator[Assignment]:
    """Yield an assignment with other numbers of microbatches, where devices share a machine.

    There the search's objective is no guide to their number, since a device works faster while
    another waits, and only the simulated timeline accounts for that.
    """
    if problem.cluster.at_once is None or wanted.num_micro_batches is not None:
        return
    data = math.lcm(*(submesh.logical_mesh[0] for submesh in assignment.submeshes))
    for count in spread_divisors(problem.batch_size, problem.batch_size):
        if problem.batch_size % (count * data) == 0 and count != assignment.num_micro_batches:
            yield dataclasses.replace(assignment, num_micro_batches=count)


def _interleaved(
    assignment: Assignment, problem: Problem, wanted: Wanted, schedule: str
) -> Iterator[Assignment]:
    """Yield assignments with several shorter stages on each of the submeshes.

    There are none unless all submeshes are used alike.
    """
    count, groups = len(assignment.submeshes), problem.groups
    shapes = {submesh.logical_mesh for submesh in assignment.submeshes}
    alike = max(len(set(assignment.zero)), len(set(assignment.sequence))) <= 1
    if len(shapes) > 1 or not alike or wanted.num_stages is not None:
        return
    # The last stage does both passes at once, so that its rematerialisation does not matter.
    (remat, *others) = set(assignment.remat[:-1])
    for each in range(2, _MOST_STAGES_A_MESH + 1):
        if others or len(groups) % (each * count):
            continue
        run = len(groups) // (each * count)
        parts = [groups[at : at + run] for at in range(0, len(groups), run)]
        yield dataclasses.replace(
            assignment,
            layers=tuple(tuple(layer for group in part for layer in group) for part in parts),
            mesh_of=tuple(s % count for s in range(each * count)),
            schedule=schedule,
            remat=(remat,) * (each * count),
            zero=assignment.zero[:1] * (each * count),
            sequence=assignment.sequence[:1] * (each * count),
        )


def make_estimate(
    assignment: Assignment, problem: Problem, measured: MeasuredLayers | None = None
) -> Estimate:
    """Return the estimate of an assignment; without memory where a submesh has several stages.

    Raises:
        UnmeasuredError: one of its layers could not be measured.
    """
    first = {group[0]: at for at, group in enumerate(problem.groups)}
    end = {group[-1]: at + 1 for at, group in enumerate(problem.groups)}
    count = len(assignment.layers)
    schedule = make_tasks(
        assignment.schedule, count, len(assignment.submeshes), assignment.num_micro_batches
    )
    goes_back = backward_follows(schedule[assignment.mesh_of[-1]], count - 1)
    stages, transfers, held = [], [], _in_flight(schedule, count)
    for s, layers in enumerate(assignment.layers):
        at = first[layers[0]], end[layers[-1]]
        costs = _costs(assignment, s, problem, goes_back)
        # What is used at once is not computed again.
        remat = "none" if goes_back and s + 1 == count else assignment.remat[s]
        stage = _stage(assignment, s, remat, at, costs, problem, measured)
        if held:
            memory = costs.memory(assignment.zero_of(s), remat, held)
            stage = dataclasses.replace(stage, memory_bytes=int(memory[-1 - s][at]))
        stages.append(stage)
        crossing = int(costs.sent()[at])
        if crossing and s + 1 < count:
            transfers += [Transfer(s, s + 1, crossing, 0), Transfer(s + 1, s, crossing, 0)]
    return estimated(
        Pipeline(
            method=assignment.method,
            schedule=assignment.schedule,
            num_micro_batches=assignment.num_micro_batches,
            stages=tuple(stages),
            transfers=tuple(transfers),
            cluster=vars(problem.cluster).copy(),
        )
    )


def _in_flight(schedule: Tasks, count: int) -> list[int]:
    """Return the microbatches whose activations each of `count` stages holds, last stage first."""
    if count > len(schedule):
        return []
    return [max_in_flight(tasks) for tasks in reversed(schedule)]


def _costs(assignment: Assignment, s: int, problem: Problem, goes_back: bool) -> StageCosts:
    data, model = assignment.submeshes[assignment.mesh_of[s]].logical_mesh
    setting = Setting(
        assignment.num_micro_batches,
        problem.batch_size,
        assignment.num_replicas,
        assignment.schedule,
        (),
        None,
    )
    m_index = problem.table.index(model, assignment.sequence_of(s))
    return StageCosts(problem.table, m_index, problem.cluster, setting, data, model, goes_back)


def _stage(
    assignment: Assignment,
    s: int,
    remat: str,
    at: tuple[int, int],
    costs: StageCosts,
    problem: Problem,
    measured: MeasuredLayers | None,
) -> StagePlan:
    """Return stage `s`, of the layer groups `at[0] … at[1] - 1`."""
    submesh, zero = assignment.submeshes[assignment.mesh_of[s]], assignment.zero_of(s)
    data, model = submesh.logical_mesh
    forward, backward = (float(seconds[at]) for seconds in costs.passes(zero, remat))
    late = float(costs.work()[at]) if s else backward
    if measured:
        slices = assignment.num_micro_batches * data
        own = measured.stage(assignment.layers[s], slices, model)
        again = own[0] if remat != "none" else 0.0
        work = float(costs.work()[at])
        forward, late = forward - work + own[0], own[1] / 2
        backward += own[1] + again - work * (3 if again else 2)
        late = late if s else backward
    if s and SCHEDULES[assignment.schedule].splits_backward:  # a program more
        late, backward = late + problem.cluster.launch, backward + problem.cluster.launch
    hosts = {problem.cluster.host_of(device) for device in submesh.devices}
    return StagePlan(
        layers=assignment.layers[s],
        hosts=tuple(sorted(hosts)),
        devices=submesh.devices,
        logical_mesh=submesh.logical_mesh,
        remat=assignment.remat[s],
        forward_seconds=forward,
        backward_seconds=backward,
        backward_weight_seconds=late,
        update_seconds=float(costs.once(zero)[at]),
        memory_bytes=0,
        num_parameters=0,
        shardings={},
        at_once=measured.at_once(assignment.layers[s], problem.cluster) if measured else None,
    )
