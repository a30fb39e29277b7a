"""What a plan is expected to take: seconds of a stage, the timeline of a step. Pure.

Used by `plan.make`, by the runtime for the order of its instructions, and by reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.outer import OuterProgram, accumulator_dtype
from launcher.plan.outline import Submesh
from launcher.plan.plan import Collectives, Plan
from launcher.plan.sharding.cost import (
    Collective,
    flow,
    is_active,
    loads,
    work_seconds,
)
from launcher.plan.sharding.dims import parts
from launcher.plan.sharding.layout import DATA, MODEL, ROWS, Layout
from launcher.plan.stages import StageGraph
from launcher.schedule import (
    Kind,
    Shared,
    Task,
    TimedTask,
    bubble_fraction,
    simulate,
    simulate_shared,
    step_seconds,
)
from launcher.trace.graph import Equation, nbytes
from launcher.trace.step import Loss


@dataclass(frozen=True)
class Links:
    """Bytes/s between neighbours in the rings of a submesh, along model and along data."""

    model: float
    data: float


def links_of(submesh: Submesh, cluster: ClusterShape) -> Links:
    """A ring inside a host has links of its own; those that leave it share the host's."""
    _, model = submesh.logical_mesh
    hosts = [cluster.host_of(device) for device in submesh.devices]
    if len(set(hosts)) == 1:
        return Links(cluster.intra_host, cluster.intra_host)
    rings = [hosts[at : at + model] for at in range(0, len(hosts), model)]
    inside = all(len(set(ring)) == 1 for ring in rings)
    beside = min(model, cluster.devices_per_host)  # rings along data, one for each place of model
    return Links(cluster.intra_host if inside else cluster.inter_host, cluster.inter_host / beside)


@dataclass(frozen=True)
class StageSeconds:
    """Of one stage and one microbatch; see `StagePlan`."""

    forward_seconds: float
    backward_seconds: float
    backward_weight_seconds: float
    collectives: tuple[Collectives, ...]


def stage_seconds(
    graph: StageGraph,
    loss: Loss,
    layout: Layout,
    cluster: ClusterShape,
    links: Links,
    again: Sequence[Equation],
    as_one: bool,
    split: bool,
    measured: tuple[float, float] | None = None,
) -> StageSeconds:
    """What a stage takes for a microbatch, on each of its devices.

    Args:
        links: of its submesh. again: what its backward pass computes once more.
        as_one: both passes are one program, which gathers what it needs once.
        split: the backward pass is two programs, of which the second may wait.
        measured: of the forward and the backward pass, instead of the model's own.
    """

    def seconds(found: Sequence[Collective]) -> float:
        return _crossing_seconds(found, layout, cluster, links)

    seeds = {loss.invars[i]: layout.operand(i) for i in graph.operands}
    seeds |= {v: layout.activation(v) for v in graph.activations_in}
    flows = flow(graph.equations, [*(loss.invars[i] for i in graph.wrt), *graph.active_in])
    program = loads(layout.inside(graph.equations, seeds), flows)
    repeated = [found for _, found in loads(layout.inside(again, seeds), flows)]
    forward = [c for _, found in program for c in found.forward]
    backward = [c for use, found in program if is_active(use, flows) for c in found.backward]
    if as_one:  # what the forward pass gathered is still there
        backward = [c for c in backward if not c.again]
    backward += [c for found in repeated for c in found.forward]
    gathers, scatters = _kept_in_parts(graph, loss, layout)
    work = sum(work_seconds(found, cluster) for _, found in program)
    own = sum(2 * work_seconds(found, cluster) for use, found in program if is_active(use, flows))
    more = sum(work_seconds(found, cluster) for found in repeated)
    first, second = work + seconds(forward), own + more + seconds(backward)
    if measured:  # on meshes without replicas, whose sums along the model axis are in it
        own, more = measured[1], more * measured[0] / work if work else 0.0
        first = measured[0] + seconds([c for c in forward if c.axis != MODEL])
        second = own + more + seconds([c for c in backward if c.axis != MODEL])
    first += seconds(gathers) + cluster.launch
    if not (graph.wrt or graph.active_in):
        return StageSeconds(first, 0.0, 0.0, _summary("forward", [*forward, *gathers]))
    crossing = scatters if as_one else [*gathers, *scatters]
    backward += crossing
    second += seconds(crossing) + (0.0 if as_one else cluster.launch)
    late = second if graph.wrt else 0.0  # all of it, where nothing waits for its input's gradient
    if graph.active_in and graph.wrt:
        start = cluster.launch if split else 0.0
        late, second = own / 2 + start, second + start
    found = _summary("forward", [*forward, *gathers]) + _summary("backward", backward)
    return StageSeconds(first, second, late, found)


def _crossing_seconds(
    found: Sequence[Collective], layout: Layout, cluster: ClusterShape, links: Links
) -> float:
    """Of collectives, one after another, each on the links of its axis."""
    return sum(
        one.seconds(layout.sizes, links.model if one.axis == MODEL else links.data, cluster.latency)
        for one in found
    )


