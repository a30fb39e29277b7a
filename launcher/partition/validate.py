"""Prove that an assignment, which a person may have edited, can be carried out."""

from __future__ import annotations

import math
from collections.abc import Mapping

from launcher.base import parse_remat
from launcher.partition.assignment import Assignment, Submesh
from launcher.partition.errors import PlanError
from launcher.partition.sharding.named_dims import Spec, axes
from launcher.schedule import SCHEDULES, Tasks
from launcher.trace import TracedStep, leaf_names


def validate(assignment: Assignment, step: TracedStep) -> Tasks:
    """Check an assignment against the step, which is cut into its layers.

    Returns:
        The assignment's tasks.

    Raises:
        PlanError: the message says what is wrong, and where.
        BatchError: the batch does not divide into microbatches and replicas.
    """
    _check_order(assignment, step.loss(1).num_layers)
    shapes = dict(zip(leaf_names(step), (v.aval.shape for v in step.invars), strict=True))
    for stage, mesh in enumerate(assignment.mesh_of):
        _check_stage(assignment, stage, assignment.submeshes[mesh], shapes)
    _check_remat(assignment)
    _check_workers(assignment, step)
    step.loss(assignment.slicing.num_slices)
    return assignment.tasks()  # last: for the given number of microbatches


def _check_order(assignment: Assignment, num_layers: int) -> None:
    """Schedule, layers and devices."""
    if assignment.schedule not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise PlanError(f"schedule {assignment.schedule!r} is not one of {known}")
    if assignment.num_micro_batches < 1:
        raise PlanError(f"num_micro_batches={assignment.num_micro_batches} must be at least 1")
    stages, submeshes = len(assignment.layers), range(len(assignment.submeshes))
    of_stages = assignment.mesh_of, assignment.remat, assignment.shardings or assignment.layers
    if {*map(len, of_stages)} != {stages} or not set(assignment.mesh_of) <= set(submeshes):
        raise PlanError(f"not each of {stages} stages has a submesh, a remat and shardings")
    layers = [layer for stage in assignment.layers for layer in stage]
    if layers != list(range(num_layers)):
        raise PlanError(f"stages hold layers {layers}; the model has 0 to {num_layers - 1}")
    used = [device for submesh in assignment.submeshes for device in submesh.devices]
    if len(set(used)) != len(used):
        raise PlanError(f"a device is in two submeshes: {sorted(used)}")


def _check_stage(
    assignment: Assignment,
    index: int,
    submesh: Submesh,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    if not assignment.layers[index] and any(assignment.layers):
        raise PlanError(f"stage {index} has no layers")
    shape = submesh.logical_mesh
    if len(shape) != 2 or min(shape) < 1 or math.prod(shape) != len(submesh.devices):
        raise PlanError(
            f"stage {index}: a logical mesh of {shape} does not fit {len(submesh.devices)} devices"
        )
    sizes = dict(zip(("data", "model"), shape, strict=True))
    for name, spec in (assignment.shardings_of(index) or {}).items():
        _check_spec(index, name, spec, shapes.get(name), sizes)


def _check_remat(assignment: Assignment) -> None:
    """Check the remat strings, and that stages have the layers that these name."""
    for stage, name in enumerate(assignment.remat):
        try:
            parse_remat(name)
        except ValueError as error:
            raise PlanError(f"stage {stage}: remat {error}") from error
    for name in dict.fromkeys(assignment.remat):
        pairs = zip(assignment.remat, assignment.layers, strict=True)
        most, wanted = max(len(of) for remat, of in pairs if remat == name), parse_remat(name)
        if wanted.layers > max(most, 1):
            sign, rest = "/" if wanted.first is None else ":", wanted.rest != "none"
            less = wanted.policy if most == 1 else f"{wanted.policy}{sign}{most - rest}"
            less += f"+{wanted.rest}" if rest and most > 1 else ""
            raise PlanError(
                f"parallel.remat={name} asks for {wanted.layers} layers of a stage, and the "
                f"largest has {most}; give at most {less}"
            )


def _check_workers(assignment: Assignment, step: TracedStep) -> None:
    """Check that parameter servers can sum over the workers."""
    workers = assignment.reduction.checked().workers
    if workers == 1:
        return
    shapes = [submesh.logical_mesh for submesh in assignment.submeshes]
    if len(shapes) > 1 or shapes[0][1] > 1 or shapes[0][0] % workers:
        meshes = " and ".join(f"{data} × {model}" for data, model in shapes)
        raise PlanError(
            f"parameter servers sum over {workers} workers with equal shares of one stage's data "
            f"axis; the logical mesh is {meshes}"
        )
    named = zip(leaf_names(step), step.batch, strict=True)
    state = {name for name, is_batch in named if not is_batch} if step.traces else set()
    for name, spec in (assignment.shardings_of(0) or {}).items():
        if name in state and any(axes(axis) for axis in spec):
            raise PlanError(
                f"stage 0, shardings of {name}: with parameter servers each device holds all of it"
            )


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
