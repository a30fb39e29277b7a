"""Filling in a plan: submeshes, stages, and the predictions. Pure; needs no device.

`manual` cuts at the model's marks and balances layers over stages; `data` is one stage whose batch
is split over all devices. Both make replicas of a stage out of the devices that are left to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.errors import PlanError
from launcher.plan.memory import stage_memory
from launcher.plan.outer import OuterProgram, Slicing, place_outer
from launcher.plan.plan import Plan, StagePlan, Transfer
from launcher.plan.schedule import SCHEDULES, Kind, Task
from launcher.plan.simulate import TimedTask, bubble_fraction, simulate, step_seconds
from launcher.plan.stages import StageGraph, cut_stages, group_layers, layer_flops
from launcher.trace.cost import matmul_flops, moved_bytes, program_flops
from launcher.trace.graph import nbytes
from launcher.trace.step import Loss, TracedStep

METHODS = ("manual", "data")


def make_plan(
    step: TracedStep,
    *,
    method: str,
    cluster: ClusterShape,
    num_stages: int | None = None,
    num_micro_batches: int = 1,
    schedule: str = "1f1b",
    remat: str = "none",
) -> Plan:
    """The plan of a traced step by a named method.

    Raises:
        PlanError: more stages than layers or devices, or devices that do not divide.
        BatchError: the batch does not divide into microbatches and replicas.
    """
    if method not in METHODS:
        raise PlanError(f"parallel.method={method} is not one of {', '.join(METHODS)}")
    num_layers = step.loss(1).num_layers
    count = 1 if method == "data" else _stage_count(num_stages, num_layers, cluster.num_devices)
    replicas = cluster.num_devices // count
    slicing = Slicing(num_micro_batches, replicas)
    loss = step.loss(slicing.num_slices)
    layers = group_layers(layer_flops(loss), count)
    return _describe(step, loss, layers, slicing, method, schedule, remat, cluster)


def make_forward_plan(step: TracedStep, like: Plan) -> Plan:
    """An evaluation step's plan on the stages of a train step's, so that it finds its parameters.

    Raises:
        PlanError: the two do not have the same layers.
    """
    num_layers = step.loss(1).num_layers
    planned = sum(len(stage.layers) for stage in like.stages)
    if num_layers != planned:
        raise PlanError(
            f"the evaluation step has {num_layers} layers and the train step {planned}; both must "
            "run the same model"
        )
    cluster = ClusterShape(**like.cluster)
    slicing = Slicing(like.num_micro_batches, like.num_replicas)
    layers = [stage.layers for stage in like.stages]
    loss = step.loss(slicing.num_slices)
    return _describe(step, loss, layers, slicing, like.method, "forward", "none", cluster)


def timeline(plan: Plan) -> list[TimedTask]:
    """The step as the planner expects it."""
    schedule = SCHEDULES[plan.schedule](len(plan.stages), plan.num_micro_batches)
    cluster = ClusterShape(**plan.cluster)
    size = {(t.src_stage, t.dst_stage): t.bytes_per_microbatch for t in plan.transfers}

    def duration(task: Task) -> float:
        stage = plan.stages[task.stage]
        forward = task.kind is Kind.FORWARD
        return stage.forward_seconds if forward else stage.backward_seconds

    def transfer(src: int, dst: int) -> float:
        hosts = plan.stages[src].hosts[0], plan.stages[dst].hosts[0]
        speed = cluster.intra_host if hosts[0] == hosts[1] else cluster.inter_host
        replicas = plan.num_replicas  # each on its own link
        return cluster.latency + size.get((src, dst), 0) / speed / replicas

    return simulate(schedule, duration, transfer)


def measured_bubble(plan: Plan, seconds: Mapping[Task, float]) -> float:
    """The bubble of the plan's schedule when its tasks take these seconds, 0 … 1."""
    schedule = SCHEDULES[plan.schedule](len(plan.stages), plan.num_micro_batches)
    measured = simulate(schedule, lambda task: seconds.get(task, 0.0))
    return bubble_fraction(measured, len(plan.stages))


def _stage_count(asked: int | None, num_layers: int, num_devices: int) -> int:
    fits = [n for n in range(1, min(num_layers, num_devices) + 1) if num_devices % n == 0]
    if asked is None:
        return fits[-1]
    if asked > num_layers:
        raise PlanError(
            f"parallel.num_stages={asked} is more than the model's {num_layers} layers (one more "
            "than its mark_pipeline_boundary() calls); ask for fewer stages or mark more boundaries"
        )
    if asked not in fits:
        options = ", ".join(map(str, fits))
        raise PlanError(
            f"{num_devices} devices (cluster.gpus) do not divide into parallel.num_stages={asked} "
            f"equal submeshes; possible here: {options}"
        )
    return asked


