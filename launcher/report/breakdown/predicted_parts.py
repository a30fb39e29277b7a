"""Where the time of a step goes by its plan, in the same parts as of a recorded step. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.report.breakdown.accounting import StageRow
from launcher.report.breakdown.step_parts import StepSeconds
from launcher.schedule import Kind, Task, TimedTask, dependencies

if TYPE_CHECKING:
    from launcher.plan.plan import Plan
    from launcher.plan.stage_plan import StagePlan


def predicted_seconds(plan: Plan) -> StepSeconds:
    """Return where the time of a step goes by a plan; the losses of a step follow one another."""
    found = StepSeconds(plan.predicted_step_seconds)
    for part in plan.parts:
        _add(found, part)
    found.parts["residue"] = found.step_seconds - sum(found.parts.values())
    return found


def forward_shares(plan: Plan) -> dict[int, float]:
    """Return of each stage's passes the forward pass's share."""
    return {
        s: stage.forward_seconds / max(stage.forward_seconds + stage.backward_seconds, 1e-12)
        for s, stage in enumerate(plan.stages)
    }


def update_shares(plan: Plan) -> dict[int, float]:
    """Return each stage's seconds of update, by which those of shared devices are divided."""
    return {s: stage.update_seconds for s, stage in enumerate(plan.stages)}


def _add(found: StepSeconds, plan: Plan) -> None:
    """Add the parts of one loss's pipeline."""
    from launcher.plan.pipeline import timeline, whole_step_seconds  # import JAX: loaded by now

    expected = timeline(plan)
    by_mesh: dict[int, list[TimedTask]] = defaultdict(list)
    for timed in expected:
        by_mesh[timed.mesh].append(timed)
    ends = {timed.task: timed.end for timed in expected}
    pipeline, total = max(ends.values(), default=0.0), whole_step_seconds(plan, expected)
    mesh_of, meshes = plan.mesh_of, plan.meshes
    updates = [
        sum(stage.update_seconds for stage in plan.stages if stage.devices == devices)
        for devices in meshes
    ]
    once = total - pipeline - max(updates)  # in which links alone are occupied
    for mesh, devices in enumerate(meshes):
        share, now = len(devices) / plan.num_devices, 0.0
        busy: dict[Kind, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        summed = 0.0
        idle = transfers = 0.0
        for timed in by_mesh[mesh]:
            task = timed.task
            gap, now = timed.start - now, timed.end
            idle += gap
            waited, source = _waited(task, timed.start, gap, plan, ends)
            transfers += waited
            if waited:
                link = mesh_of[source], mesh
                found.waits[link] = found.waits.get(link, 0.0) + waited
            busy[task.kind][task.stage] += timed.end - timed.start
        stages = [s for s, of in enumerate(mesh_of) if of == mesh]
        for s in stages:
            stage = plan.stages[s]
            in_passes = sum(of[s] for of in busy.values())
            sums = _collective_seconds(stage, plan)
            nominal = (stage.forward_seconds + stage.backward_seconds) * plan.num_micro_batches
            passes = sums["forward"] + sums["backward"]
            summed += min(passes / nominal, 1.0) * in_passes if nominal else 0.0
            summed += min(sums["update"], stage.update_seconds)
        tail = pipeline - now + max(updates) - updates[mesh]
        idle += tail + once
        parts = {
            "compute": total - idle - summed,
            "collectives": summed,
            "transfers": transfers + once,
            "bubble": idle - transfers - once,
        }
        for name, seconds in parts.items():
            found.parts[name] += seconds * share
        _add_rows(found, plan, stages, busy, idle, total)


def _add_rows(
    found: StepSeconds,
    plan: Plan,
    stages: Sequence[int],
    busy: dict[Kind, dict[int, float]],
    idle: float,
    total: float,
) -> None:
    for s in stages:
        forward = busy[Kind.FORWARD][s]
        backward = sum(of[s] for kind, of in busy.items() if kind is not Kind.FORWARD)
        update = plan.stages[s].update_seconds
        others = total - idle - forward - backward - update
        before = found.stages.get(s, StageRow(s))
        found.stages[s] = StageRow(
            s,
            before.forward_seconds + forward,
            before.backward_seconds + backward,
            before.update_seconds + update,
            before.idle_seconds + idle,
            before.others_seconds + others,
        )


def _waited(
    task: Task, start: float, gap: float, plan: Plan, ends: dict[Task, float]
) -> tuple[float, int]:
    """Return how much of the gap before a task an array was on its way to it, and its stage."""
    if gap <= 0 or task.kind is Kind.BACKWARD_WEIGHT:
        return 0.0, task.stage
    is_forward = task.kind is Kind.FORWARD
    needs = set(dependencies(task, len(plan.stages)))
    needs |= {
        task._replace(stage=one.src_stage)
        for one in plan.transfers
        if one.dst_stage == task.stage
        and one.bytes_per_microbatch
        and (one.src_stage < task.stage) is is_forward
    }
    mesh_of = plan.mesh_of
    abroad = [n for n in needs if n in ends and mesh_of[n.stage] != mesh_of[task.stage]]
    if not abroad:
        return 0.0, task.stage
    last = max(abroad, key=lambda need: ends[need])
    return min(gap, max(0.0, start - ends[last])), last.stage


def _collective_seconds(stage: StagePlan, plan: Plan) -> dict[str, float]:
    """Return the seconds of a stage's collectives in a step, by when they are.

    What runs hidden under a backward pass is not counted.
    """
    from launcher.hardware.cluster_shape import ClusterShape
    from launcher.plan.cost import formulas

    cluster = ClusterShape(**plan.cluster)
    hosts = [cluster.host_of(device) for device in stage.devices]
    data, model = stage.logical_mesh
    links = formulas.ring_links(hosts, model, cluster)
    found = dict.fromkeys(("forward", "backward", "update"), 0.0)
    for one in stage.collectives:
        size, link = (model, links.model) if one.axis == "model" else (data, links.data)
        ring = formulas.all_reduce_seconds
        if one.kind != "all-reduce":
            ring = formulas.gather_seconds
        times = 1 if one.when == "update" else plan.num_micro_batches
        found[one.when] += times * float(ring(one.bytes, size, link, cluster.latency, one.count))
    found["update"] = max(0.0, found["update"] - stage.hidden_seconds) + stage.exchange_seconds
    return found
