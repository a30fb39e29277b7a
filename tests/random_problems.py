"""Made-up search problems: layers with random costs on a few devices."""

from dataclasses import fields

import numpy as np

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.inter_op.cost_table import (
    PARAMETER_FIELDS,
    CostTable,
    LayerCost,
    Parameters,
)
from launcher.plan.inter_op.problem import Problem
from launcher.plan.inter_op.stage_choices import submesh_sizes


def cluster_of(hosts, each, memory=None):
    return ClusterShape(
        name="made up",
        hosts=hosts,
        devices_per_host=each,
        device_kind="none",
        peak_flops=None,
        flops=1.0,
        flops_fp32=1.0,
        memory_bandwidth=50.0,
        memory_bytes=memory,
        intra_host=240.0,
        inter_host=24.0,
        latency=0.01,
    )


def random_problem(rng):
    """Up to five layers on up to eight devices; work and memory fall with the model axis."""
    hosts, each = int(rng.integers(1, 3)), int(rng.integers(1, 5))
    cluster, layers = cluster_of(hosts, each), int(rng.integers(1, 6))
    models = tuple(n for n in range(1, each + 1) if each % n == 0)
    cut = np.array(models)[:, None] ** rng.uniform(0, 1, (1, layers))
    of = {f.name: rng.uniform(1, 20, (1, layers)) / cut for f in fields(LayerCost)}
    whole = np.ones((len(models), 1))
    for name in ("forward_sums", "backward_sums"):
        of[name] = rng.integers(0, 4, (1, layers)) * whole
    of["sent_bytes"] = 12 * rng.integers(0, 4, (1, layers)) * whole  # whole bytes in every slice
    for name in ("forward_bytes", "backward_bytes"):
        of[name] = rng.uniform(0, 9, (1, layers)) * (np.array(models)[:, None] > 1)
    parameters = tuple(
        Parameters(
            layers=(i,),
            lengths=((int(rng.choice([12, 35])),),) * len(models),
            of={name: rng.uniform(1, 20) / cut[:, i] for name in PARAMETER_FIELDS},
        )
        for i in range(layers)
    )
    memory = rng.choice([np.inf, 120.0, 60.0, 30.0])
    groups = tuple((i,) for i in range(layers))
    batch = int(rng.choice([2, 4, 6]))
    table = CostTable(models, of, parameters, layers)
    return Problem(table, groups, batch, cluster, submesh_sizes(cluster), memory)