def _describe(
    step: TracedStep,
    loss: Loss,
    layers: Sequence[Sequence[int]],
    slicing: Slicing,
    method: str,
    schedule: str,
    remat: str,
    cluster: ClusterShape,
) -> Plan:
    """Everything about a plan that follows from its cuts."""
    graphs = cut_stages(loss, layers)
    outer = place_outer(step, loss, graphs, slicing)
    tasks = SCHEDULES[schedule](len(graphs), slicing.micro_batches)
    trained = bool(loss.wrt)
    stages = []
    for graph, stage_layers, stage_tasks in zip(graphs, layers, tasks, strict=True):
        first = graph.index * slicing.replicas
        devices = tuple(range(first, first + slicing.replicas))
        forward = _forward_seconds(graph, cluster)
        backward = (3.0 if remat == "full" else 2.0) * forward if trained else 0.0
        stages.append(
            StagePlan(
                layers=tuple(stage_layers),
                hosts=tuple(sorted({cluster.host_of(d) for d in devices})),
                devices=devices,
                logical_mesh=(slicing.replicas, 1),
                remat=remat,
                forward_seconds=forward,
                backward_seconds=backward,
                memory_bytes=stage_memory(graph, step, loss, outer, slicing, stage_tasks, remat),
                num_parameters=_owned_parameters(loss, outer, graph.index),
                shardings=_in_words(slicing.replicas),
            )
        )
    model_flops = sum(matmul_flops(g.equations) for g in graphs) * slicing.num_slices
    flops = model_flops * (3 if trained else 1)
    draft = Plan(
        method=method,
        schedule=schedule,
        num_micro_batches=slicing.micro_batches,
        batch_size=step.batch_size,
        num_parameters=sum(stage.num_parameters for stage in stages),
        stages=tuple(stages),
        transfers=_transfers(graphs, outer, slicing, trained),
        cluster=vars(cluster).copy(),
        flops_per_step=flops,
        predicted_step_seconds=0.0,
        predicted_samples_per_second=0.0,
        predicted_tflops_per_device=0.0,
        predicted_tflops_per_device_with_remat=0.0,
        predicted_bubble_fraction=0.0,
        fingerprint=step.fingerprint,
    )
    return _with_times(draft, flops + (model_flops if remat == "full" and trained else 0.0))


def _with_times(draft: Plan, flops_with_remat: float) -> Plan:
    expected = timeline(draft)
    seconds = step_seconds(expected)
    return dataclasses.replace(
        draft,
        predicted_step_seconds=seconds,
        predicted_samples_per_second=draft.batch_size / seconds,
        predicted_tflops_per_device=draft.flops_per_step / seconds / draft.num_devices / 1e12,
        predicted_tflops_per_device_with_remat=flops_with_remat
        / seconds
        / draft.num_devices
        / 1e12,
        predicted_bubble_fraction=bubble_fraction(expected, len(draft.stages)),
    )


def _forward_seconds(graph: StageGraph, cluster: ClusterShape) -> float:
    """Matrix products at the sustained rate; the rest, fused, by the bytes it moves once."""
    products = matmul_flops(graph.equations) / cluster.flops
    other = [e for e in graph.equations if not matmul_flops([e])]
    fused = sum(moved_bytes(e) for e in other) / 4  # a chain of element-wise operations is one pass
    rest = max(program_flops(other) / cluster.flops, fused / cluster.memory_bandwidth)
    return products + rest + cluster.latency


def _owned_parameters(loss: Loss, outer: OuterProgram, stage: int) -> int:
    return sum(
        loss.invars[i].aval.size
        for i in loss.wrt
        if outer.homes.get(outer.operands[i].value, 0) == stage
    )


def _in_words(replicas: int) -> dict[str, str]:
    if replicas == 1:
        return {}
    return {
        "batch": f"split in {replicas} along data",
        "parameters": f"replicated {replicas} times",
        "gradients": "all-reduced along data once a step",
    }


def _transfers(
    graphs: Sequence[StageGraph], outer: OuterProgram, slicing: Slicing, trained: bool
) -> tuple[Transfer, ...]:
    every: dict[tuple[int, int], int] = {}
    once: dict[tuple[int, int], int] = {}
    for graph in graphs:
        for v, consumers in zip(graph.activations_out, graph.consumers, strict=True):
            size = nbytes(v.aval) * slicing.replicas
            for to in consumers:
                every[graph.index, to] = every.get((graph.index, to), 0) + size
                if trained and v in graph.active:
                    every[to, graph.index] = every.get((to, graph.index), 0) + size
    sends = [*outer.argument_sends, *outer.part_sends]
    for segment in (*outer.before, *outer.after):
        sends += [(v, segment.stage, to) for v, to in segment.sends]
    for v, src, dst in sends:
        once[src, dst] = once.get((src, dst), 0) + nbytes(v.aval)
    return tuple(
        Transfer(*link, every.get(link, 0), once.get(link, 0)) for link in sorted({*every, *once})
    )
