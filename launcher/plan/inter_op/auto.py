"""The search problem of a traced step: its layers with their costs, and the devices. Pure."""

from __future__ import annotations

import dataclasses

from launcher.hardware.cluster_shape import ClusterShape
from launcher.partition.sharding.named_dims import NamedDims
from launcher.partition.stages import group_layers, layer_flops
from launcher.plan.inter_op.layer_costs import cost_table
from launcher.plan.inter_op.problem import Problem
from launcher.plan.inter_op.submeshes import model_sizes, submesh_sizes
from launcher.plan.profile.measured_layers import MeasuredLayers
from launcher.trace.step import TracedStep

# The stage search joins neighbouring layers to no more than these, if not more stages are wanted.
_MOST_LAYERS = 16


def make_problem(
    step: TracedStep,
    cluster: ClusterShape,
    measured: MeasuredLayers | None = None,
    num_stages: int | None = None,
    outer: NamedDims | None = None,
) -> Problem:
    """Return the search problem of a traced step on a cluster.

    Args:
        step: the traced step, cut into layers.
        cluster: the devices to plan for.
        measured: the layers' measured seconds, instead of the cost model's.
        num_stages: the number of stages that is asked for, if any.
        outer: the named dimensions outside of the loss, if they are known.
    """
    cluster = measured.shape(cluster) if measured else cluster
    loss = step.loss(1)
    most = max(_MOST_LAYERS, num_stages or 1)
    groups = group_layers(layer_flops(loss), min(loss.num_layers, most))
    # Of what is measured there is no cut along the sequence.
    table = cost_table(step, cluster, model_sizes(cluster), measured is None, outer)
    table = dataclasses.replace(table, measured=measured)
    return Problem(
        table.grouped(groups),
        groups,
        step.batch_size,
        cluster,
        submesh_sizes(cluster, step.batch_size),
        cluster.memory_bytes,
        unjoined=table if len(groups) < loss.num_layers else None,
    )
