"""Estimates of an assignment's plan from the search's own table, with its schedule simulated.

An estimate is far cheaper than building the plan, and close to it: by estimates the search decides
which plans are worth building, also between schedules.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from launcher.partition import Assignment
from launcher.plan.cost.formulas import Amount, stage_parallelism
from launcher.plan.cost.stage_memory import Footprint
from launcher.plan.cost.stage_seconds import links_of
from launcher.plan.inter_op.layer_table import NOTHING, Recompute, recompute_of
from launcher.plan.inter_op.problem import Problem
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.submeshes import Mesh, SearchPoint
from launcher.plan.pipeline import Estimate, Pipeline, estimated
from launcher.plan.stage_plan import RingSeconds, StagePlan, Transfer, transfers_by_link
from launcher.schedule import Kind, backward_follows, make_tasks


def make_estimate(assignment: Assignment, problem: Problem) -> Estimate:
    """Return the estimate of an assignment's plan; raises as `make_pipeline` does."""
    return estimated(make_pipeline(assignment, problem))


def make_pipeline(assignment: Assignment, problem: Problem) -> Pipeline:
    """Return what the estimate of an assignment's plan is simulated from, its memory included.

    Raises:
        UnmeasuredError: one of its layers could not be measured.
    """
    groups = grouped_layers(assignment, problem)
    counts = len(assignment.layers), len(assignment.submeshes), assignment.num_micro_batches
    goes_back, moments = _moments(assignment.schedule, *counts)
    stages, arounds, crossing, footprints = [], [], [], {}
    end = 0
    for s, of_stage in enumerate(groups):
        begin, end = end, end + len(of_stage)
        at = 0, begin, end
        costs = _costs(assignment, s, problem, goes_back)
        again = recompute_of(assignment.remat[s], of_stage, problem.table.selective)
        stages.append(_stage(assignment, s, at, costs, again, problem))
        arounds.append(float(costs.around(assignment.zero_of(s))[at]))
        footprints[s] = _footprint(costs, at, again, is_first=s == 0)
        crossing.append(int(costs.sent()[at]))
    held, after = [0.0] * len(moments), [0.0] * len(moments)
    for stage, around, mesh in zip(stages, arounds, assignment.mesh_of, strict=True):
        held[mesh] += stage.memory_bytes
        after[mesh] += around
    peaks = [
        int(max(always + max(_activation_bytes(footprints, *of) for of in of_mesh), around))
        for always, around, of_mesh in zip(held, after, moments, strict=True)
    ]
    return Pipeline(
        method=assignment.method,
        schedule=assignment.schedule,
        num_micro_batches=assignment.num_micro_batches,
        stages=tuple(
            dataclasses.replace(stage, memory_bytes=peaks[mesh])
            for stage, mesh in zip(stages, assignment.mesh_of, strict=True)
        ),
        transfers=_transfers(crossing, _shared_bytes(assignment, groups, problem)),
        cluster=vars(problem.cluster).copy(),
        reduction=assignment.reduction,
    )


# The microbatches that are held, by stage, when a task begins; its stage and kind.
Moment = tuple[tuple[tuple[int, int], ...], int, Kind]
_MORE_HELD = {
    Kind.FORWARD: 1,
    Kind.BACKWARD_INPUT: 0,
    Kind.BACKWARD: -1,
    Kind.BACKWARD_WEIGHT: -1,
}


@functools.lru_cache(maxsize=256)
def _moments(
    schedule: str, num_stages: int, num_meshes: int, num_micro_batches: int
) -> tuple[bool, list[set[Moment]]]:
    """Return what the memory of a schedule depends on.

    That is whether each backward pass of the last stage directly follows its forward pass, and the
    distinct moments of every mesh, which are far fewer than its tasks.
    """
    tasks, last = make_tasks(schedule, num_stages, num_meshes, num_micro_batches), num_stages - 1
    found: list[set[Moment]] = []
    for of_mesh in tasks:
        held, moments = dict.fromkeys(sorted({task.stage for task in of_mesh}), 0), set()
        for stage, _, kind in of_mesh:
            moments.add((tuple(held.items()), stage, kind))
            held[stage] += _MORE_HELD[kind]
        found.append(moments)
    return backward_follows(tasks[last % num_meshes], last), found


def _activation_bytes(
    footprints: Mapping[int, Footprint], held: Sequence[tuple[int, int]], at: int, kind: Kind
) -> float:
    """Return the activation memory of a mesh while a task of stage `at` runs."""
    before = sum(count * footprints[stage].left[Kind.FORWARD] for stage, count in held)
    return before + footprints[at].working.get(kind, 0.0)


def grouped_layers(assignment: Assignment, problem: Problem) -> list[tuple[tuple[int, ...], ...]]:
    """Return of every stage the step's layers in each layer of the problem's table."""
    ends = {group[-1]: at + 1 for at, group in enumerate(problem.groups)}
    at = [0, *(ends[layers[-1]] for layers in assignment.layers)]
    return [problem.groups[first:end] for first, end in itertools.pairwise(at)]


def _transfers(
    crossing: Sequence[int], shared: Mapping[tuple[int, int], int]
) -> tuple[Transfer, ...]:
    """Return the transfers of a step.

    Args:
        crossing: bytes of a microbatch from each stage to the next, and back.
        shared: bytes once a step, by (source, destination) stage.
    """
    links = [(s, s + 1, size) for s, size in enumerate(crossing[:-1]) if size]
    every = {way: size for s, d, size in links for way in ((s, d), (d, s))}
    return transfers_by_link(every, shared)


