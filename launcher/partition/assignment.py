"""A parallel method's decision: which layers run where, in which order, on which slices.

Also the proof that a decision, which a person may have edited, can be carried out (`validate`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from launcher.base import parse_remat
from launcher.partition.named_dims import Spec, axes
from launcher.schedule import SCHEDULES, Tasks, make_tasks
from launcher.trace import TracedStep, leaf_names


class PlanError(ValueError):
    """No plan exists for what was asked; the message says why and what to change."""


@dataclass(frozen=True)
class Slicing:
    """How the batch is cut: `micro_batches` in time × `replicas` in space.

    Where parameter servers sum over `workers`, each of them holds as many of the replicas.
    """

    micro_batches: int
    replicas: int
    workers: int = 1

    @property
    def num_slices(self) -> int:
        """Equal slices of the batch in all."""
        return self.micro_batches * self.replicas

    @property
    def own_replicas(self) -> int:
        """Number of replicas that run as one program; the others are other workers'."""
        return self.replicas // self.workers

    def stack(self, x: Any, axis: int) -> Any:
        """A whole-batch array as `[microbatch, (replica,) rows, …]`, rows first."""
        x = jnp.moveaxis(x, axis, 0) if axis else x
        lead = (self.micro_batches, self.replicas) if self.replicas > 1 else (self.micro_batches,)
        return x.reshape(*lead, x.shape[0] // self.num_slices, *x.shape[1:])

    def own(self, stacked: Any, rank: int) -> Any:
        """Return a worker's part of what `stack` returns, `[microbatch, (replica,) rows, …]`."""
        if self.workers == 1:
            return stacked
        own = stacked[:, rank * self.own_replicas : (rank + 1) * self.own_replicas]
        return own if self.own_replicas > 1 else own[:, 0]


def accumulator_dtype(dtype: Any) -> Any:
    """Sums over microbatches are kept in at least float32."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


REDUCE_DTYPES = "fp32", "bf16"
_EACH = 4  # buckets of a server
_LEAST = 1 << 20  # bytes of a bucket, below which its messages take longer than its bytes


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over the replicas.

    Attributes:
        bucket_bytes: the most bytes that one collective sums, but for a larger gradient, and those
            behind the largest (`gradient_sync.in_buckets`). 0: each gradient alone.
        dtype: "fp32": gradients cross in 32 bits, or in 64 if they have so many; "bf16": those of
            at most 32 bits cross in 16.
        workers: the number of workers that hold equal shares of the replicas, each a JAX of its
            own, and reach one another through parameter servers alone; 1: collectives sum.
        servers: the number of parameter servers; 0 for one worker.
    """

    bucket_bytes: int = 25 << 20
    dtype: str = "fp32"
    workers: int = 1
    servers: int = 0

    def bucket_limit(self, nbytes: int) -> int:
        """Return the most bytes in a bucket of several gradients, which have `nbytes` in all.

        Servers get several buckets each, so that they have about equally much to do, and one
        bucket is on its way while another is added.
        """
        if not self.servers:
            return self.bucket_bytes
        return min(self.bucket_bytes, max(nbytes // (_EACH * self.servers), _LEAST))

    def checked(self) -> Reduction:
        """Return it, or raise PlanError if a setting is out of range."""
        if self.bucket_bytes < 0:
            raise PlanError(f"bucket_bytes={self.bucket_bytes} is below 0")
        if self.dtype not in REDUCE_DTYPES:
            raise PlanError(f"reduce_dtype={self.dtype} is none of {', '.join(REDUCE_DTYPES)}")
        if self.workers < 1 or (self.workers > 1) != (self.servers > 0):
            raise PlanError(
                f"{self.servers} parameter servers cannot sum over {self.workers} workers; several "
                "workers need at least one server, and one worker has none"
            )
        return self


DEFAULT_REDUCTION = Reduction()


@dataclass(frozen=True)
class Submesh:
    """Devices by their global numbers, and their shape as (data, model)."""

    devices: tuple[int, ...]
    logical_mesh: tuple[int, int]


@dataclass(frozen=True)
class Assignment:
    """Which layers run where, and in which order.

    Attributes:
        method: the name that the plan carries.
        layers: of every stage. mesh_of: its submesh, by number.
        remat: of every stage, a string of `base.names`.
        zero: of every stage 0, 2 (gradients and optimizer state are cut along data) or 3
            (parameters, too); empty: 0 for all.
        sequence: of every stage whether its model axis cuts the data along its sequence, and not
            the parameters; empty: none.
        shardings: of every stage, as in `StagePlan`; None: to be chosen.
        reduction: how gradients are summed over the replicas.
    """

    method: str
    layers: tuple[tuple[int, ...], ...]
    submeshes: tuple[Submesh, ...]
    mesh_of: tuple[int, ...]
    num_micro_batches: int
    schedule: str
    remat: tuple[str, ...]
    zero: tuple[int, ...] = ()
    sequence: tuple[bool, ...] = ()
    shardings: tuple[Mapping[str, Spec] | None, ...] = ()
    reduction: Reduction = DEFAULT_REDUCTION

    def zero_of(self, stage: int) -> int:
        """See `zero`."""
        return self.zero[stage] if self.zero else 0

    def shardings_of(self, stage: int) -> Mapping[str, Spec] | None:
        """See `shardings`."""
        return self.shardings[stage] if self.shardings else None

    def sequence_of(self, stage: int) -> bool:
        """See `sequence`."""
        return bool(self.sequence) and self.sequence[stage]

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas that all stages have in common."""
        return math.gcd(*(submesh.logical_mesh[0] for submesh in self.submeshes))

    @functools.cached_property
    def slicing(self) -> Slicing:
        """How the batch is cut."""
        return Slicing(self.num_micro_batches, self.num_replicas, self.reduction.workers)

    def own_submesh(self, mesh: int) -> Submesh:
        """Return a submesh, or the first worker's share of it where parameter servers sum."""
        (data, model), workers = self.submeshes[mesh].logical_mesh, self.reduction.workers
        devices = self.submeshes[mesh].devices
        return Submesh(devices[: len(devices) // workers], (data // workers, model))

    def tasks(self) -> Tasks:
        """Return for every submesh its tasks of a step, in order.

        Raises:
            PlanError: stages share submeshes, and the schedule has none do so, or in another order.
        """
        num_stages, count = len(self.layers), len(self.submeshes)
        if self.mesh_of != tuple(s % count for s in range(num_stages)):
            raise PlanError(
                f"stages on the same devices must take turns; {num_stages} stages "
                f"are on meshes {', '.join(map(str, self.mesh_of))}"
            )
        several = SCHEDULES[self.schedule].interleaves
        if num_stages % count or (num_stages > count and not several):
            raise PlanError(f"{self.schedule} cannot run {num_stages} stages on {count} submeshes")
        return make_tasks(self.schedule, num_stages, count, self.num_micro_batches)


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
    for stage in range(len(assignment.layers)):
        _check_stage(assignment, stage, shapes)
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


def _check_stage(assignment: Assignment, index: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    submesh = assignment.submeshes[assignment.mesh_of[index]]
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
        most = max(len(layers) for remat, layers in pairs if remat == name)
        wanted = parse_remat(name)
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
