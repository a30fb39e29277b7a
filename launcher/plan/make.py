"""Filling in a plan: submeshes, stages, and the predictions. Pure; needs no device.

`manual` cuts at the model's marks and balances layers over stages; `data` is one stage whose batch
is split over all devices. Both make replicas of a mesh's stages out of the devices left to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.errors import PlanError
from launcher.plan.memory import mesh_memory
from launcher.plan.outer import OuterProgram, Slicing, place_outer
from launcher.plan.plan import Plan, StagePlan, Transfer
from launcher.plan.predict import run_seconds, with_predictions
from launcher.plan.remat import recomputed, remat_of_stages
from launcher.plan.schedule import (
    SCHEDULES,
    SEVERAL_STAGES_A_MESH,
    backward_follows,
    check_schedule,
    make_schedule,
)
from launcher.plan.stages import StageGraph, cut_stages, group_layers, layer_flops
from launcher.trace.cost import matmul_flops
from launcher.trace.graph import nbytes
from launcher.trace.step import Loss, TracedStep

METHODS = ("manual", "data")


def make_plan(
    step: TracedStep,
    *,
    method: str,
    cluster: ClusterShape,
    num_stages: int | None = None,
    stages_per_mesh: int | None = None,
    num_micro_batches: int = 1,
    schedule: str = "1f1b",
    remat: str | Sequence[str] = "none",
) -> Plan:
    """The plan of a traced step by a named method.

    Args:
        stages_per_mesh: how many of the stages share a submesh; by default one, and with
            `interleaved_1f1b` as few as fit, at least two.
        remat: one of `plan.remat.POLICIES`, for all stages or for each.

    Raises:
        PlanError: more stages than layers or devices, devices that do not divide, a schedule that
            cannot run so many stages on a mesh, or an unknown name.
        BatchError: the batch does not divide into microbatches and replicas.
    """
    trainings = [name for name in SCHEDULES if name != "forward"]
    for key, name, known in (("method", method, METHODS), ("schedule", schedule, trainings)):
        if name not in known:
            raise PlanError(f"parallel.{key}={name} is not one of {', '.join(known)}")
    num_layers = step.loss(1).num_layers
    count, num_meshes = 1, 1
    if method != "data":
        count, num_meshes = _stages_and_meshes(
            num_stages, stages_per_mesh, schedule, num_layers, cluster.num_devices
        )
    slicing = Slicing(num_micro_batches, cluster.num_devices // num_meshes)
    loss = step.loss(slicing.num_slices)
    layers = group_layers(layer_flops(loss), count)
    mesh_of = [s % num_meshes for s in range(count)]
    remats = remat_of_stages(remat, count)
    return _describe(step, loss, layers, mesh_of, slicing, method, schedule, remats, cluster)


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
    remats = ["none"] * len(layers)
    return _describe(
        step, loss, layers, like.mesh_of, slicing, like.method, "forward", remats, cluster
    )


def _stages_and_meshes(
    asked: int | None,
    stages_per_mesh: int | None,
    schedule: str,
    num_layers: int,
    num_devices: int,
) -> tuple[int, int]:
    """How many stages on how many equal meshes: as many meshes as fit what was asked."""
    several = schedule in SEVERAL_STAGES_A_MESH
    if stages_per_mesh is not None and stages_per_mesh > 1 and not several:
        raise PlanError(
            f"parallel.stages_per_mesh={stages_per_mesh} needs "
            f"parallel.schedule=interleaved_1f1b; {schedule} runs one stage on each submesh"
        )
    for key, number in (("num_stages", asked), ("stages_per_mesh", stages_per_mesh)):
        if number is not None and number > num_layers:
            raise PlanError(
                f"parallel.{key}={number} is more than the model's {num_layers} layers (one more "
                "than its mark_pipeline_boundary() calls); ask for fewer stages or mark more "
                "boundaries"
            )
    each: Sequence[int] = (stages_per_mesh,) if stages_per_mesh else (1,)
    if stages_per_mesh is None and several and asked != 1 and num_layers > 1:
        each = range(2, num_layers + 1)
    meshes = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    fits = [(n, k) for n in meshes for k in each if n * k <= num_layers]
    found = [(n, k) for n, k in fits if asked in (None, n * k)]
    if found:
        n, k = max(found, key=lambda fit: (fit[0], -fit[1]))
        return n * k, n
    options = ", ".join(str(total) for total in sorted({n * k for n, k in fits}))
    shared = f" with {stages_per_mesh} stages on each" if each[0] > 1 else ""
    raise PlanError(
        f"{num_devices} devices (cluster.gpus) do not divide into equal submeshes for "
        f"parallel.num_stages={asked}{shared}; possible here: {options}"
    )


def _describe(
    step: TracedStep,
    loss: Loss,
    layers: Sequence[Sequence[int]],
    mesh_of: Sequence[int],
    slicing: Slicing,
    method: str,
    schedule: str,
    remats: Sequence[str],
    cluster: ClusterShape,
) -> Plan:
    """Everything about a plan that follows from its cuts."""
    graphs = cut_stages(loss, layers, mesh_of)
    outer = place_outer(step, loss, graphs, slicing)
    tasks = make_schedule(schedule, len(graphs), max(mesh_of) + 1, slicing.micro_batches)
    check_schedule(schedule, tasks, len(graphs), slicing.micro_batches)
    memory = [
        mesh_memory({g: remats[g.index] for g in graphs if g.mesh == mesh}, loss, outer, mine)
        for mesh, mine in enumerate(tasks)
    ]
    again = [
        recomputed(g.equations, remats[g.index])
        if g.activations_out or not backward_follows(tasks[g.mesh], g.index)
        else []
        for g in graphs
    ]
    owner = {i: g.index for g in reversed(graphs) for i in g.operands}
    stages = []
    for graph, stage_layers in zip(graphs, layers, strict=True):
        s = graph.index
        first = graph.mesh * slicing.replicas
        devices = tuple(range(first, first + slicing.replicas))
        forward = run_seconds(graph.equations, cluster) + cluster.latency
        backward = 0.0
        if graph.wrt or graph.active_in:
            backward = 2.0 * forward + run_seconds(again[s], cluster)
        stages.append(
            StagePlan(
                layers=tuple(stage_layers),
                hosts=tuple(sorted({cluster.host_of(d) for d in devices})),
                devices=devices,
                logical_mesh=(slicing.replicas, 1),
                remat=remats[s],
                forward_seconds=forward,
                backward_seconds=backward,
                backward_weight_seconds=forward if graph.active_in and graph.wrt else backward,
                memory_bytes=memory[graph.mesh],
                num_parameters=sum(
                    loss.invars[i].aval.size for i in loss.wrt if owner.get(i, 0) == s
                ),
                shardings=_in_words(slicing.replicas),
            )
        )
    flops = sum(matmul_flops(g.equations) for g in graphs) * slicing.num_slices
    flops_again = sum(matmul_flops(equations) for equations in again) * slicing.num_slices
    trained = bool(loss.wrt)
    draft = Plan(
        method=method,
        schedule=schedule,
        num_micro_batches=slicing.micro_batches,
        batch_size=step.batch_size,
        num_parameters=sum(stage.num_parameters for stage in stages),
        stages=tuple(stages),
        transfers=_transfers(graphs, outer, slicing, trained),
        cluster=vars(cluster).copy(),
        flops_per_step=flops * (3 if trained else 1),
        predicted_step_seconds=0.0,
        predicted_samples_per_second=0.0,
        predicted_tflops_per_device=0.0,
        predicted_tflops_per_device_with_remat=0.0,
        predicted_bubble_fraction=0.0,
        fingerprint=step.fingerprint,
    )
    return with_predictions(draft, draft.flops_per_step + (flops_again if trained else 0.0))


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
    """What crosses between meshes: activations go to a mesh once, a gradient comes back from each
    stage that read them, and the rest of the step sends from first stage to first stage."""
    every: dict[tuple[int, int], int] = {}
    once: dict[tuple[int, int], int] = {}
    for graph in graphs:
        for v, consumers in zip(graph.activations_out, graph.consumers, strict=True):
            size = nbytes(v.aval) * slicing.replicas
            abroad = [to for to in consumers if graphs[to].mesh != graph.mesh]
            for to in {graphs[to].mesh: to for to in reversed(abroad)}.values():
                every[graph.index, to] = every.get((graph.index, to), 0) + size
            for to in abroad:
                if trained and v in graph.active:
                    every[to, graph.index] = every.get((to, graph.index), 0) + size
    first = {g.mesh: g.index for g in reversed(graphs)}
    sends = [*outer.argument_sends, *outer.part_sends]
    for segment in (*outer.before, *outer.after):
        sends += [(v, segment.mesh, to) for v, to in segment.sends]
    for v, src, dst in sends:
        link = first[src], first[dst]
        once[link] = once.get(link, 0) + nbytes(v.aval)
    return tuple(
        Transfer(*link, every.get(link, 0), once.get(link, 0)) for link in sorted({*every, *once})
    )
