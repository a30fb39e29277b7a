"""The whole search, from a traced step to the best assignments.

It finds what the step's layers cost (`layer_costs`), and which plan of them is best (`problem`).
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launcher.partition.stages import group_layers, layer_flops
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.inter_op.infeasible import nothing_fits
from launcher.plan.inter_op.layer_costs import CostTable, cost_table, with_measured
from launcher.plan.inter_op.problem import Candidate, Problem, Progress, Wanted, best_of
from launcher.plan.inter_op.stage_choices import submesh_sizes
from launcher.plan.profile.measured_layers import MeasuredLayers
from launcher.trace.step import TracedStep

# The stage search joins neighbouring layers to no more than these, if not more stages are wanted.
_MOST_LAYERS = 16
USABLE = 0.92  # of a device's memory; the rest is the runtime's own and fragments


def search(
    problem: Problem, wanted: Wanted, progress: Progress = lambda share: None
) -> list[Candidate]:
    """Return the best plan and the next best ones, best first.

    Raises:
        TooLargeError: nothing fits the devices' memory; it says by how much, and what would.
    """
    found = best_of(problem, wanted, progress)
    if not found:
        raise nothing_fits(problem, wanted)
    return found


def make_problem(
    step: TracedStep,
    cluster: ClusterShape,
    measured: MeasuredLayers | None = None,
    num_stages: int | None = None,
) -> Problem:
    """Return the search problem of a traced step on a cluster.

    Args:
        step: the traced step, cut into layers.
        cluster: the devices to plan for.
        measured: the layers' measured seconds, instead of the cost model's.
        num_stages: the number of stages that is asked for, if any.
    """
    cluster = measured.shape(cluster) if measured else cluster
    loss = step.loss(1)
    most = max(_MOST_LAYERS, num_stages or 1)
    groups = group_layers(layer_flops(loss), min(loss.num_layers, most))
    # Of what is measured there is no cut along the sequence.
    costs = cost_table(step, cluster, model_sizes(cluster), with_sequence=measured is None)
    table = _grouped(with_measured(costs, measured) if measured else costs, groups)
    usable = None if cluster.memory_bytes is None else USABLE * cluster.memory_bytes
    return Problem(table, groups, step.batch_size, cluster, submesh_sizes(cluster), usable)


def model_sizes(cluster: ClusterShape) -> tuple[int, ...]:
    """Return the sizes of the model axis: it stays inside a host, whose links are the fast ones."""
    each = cluster.devices_per_host
    return tuple(n for n in range(1, each + 1) if each % n == 0)


def _grouped(table: CostTable, groups: Sequence[Sequence[int]]) -> CostTable:
    """Return the costs of runs of layers.

    A run reads what its first layer reads, and sends what its last one sends.
    """
    starts = [group[0] for group in groups]
    ends = [group[-1] for group in groups]
    of = {name: np.add.reduceat(rows, starts, axis=1) for name, rows in table.of.items()}
    most = table.of["working_bytes"]
    of["working_bytes"] = np.maximum.reduceat(most, starts, axis=1)
    of["input_bytes"] = table.of["input_bytes"][:, starts]
    of["sent_bytes"] = table.of["sent_bytes"][:, ends]
    return CostTable(table.model_sizes, of, table.num_distinct, table.sequence)
