"""What a plan is expected to take: seconds of a stage, the timeline of a step. Pure.

Used by `plan.make`, by the runtime for the order of its instructions, and by reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.plan import Plan
from launcher.plan.schedule import Kind, Task
from launcher.plan.simulate import TimedTask, bubble_fraction, simulate, step_seconds
from launcher.trace.cost import matmul_flops, moved_bytes, program_flops
from launcher.trace.graph import Equation


def timeline(plan: Plan) -> list[TimedTask]:
    """The step as the planner expects it."""
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

    return simulate(plan.tasks(), duration, transfer)


def measured_bubble(plan: Plan, seconds: Mapping[Task, float]) -> float:
    """The bubble of the plan's schedule when its tasks take these seconds, 0 … 1."""
    measured = simulate(plan.tasks(), lambda task: seconds.get(task, 0.0))
    return bubble_fraction(measured, len(plan.meshes))


def run_seconds(equations: Sequence[Equation], cluster: ClusterShape) -> float:
    """One run of a program on one device: matrix products at the sustained rate; the rest, fused,
    by the bytes it moves once."""
    products = matmul_flops(equations) / cluster.flops
    other = [e for e in equations if not matmul_flops([e])]
    fused = sum(moved_bytes(e) for e in other) / 4  # a chain of element-wise operations is one pass
    return products + max(program_flops(other) / cluster.flops, fused / cluster.memory_bandwidth)


def with_predictions(draft: Plan, flops_with_remat: float) -> Plan:
    """The plan with its `predicted_…` fields filled in from its other fields."""
    expected = timeline(draft)
    seconds = step_seconds(expected)
    rate = 1.0 / seconds / draft.num_devices / 1e12
    return dataclasses.replace(
        draft,
        predicted_step_seconds=seconds,
        predicted_samples_per_second=draft.batch_size / seconds,
        predicted_tflops_per_device=draft.flops_per_step * rate,
        predicted_tflops_per_device_with_remat=flops_with_remat * rate,
        predicted_bubble_fraction=bubble_fraction(expected, len(draft.meshes)),
    )
