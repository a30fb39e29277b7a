"""Estimates of an assignment's plan from the search's own table, with its schedule simulated.

An estimate is far cheaper than building the plan, and close to it: by estimates the search decides
which plans are worth building, also between schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from launcher.partition.assignment import Assignment
from launcher.plan.cost.mesh_memory import mesh_activation_bytes
from launcher.plan.cost.stage_memory import Footprint
from launcher.plan.cost.stage_seconds import links_of
from launcher.plan.inter_op.problem import Problem
from launcher.plan.inter_op.stage_costs import Setting, StageCosts
from launcher.plan.pipeline import Estimate, Pipeline, estimated
from launcher.plan.stage_plan import StagePlan, Transfer
from launcher.schedule import Kind, backward_follows


def make_estimate(assignment: Assignment, problem: Problem) -> Estimate:
    """Return the estimate of an assignment's plan; raises as `make_pipeline` does."""
    return estimated(make_pipeline(assignment, problem))


def make_pipeline(assignment: Assignment, problem: Problem) -> Pipeline:
    """Return what the estimate of an assignment's plan is simulated from, its memory included.

    Raises:
        UnmeasuredError: one of its layers could not be measured.
    """
    first = {group[0]: at for at, group in enumerate(problem.groups)}
    end = {group[-1]: at + 1 for at, group in enumerate(problem.groups)}
    tasks = assignment.tasks()
    last = len(assignment.layers) - 1
    goes_back = backward_follows(tasks[assignment.mesh_of[last]], last)
    stages, crossing, footprints = [], [], {}
    for s, layers in enumerate(assignment.layers):
        at = first[layers[0]], end[layers[-1]]
        costs = _costs(assignment, s, problem, goes_back)
        stages.append(_stage(assignment, s, at, costs, problem))
        footprints[s] = _footprint(costs, at, assignment.remat[s], is_first=s == 0)
        crossing.append(int(costs.sent()[at]))
    held = [0.0] * len(tasks)
    for stage, mesh in zip(stages, assignment.mesh_of, strict=True):
        held[mesh] += stage.memory_bytes
    peaks = [
        int(always + mesh_activation_bytes(footprints, of_mesh))
        for always, of_mesh in zip(held, tasks, strict=True)
    ]
    return Pipeline(
        method=assignment.method,
        schedule=assignment.schedule,
        num_micro_batches=assignment.num_micro_batches,
        stages=tuple(
            dataclasses.replace(stage, memory_bytes=peaks[mesh])
            for stage, mesh in zip(stages, assignment.mesh_of, strict=True)
        ),
        transfers=_transfers(crossing, _shared_bytes(assignment, first, problem)),
        cluster=vars(problem.cluster).copy(),
        reduction=assignment.reduction,
    )


def _transfers(
    crossing: Sequence[int], shared: Mapping[tuple[int, int], int]
) -> tuple[Transfer, ...]:
    """Return the transfers of a step.

    Args:
        crossing: bytes of a microbatch from each stage to the next, and back.
        shared: bytes once a step, by (source, destination) stage.
    """
    links = [(s, s + 1, size) for s, size in enumerate(crossing[:-1]) if size]
    every = {(src, dst): size for s, d, size in links for src, dst in [(s, d), (d, s)]}
    both = sorted({*every, *shared})
    return tuple(Transfer(*way, every.get(way, 0), shared.get(way, 0)) for way in both)


def _shared_bytes(
    assignment: Assignment, first: Mapping[int, int], problem: Problem
) -> dict[tuple[int, int], int]:
    """Return the bytes once a step of parameters that stages on several meshes read.

    They are sent from the first of these stages, and their gradients back to it.

    Args:
        assignment: the assignment.
        first: the position of each group of layers, by its first layer.
        problem: the problem.
    """
    stage_of = [0] * len(problem.groups)
    for s, layers in enumerate(assignment.layers):
        for layer in layers:
            if layer in first:
                stage_of[first[layer]] = s
    found: dict[tuple[int, int], int] = {}
    whole = problem.table.index(1, False)
    for one in problem.table.parameters:
        home, *readers = dict.fromkeys(stage_of[layer] for layer in one.layers)
        for reader in readers:
            if assignment.mesh_of[reader] == assignment.mesh_of[home]:
                continue
            for way, name in (
                ((home, reader), "parameter_bytes"),
                ((reader, home), "gradient_bytes"),
            ):
                size = int(one.of[name][whole])
                found[way] = found.get(way, 0) + size
    return {way: size for way, size in found.items() if size}


def _costs(assignment: Assignment, s: int, problem: Problem, goes_back: bool) -> StageCosts:
    submesh = assignment.submeshes[assignment.mesh_of[s]]
    data, model = submesh.logical_mesh
    setting = Setting(
        assignment.num_micro_batches,
        problem.batch_size,
        assignment.num_replicas,
        assignment.schedule,
        (),
        None,
        assignment.reduction,
    )
    m_index = problem.table.index(model, assignment.sequence_of(s))
    links = links_of(submesh, problem.cluster)
    return problem.costs(m_index, setting, data, goes_back, links)


def _footprint(costs: StageCosts, at: tuple[int, int], remat: str, is_first: bool) -> Footprint:
    """Return the memory of a stage of the layer groups `at[0] … at[1] - 1`.

    Of a backward pass in two tasks the first is taken to need what the whole does, and the second
    to let go of everything. The first stage has the second one only.
    """
    left, forward, backward = (float(size[at]) for size in costs.working(remat))
    working = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    change = {Kind.FORWARD: left, Kind.BACKWARD: -left, Kind.BACKWARD_WEIGHT: -left}
    working[Kind.BACKWARD_WEIGHT] = backward if is_first else 0.0
    if not is_first:
        working[Kind.BACKWARD_INPUT], change[Kind.BACKWARD_INPUT] = backward, 0.0
    return Footprint(change, working)


def _stage(
    assignment: Assignment, s: int, at: tuple[int, int], costs: StageCosts, problem: Problem
) -> StagePlan:
    """Return stage `s`, of the layer groups `at[0] … at[1] - 1`.

    Its memory is what is held all through the step.
    """
    submesh, zero = assignment.submeshes[assignment.mesh_of[s]], assignment.zero_of(s)
    layers, cluster, measured = assignment.layers[s], problem.cluster, problem.table.measured
    if measured:
        measured.check(layers, submesh.logical_mesh[1])
    passes = costs.passes(zero, assignment.remat[s])
    return StagePlan(
        layers=layers,
        hosts=tuple(sorted({cluster.host_of(device) for device in submesh.devices})),
        devices=submesh.devices,
        logical_mesh=submesh.logical_mesh,
        remat=assignment.remat[s],
        forward_seconds=float(np.asarray(passes.forward)[at]),
        backward_seconds=float(np.asarray(passes.backward)[at]),
        backward_weight_seconds=float(np.asarray(passes.weight)[at]),
        update_seconds=float(costs.once(zero, assignment.remat[s])[at]),
        memory_bytes=int(costs.held(zero)[at]),
        num_parameters=0,
        shardings={},
        effective_parallelism=measured.effective_parallelism(layers, cluster) if measured else None,
    )
