"""The parallel methods of one stage on all devices, and what all methods have in common."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from launcher.hardware import ClusterShape
from launcher.partition import Assignment, PlanError, Reduction, Submesh, remat_of_stages
from launcher.plan.followers.further import build_parts, lead_of
from launcher.plan.options import check_product, checked_micro_batches, pair
from launcher.plan.plan import Plan
from launcher.schedule import DEFAULT_SCHEDULE
from launcher.trace import JoinedError, TracedStep

_ONE_WORKER = "one worker: nothing to sum through parameter servers, so none run, as parallel=data"


@dataclass(frozen=True, kw_only=True)
class Reducing:
    """What every method obeys that makes replicas.

    Attributes:
        bucket_bytes: the most bytes of gradients that one collective sums over the replicas, while
            the backward pass continues; a larger gradient is summed alone. 0: each gradient alone.
        reduce_dtype: "fp32": gradients cross in at least 32 bits; "bf16": in 16.
    """

    bucket_bytes: int = Reduction.bucket_bytes
    reduce_dtype: str = Reduction.dtype

    @property
    def reduction(self) -> Reduction:
        """Both of them.

        Raises:
            PlanError: one is out of range.
        """
        return Reduction(self.bucket_bytes, self.reduce_dtype).checked()


@dataclass(frozen=True)
class DataParallel(Reducing):
    """Data parallelism: one stage on all devices.

    Each device holds all parameters and its share of the batch. Gradients are all-reduced once a
    step, whatever the number of microbatches.
    """

    num_micro_batches: int = 1
    remat: str = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        shape = cluster.num_devices, 1
        return _one_stage(self, step, cluster, "data", shape)


@dataclass(frozen=True)
class ParameterServer(Reducing):
    """Data parallelism whose gradients are summed by parameter servers, instead of collectives.

    A worker, one a host, sums the gradients of its own devices and gives them to the servers, which
    add those of all workers in the order of their numbers. The optimizer runs in the workers. On
    one host there is nothing for servers to sum: the plan is that of `DataParallel`.

    Attributes:
        servers: number of servers; None: one a host.
    """

    num_micro_batches: int = 1
    remat: str = "none"
    servers: int | None = None

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`.

        Raises:
            PlanError: as there, or the loss joins examples that different workers hold.
        """
        if self.servers is not None and self.servers < 1:
            raise PlanError(f"servers={self.servers} must be at least 1, or null for one a host")
        shape, workers = (cluster.num_devices, 1), cluster.hosts
        if workers == 1:
            plan = _one_stage(self, step, cluster, "parameter_server", shape)
            return dataclasses.replace(plan, notes=(_ONE_WORKER, *plan.notes))
        servers = self.servers or workers
        by = dataclasses.replace(self.reduction, workers=workers, servers=servers).checked()
        step = _with_layers(self, step)
        assignment = _of_one_stage(self, step, "parameter_server", shape, by)
        try:
            return build_parts(step, assignment, cluster)
        except JoinedError as error:
            raise PlanError(
                f"parameter servers cannot join what different workers hold, and {error.cause}; "
                "use parallel=data, launcher.DataParallel() in Python, whose devices can share the "
                "whole batch"
            ) from error


@dataclass(frozen=True)
class Zero2Parallel(Reducing):
    """Data parallelism with a sharded optimizer state and sharded gradients (ZeRO-2).

    Gradients are sharded once they are summed: by a reduce-scatter, once a step (Rajbhandari et
    al., arXiv 1910.02054).
    """

    num_micro_batches: int = 1
    remat: str = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        shape = cluster.num_devices, 1
        return _one_stage(self, step, cluster, "zero2", shape, 2)


@dataclass(frozen=True)
class Zero3Parallel(Reducing):
    """Data parallelism as `Zero2Parallel`, with sharded parameters, too (ZeRO-3).

    Each pass over a microbatch gathers the parameters and scatters their gradients, so that no
    device ever keeps either whole.
    """

    num_micro_batches: int = 1
    remat: str = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        shape = cluster.num_devices, 1
        return _one_stage(self, step, cluster, "zero3", shape, 3)


@dataclass(frozen=True)
class ShardParallel(Reducing):
    """One stage on all devices, which share the batch (data) and each matrix product (model).

    Attributes:
        logical_mesh_shape: `(data, model)`; None: all devices in `model`.
    """

    num_micro_batches: int = 1
    logical_mesh_shape: tuple[int, int] | None = None
    remat: str = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        given = self.logical_mesh_shape or (1, cluster.num_devices)
        data, model = pair("logical_mesh_shape", given)
        check_product("logical_mesh_shape", (data, model), cluster)
        return _one_stage(self, step, cluster, "shard", (data, model))


_OneStage = DataParallel | ParameterServer | Zero2Parallel | Zero3Parallel | ShardParallel


def _one_stage(
    of: _OneStage,
    step: TracedStep,
    cluster: ClusterShape,
    method: str,
    logical_mesh: tuple[int, int],
    zero: int = 0,
) -> Plan:
    step = _with_layers(of, step)
    assignment = _of_one_stage(of, step, method, logical_mesh, of.reduction, zero)
    return planned(step, assignment, cluster)


def _with_layers(of: _OneStage, step: TracedStep) -> TracedStep:
    """Return a step whose scans are open, if a layer at a time is to be recomputed."""
    return step if remat_of_stages(of.remat, 1) == ("none",) else step.opened


def _of_one_stage(
    of: _OneStage,
    step: TracedStep,
    method: str,
    logical_mesh: tuple[int, int],
    reduction: Reduction,
    zero: int = 0,
) -> Assignment:
    devices = tuple(range(logical_mesh[0] * logical_mesh[1]))
    return Assignment(
        method=method,
        layers=(tuple(range(lead_of(step).loss(1).num_layers)),),
        submeshes=(Submesh(devices, logical_mesh),),
        mesh_of=(0,),
        num_micro_batches=checked_micro_batches(of.num_micro_batches),
        schedule=DEFAULT_SCHEDULE,
        remat=remat_of_stages(of.remat, 1),
        zero=(zero,),
        reduction=reduction,
    )


def planned(step: TracedStep, assignment: Assignment, cluster: ClusterShape) -> Plan:
    """Return the plan of an assignment; without replicas if the only microbatch cannot be cut."""
    try:
        return build_parts(step, assignment, cluster)
    except JoinedError as error:
        if assignment.num_micro_batches > 1:
            raise
        reason = error
    meshes = tuple(Submesh(s.devices, (1, len(s.devices))) for s in assignment.submeshes)
    plan = build_parts(step, dataclasses.replace(assignment, submeshes=meshes), cluster)
    note = (
        f"devices share the whole batch instead of cutting it into replicas, since {reason.cause}"
    )
    return dataclasses.replace(plan, notes=(note, *plan.notes))