def _shared_bytes(
    assignment: Assignment, groups: Sequence[tuple[tuple[int, ...], ...]], problem: Problem
) -> dict[tuple[int, int], int]:
    """Return the bytes once a step of parameters that stages on several meshes read.

    They are sent from the first of these stages, and their gradients back to it.

    Args:
        assignment: the assignment.
        groups: the groups of layers of each stage.
        problem: the problem.
    """
    stage_of = [s for s, of_stage in enumerate(groups) for _ in of_stage]
    found: dict[tuple[int, int], int] = {}
    whole = problem.table.index(1, False)
    for one in problem.table.parameters:
        home, *readers = dict.fromkeys(stage_of[layer] for layer in one.layers)
        for reader in readers:
            if assignment.mesh_of[reader] == assignment.mesh_of[home]:
                continue
            there, back = (home, reader), (reader, home)
            for way, name in ((there, "parameter_bytes"), (back, "gradient_bytes")):
                found[way] = found.get(way, 0) + int(one.of[name][whole])
    return {way: size for way, size in found.items() if size}


def _costs(assignment: Assignment, s: int, problem: Problem, goes_back: bool) -> StageCosts:
    submesh = assignment.submeshes[assignment.mesh_of[s]]
    data, model = submesh.logical_mesh
    count, replicas = assignment.num_micro_batches, assignment.num_replicas
    fixed = assignment.schedule, (), None, assignment.reduction
    point = SearchPoint(count, problem.batch_size, replicas, *fixed)
    mesh = Mesh.of(data, model, problem.table.index(model, assignment.sequence_of(s)))
    return problem.costs(mesh, point, goes_back, links_of(submesh, problem.cluster))


def _footprint(
    costs: StageCosts, at: tuple[int, int, int], again: Recompute, is_first: bool
) -> Footprint:
    """Return the memory of a stage, the one at `[mesh, first, end]`.

    Of a backward pass in two tasks the first is taken to need what the whole does, and the second
    to let go of everything. The first stage has the second one only.
    """
    left, forward, backward = (float(size[at]) for size in costs.working(again))
    working = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    change = {Kind.FORWARD: left, Kind.BACKWARD: -left, Kind.BACKWARD_WEIGHT: -left}
    working[Kind.BACKWARD_WEIGHT] = backward if is_first else 0.0
    if not is_first:
        working[Kind.BACKWARD_INPUT], change[Kind.BACKWARD_INPUT] = backward, 0.0
    return Footprint(change, working)


def _stage(
    assignment: Assignment,
    s: int,
    at: tuple[int, int, int],
    costs: StageCosts,
    again: Recompute,
    problem: Problem,
) -> StagePlan:
    """Return stage `s`, the one at `[mesh, first, end]` among the costs.

    Its memory is what is held while tasks run, beside activations.
    """
    submesh, zero = assignment.submeshes[assignment.mesh_of[s]], assignment.zero_of(s)
    layers, cluster, measured = assignment.layers[s], problem.cluster, problem.table.measured
    if measured:
        measured.check(layers, submesh.logical_mesh[1])
    passes = costs.passes(zero, again)

    def here(of: Amount) -> float:
        return float(np.asarray(of)[at])

    if measured:
        alone = measured.effective_parallelism(layers, cluster)
    else:
        total = here(passes.forward + passes.backward)
        alone = _parallelism(assignment, s, at, again, total, problem)
    in_pass, once = costs.pass_rings(zero, again), costs.once_rings(zero)
    return StagePlan(
        layers=layers,
        hosts=cluster.hosts_of(submesh.devices),
        devices=submesh.devices,
        logical_mesh=submesh.logical_mesh,
        remat=assignment.remat[s],
        forward_seconds=here(passes.forward),
        backward_seconds=here(passes.backward),
        backward_weight_seconds=here(passes.weight),
        update_seconds=here(costs.once(zero, again)),
        memory_bytes=int(costs.held(zero)[at]),
        num_parameters=0,
        shardings={},
        effective_parallelism=alone,
        hidden_seconds=here(costs.hidden(zero, again)),
        pass_rings=RingSeconds(**{axis: here(of) for axis, of in in_pass.items()}),
        once_rings=RingSeconds(**{axis: here(of) for axis, of in once.items()}),
    )


def _parallelism(
    assignment: Assignment,
    s: int,
    at: tuple[int, int, int],
    again: Recompute,
    total: float,
    problem: Problem,
) -> float | None:
    """Return the effective parallelism of stage `s`, whose passes take `total` seconds.

    Recomputed layers have the same share of products as the others.
    """
    (data, model), table = assignment.submeshes[assignment.mesh_of[s]].logical_mesh, problem.table
    row, slices = table.index(model, assignment.sequence_of(s)), assignment.num_micro_batches * data
    _, first, end = at

    def seconds(name: str, fixed: str, first: int = first, end: int = end) -> float:
        return float(table.of_slice(row, slices, name, fixed)[first, end])

    products = seconds("product_seconds", "fixed_product_seconds")
    work = seconds("work_seconds", "fixed_seconds")
    if again != NOTHING and work:
        in_full = first + again.full
        repeated = seconds("work_seconds", "fixed_seconds", end=in_full)
        if again.selective:
            repeated += seconds("selective_seconds", "fixed_selective_seconds", in_full)
        products *= 1 + repeated / (work + seconds("back_seconds", "fixed_back_seconds"))
    return stage_parallelism(products, total, problem.cluster)
