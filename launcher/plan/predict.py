"""What a plan is expected to take: seconds of a stage, the timeline of a step. Pure.

Used by `plan.make`, by the runtime for the order of its instructions, and by reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.outer import OuterProgram
from launcher.plan.plan import Plan
from launcher.plan.schedule import Kind, Task
from launcher.plan.sharding.cost import (
    all_reduce_seconds,
    backward_seconds,
    flow,
    forward_seconds,
    gather_seconds,
    is_active,
    load,
)
from launcher.plan.sharding.dims import Sharding, parts
from launcher.plan.sharding.layout import DATA, ROWS, Layout
from launcher.plan.sharing import Shared, simulate_shared
from launcher.plan.simulate import TimedTask, bubble_fraction, simulate, step_seconds
from launcher.plan.stages import StageGraph
from launcher.trace.graph import Equation, nbytes
from launcher.trace.step import Loss, TracedStep


@dataclass(frozen=True)
class StageSeconds:
    """Of one stage and one microbatch; see `StagePlan`."""

    forward_seconds: float
    backward_seconds: float
    backward_weight_seconds: float


def stage_seconds(
    graph: StageGraph,
    loss: Loss,
    layout: Layout,
    cluster: ClusterShape,
    link: float,
    again: Sequence[Equation],
    measured: tuple[float, float] | None = None,
) -> StageSeconds:
    """What a stage takes for a microbatch, on each of its devices.

    Args:
        link: bytes/s between its devices. again: what its backward pass computes once more.
        measured: of the forward and the backward pass, instead of the model's own.
    """
    seeds = {loss.invars[i]: layout.operand(i) for i in graph.operands}
    seeds |= {v: layout.activation(v) for v in graph.activations_in}
    sharding = layout.inside(graph.equations, seeds)
    forward, work, sums = _both(sharding, graph, loss, cluster, link)
    if not (graph.wrt or graph.active_in):
        forward = measured[0] if measured else forward
        return StageSeconds(forward + cluster.launch, 0.0, 0.0)
    repeated = _both(layout.inside(again, seeds), graph, loss, cluster, link)[0]
    if measured:
        repeated *= measured[0] / forward if forward else 0.0
        forward, work, sums = *measured, 0.0
    gathered = [i for i in graph.operands if layout.is_gathered(i)]
    gather = sum(_data_seconds(i, loss, layout, cluster, link) for i in gathered)
    forward += gather + cluster.launch
    backward = work + sums + repeated + 2 * gather + cluster.launch
    late = work / 2 if graph.active_in and graph.wrt else backward
    return StageSeconds(forward, backward, late)


def _both(
    sharding: Sharding, graph: StageGraph, loss: Loss, cluster: ClusterShape, link: float
) -> tuple[float, float, float]:
    """Forward seconds; the backward pass's own work; its sums."""
    sources = [*(loss.invars[i] for i in graph.wrt), *graph.active_in]
    flows = flow(graph.equations, sources)
    forward = work = sums = 0.0
    for use in sharding.dims.uses:
        found = load(use, sharding, flows)
        forward += forward_seconds(found, sharding.sizes, cluster, link)
        if is_active(use, flows):
            own = backward_seconds(
                dataclasses.replace(found, backward={}), sharding.sizes, cluster, link
            )
            work += own
            sums += backward_seconds(found, sharding.sizes, cluster, link) - own
    return forward, work, sums


def _data_seconds(i: int, loss: Loss, layout: Layout, cluster: ClusterShape, link: float) -> float:
    """To gather a parameter, or scatter its gradient, along data."""
    aval = loss.invars[i].aval
    devices = layout.sizes[DATA] * layout.sizes[ROWS]
    size = nbytes(aval) / parts(layout.operand(i), layout.sizes)
    return gather_seconds(size, devices, link, cluster.latency)


def update_seconds(
    graph: StageGraph,
    step: TracedStep,
    loss: Loss,
    outer: OuterProgram,
    layout: Layout,
    cluster: ClusterShape,
    link: float,
) -> float:
    """What a stage takes once a step: gradients summed over the replicas, and its share of the
    mesh's update, which reads and writes the state once."""
    if not loss.wrt:
        return 0.0
    total = 0.0
    for i in graph.wrt:
        if layout.is_gathered(i):
            continue  # summed in every pass
        size = loss.invars[i].aval.size * 4 / parts(layout.operand(i), layout.sizes)
        total += all_reduce_seconds(size, layout.sizes[DATA], link, cluster.latency)
    state = sum(
        nbytes(v.aval) / parts(layout.outer(v), layout.sizes)
        for v, home in outer.homes.items()
        if home == graph.mesh
    )
    return total + 2 * state / cluster.memory_bandwidth


def timeline(plan: Plan) -> list[TimedTask]:
    """The step's pipeline as the planner expects it."""
    cluster = ClusterShape(**plan.cluster)
    mesh_of = plan.mesh_of
    size = {(t.src_stage, t.dst_stage): t.bytes_per_microbatch for t in plan.transfers}

    def duration(task: Task) -> float:
        stage = plan.stages[task.stage]
        return {
            Kind.FORWARD: stage.forward_seconds,
            Kind.BACKWARD: stage.backward_seconds,
            Kind.BACKWARD_INPUT: stage.backward_seconds - stage.backward_weight_seconds,
            Kind.BACKWARD_WEIGHT: stage.backward_weight_seconds,
        }[task.kind]

    def transfer(src: int, dst: int) -> float:
        if mesh_of[src] == mesh_of[dst]:
            return 0.0
        hosts = plan.stages[src].hosts[0], plan.stages[dst].hosts[0]
        speed = cluster.intra_host if hosts[0] == hosts[1] else cluster.inter_host
        replicas = plan.num_replicas  # each on its own link
        return cluster.latency + size.get((src, dst), 0) / speed / replicas

    if cluster.at_once is None or cluster.at_once >= cluster.num_devices:
        return simulate(plan.tasks(), duration, transfer)
    machine = Shared(cluster.num_devices, cluster.at_once)
    devices_of = [len(mesh) for mesh in plan.meshes]
    return simulate_shared(plan.tasks(), duration, transfer, devices_of, machine)


def measured_bubble(plan: Plan, seconds: Mapping[Task, float]) -> float:
    """The bubble of the plan's schedule when its tasks take these seconds, 0 … 1."""
    measured = simulate(plan.tasks(), lambda task: seconds.get(task, 0.0))
    return bubble_fraction(measured, len(plan.meshes))


def with_predictions(draft: Plan, flops_with_remat: float) -> Plan:
    """The plan with its `predicted_…` fields filled in from its other fields."""
    expected = timeline(draft)
    once: dict[tuple[int, ...], float] = {}
    for stage in draft.stages:
        once[stage.devices] = once.get(stage.devices, 0.0) + stage.update_seconds
    seconds = step_seconds(expected) + max(once.values())
    rate = 1.0 / seconds / draft.num_devices / 1e12
    return dataclasses.replace(
        draft,
        predicted_step_seconds=seconds,
        predicted_samples_per_second=draft.batch_size / seconds,
        predicted_tflops_per_device=draft.flops_per_step * rate,
        predicted_tflops_per_device_with_remat=flops_with_remat * rate,
        predicted_bubble_fraction=bubble_fraction(expected, len(draft.meshes)),
    )