def _kept_in_parts(
    graph: StageGraph, loss: Loss, layout: Layout
) -> tuple[list[Collective], list[Collective]]:
    """Parameters that a pass gathers along data, and their gradients that it scatters (ZeRO-3)."""
    gathered = [i for i in graph.operands if layout.is_gathered(i)]
    scattered = [i for i in gathered if i in graph.wrt]
    return (
        [Collective("all-gather", _ALONG_DATA, _whole_bytes(i, loss, layout)) for i in gathered],
        [Collective("reduce-scatter", _ALONG_DATA, _sum_bytes(i, loss, layout)) for i in scattered],
    )


def update_collectives(graph: StageGraph, loss: Loss, layout: Layout) -> list[Collective]:
    """The gradients that are summed over the replicas once a step, and where the optimizer's state
    is cut along data (ZeRO-2) the parameters that are gathered after that. Not the single numbers
    that an optimizer may sum, such as the global norm."""
    found = []
    for i in graph.wrt:
        if layout.is_gathered(i):
            continue  # summed in every pass
        if layout.is_scattered(i):
            sums, whole = _sum_bytes(i, loss, layout), _whole_bytes(i, loss, layout)
            found.append(Collective("reduce-scatter", _ALONG_DATA, sums))
            found.append(Collective("all-gather", _ALONG_DATA, whole))
        elif layout.sizes[DATA] > 1:
            found.append(Collective("all-reduce", DATA, _sum_bytes(i, loss, layout)))
    return found


_ALONG_DATA = DATA, ROWS


def _whole_bytes(i: int, loss: Loss, layout: Layout) -> float:
    """Of an operand where it is whole along data."""
    return nbytes(loss.invars[i].aval) / parts(layout.operand(i), layout.sizes)


def _sum_bytes(i: int, loss: Loss, layout: Layout) -> float:
    """Of its gradient, as it is summed."""
    aval = loss.invars[i].aval
    size = int(aval.size) * accumulator_dtype(aval.dtype).itemsize
    return size / parts(layout.operand(i), layout.sizes)


def _summary(when: str, found: Sequence[Collective]) -> tuple[Collectives, ...]:
    count: dict[tuple[str, str], int] = {}
    size: dict[tuple[str, str], float] = {}
    for one in found:
        key = one.kind, "model" if one.axis == MODEL else "data"
        count[key] = count.get(key, 0) + one.times
        size[key] = size.get(key, 0.0) + one.times * one.size
    return tuple(Collectives(when, *key, count[key], int(size[key])) for key in sorted(count))


def update_seconds(
    graph: StageGraph,
    loss: Loss,
    outer: OuterProgram,
    layout: Layout,
    cluster: ClusterShape,
    links: Links,
    share: float,
) -> tuple[float, tuple[Collectives, ...]]:
    """What a stage takes once a step: gradients summed over the replicas, and its `share` of the
    mesh's update, which reads and writes the state once. And what crosses between its devices."""
    if not loss.wrt:
        return 0.0, ()
    found = update_collectives(graph, loss, layout)
    total = _crossing_seconds(found, layout, cluster, links)
    state = sum(
        nbytes(v.aval) / parts(layout.outer(v), layout.sizes)
        for v, home in outer.homes.items()
        if home == graph.mesh
    )
    return total + 2 * share * state / cluster.memory_bandwidth, _summary("update", found)


def transfer_seconds(plan: Plan) -> dict[tuple[int, int], float]:
    """What a microbatch takes from one stage to another, of all that send."""
    cluster, found = ClusterShape(**plan.cluster), {}
    for one in plan.transfers:
        src, dst = one.src_stage, one.dst_stage
        hosts = plan.stages[src].hosts, plan.stages[dst].hosts
        speed, links = cluster.intra_host, plan.num_replicas  # each on its own
        if hosts[0] != hosts[1]:  # but for a host's
            speed, links = cluster.inter_host, min(links, *map(len, hosts))
        found[src, dst] = cluster.latency + one.bytes_per_microbatch / speed / links
    return found


def timeline(plan: Plan) -> list[TimedTask]:
    """The step's pipeline as the planner expects it."""
    cluster, mesh_of = ClusterShape(**plan.cluster), plan.mesh_of
    sending = transfer_seconds(plan)

    def duration(task: Task) -> float:
        stage = plan.stages[task.stage]
        return {
            Kind.FORWARD: stage.forward_seconds,
            Kind.BACKWARD: stage.backward_seconds,
            Kind.BACKWARD_INPUT: stage.backward_seconds - stage.backward_weight_seconds,
            Kind.BACKWARD_WEIGHT: stage.backward_weight_seconds,
        }[task.kind]

    def transfer(src: int, dst: int) -> float:
        here = mesh_of[src] == mesh_of[dst]
        return 0.0 if here else sending.get((src, dst), cluster.latency)

    if cluster.at_once is None or cluster.num_devices == 1:
        return simulate(plan.tasks(), duration, transfer)
    shares = [stage.at_once or cluster.at_once for stage in plan.stages]
    machine = Shared(cluster.num_devices, [min(n, cluster.num_devices) for n in shares])
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
