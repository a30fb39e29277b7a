"""Whether a plan, which a person may have edited, can be carried out. For `Plan.validate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launcher.plan.errors import PlanError
from launcher.plan.remat import POLICIES
from launcher.plan.sharding.dims import Spec, axes
from launcher.plan.sharding.names import leaf_names
from launcher.schedule import SCHEDULES
from launcher.trace.clusters import LayerEnds
from launcher.trace.errors import BatchError
from launcher.trace.step import TracedStep

if TYPE_CHECKING:
    from launcher.plan.plan import Plan, StagePlan


def prove(plan: Plan, step: TracedStep) -> None:
    """Raises PlanError with what is wrong, and where. See `Plan.validate`."""
    if plan.layer_ends is not None:
        _check_ends(plan.layer_ends)
    step = step.cut_at(plan.layer_ends)
    _check_order(plan, step.loss(1).num_layers)
    shapes = dict(zip(leaf_names(step), (v.aval.shape for v in step.invars), strict=True))
    for index, stage in enumerate(plan.stages):
        _check_stage(index, stage, shapes)
    _check_places(plan)
    _check_batch(plan, step)
    plan.tasks()  # last: of as many microbatches as it is told


def _check_ends(ends: LayerEnds) -> None:
    """As a person may have left them."""
    if list(ends) != sorted(ends) or any(min(end) < 0 for end in ends):
        raise PlanError(f"layer_ends={ends} are not ascending pairs of whole numbers")


def _check_order(plan: Plan, num_layers: int) -> None:
    """Schedule, layers and devices of the whole plan."""
    if plan.schedule not in SCHEDULES:
        raise PlanError(f"schedule {plan.schedule!r} is not one of {', '.join(SCHEDULES)}")
    if plan.num_micro_batches < 1:
        raise PlanError(f"num_micro_batches={plan.num_micro_batches} must be at least 1")
    layers = [layer for stage in plan.stages for layer in stage.layers]
    if layers != list(range(num_layers)):
        raise PlanError(f"stages hold layers {layers}; the model has 0 to {num_layers - 1}")
    used = [device for mesh in plan.meshes for device in mesh]
    if len(set(used)) != len(used):
        raise PlanError(f"a device is in two submeshes: {sorted(used)}")
    count = plan.cluster["hosts"] * plan.cluster["devices_per_host"]
    unknown = sorted(set(used) - set(range(count)))
    if unknown:
        raise PlanError(f"device {unknown[0]} is not one of the cluster's, 0 to {count - 1}")


def _check_places(plan: Plan) -> None:
    """Hosts, and the logical meshes of stages that share devices."""
    each = plan.cluster["devices_per_host"]
    first: dict[tuple[int, ...], int] = {}
    for index, stage in enumerate(plan.stages):
        hosts = tuple(sorted({device // each for device in stage.devices}))
        if stage.hosts != hosts:
            raise PlanError(
                f"stage {index}: hosts {list(stage.hosts)} are not those of its devices, "
                f"{list(hosts)}"
            )
        other = first.setdefault(stage.devices, index)
        if plan.stages[other].logical_mesh != stage.logical_mesh:
            raise PlanError(
                f"stages {other} and {index} are on the same devices with logical meshes of "
                f"{plan.stages[other].logical_mesh} and {stage.logical_mesh}; give both the same"
            )


def _check_batch(plan: Plan, step: TracedStep) -> None:
    """What the batch is cut into."""
    if plan.batch_size != step.batch_size:
        raise PlanError(f"batch_size={plan.batch_size}, but the step's is {step.batch_size}")
    try:
        step.loss(plan.num_micro_batches * plan.num_replicas)
    except BatchError as error:
        raise PlanError(
            f"num_micro_batches={plan.num_micro_batches} on {plan.num_replicas} replicas: {error}"
        ) from error


def _check_stage(index: int, stage: StagePlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not stage.layers:
        raise PlanError(f"stage {index} has no layers")
    if stage.remat not in POLICIES:
        raise PlanError(f"stage {index}: remat {stage.remat!r} is not one of {', '.join(POLICIES)}")
    shape = stage.logical_mesh
    if len(shape) != 2 or min(shape) < 1 or math.prod(shape) != len(stage.devices):
        raise PlanError(
            f"stage {index}: a logical mesh of {shape} does not fit {len(stage.devices)} devices"
        )
    sizes = dict(zip(("data", "model"), shape, strict=True))
    for name, spec in stage.shardings.items():
        _check_spec(index, name, spec, shapes.get(name), sizes)


def _check_spec(
    stage: int, name: str, spec: Spec, shape: tuple[int, ...] | None, sizes: dict[str, int]
) -> None:
    where = f"stage {stage}, shardings of {name}"
    if shape is None:
        raise PlanError(f"{where}: the step has no such argument")
    if len(spec) > len(shape):
        raise PlanError(f"{where}: {len(spec)} entries for an array of shape {shape}")
    used = [a for axis in spec for a in axes(axis)]
    unknown = [a for a in used if a not in sizes]
    if unknown:
        raise PlanError(f"{where}: {unknown[0]!r} is not an axis; they are data and model")
    if len(set(used)) != len(used):
        raise PlanError(f"{where}: an axis can cut one dimension, and {spec} has one twice")
    for length, axis in zip(shape, spec, strict=False):
        if length % math.prod(sizes[a] for a in axes(axis)):
            raise PlanError(f"{where}: {length} cannot be cut along {axis} of {sizes}")
