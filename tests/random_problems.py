"""Made-up search problems, layers with random costs on a few devices; clusters and assignments."""

import dataclasses
import itertools

import numpy as np

from launcher.hardware.cluster_shape import ClusterShape
from launcher.partition.assignment import Assignment, Submesh
from launcher.plan.inter_op.layer_table import (
    PARAMETER_FIELDS,
    SELECTIVE_FIELDS,
    LayerTable,
    Parameters,
)
from launcher.plan.inter_op.problem import Problem
from launcher.plan.inter_op.submeshes import submesh_sizes

# The fields of a layer table but those of selective recomputation.
LAYER_FIELDS = (
    *("work_seconds", "fixed_seconds", "back_seconds", "fixed_back_seconds"),
    *("product_seconds", "fixed_product_seconds", "launches", "forward_bytes", "backward_bytes"),
    *("fixed_backward_bytes", "repeated_bytes", "forward_sums", "backward_sums", "repeated_sums"),
    *("residual_bytes", "left_bytes", "forward_peak_bytes", "forward_early_bytes"),
    *("backward_peak_bytes", "backward_early_bytes", "whole_peak_bytes", "whole_early_bytes"),
    *("fixed_forward_peak_bytes", "fixed_forward_early_bytes", "fixed_backward_peak_bytes"),
    *("fixed_backward_early_bytes", "fixed_whole_peak_bytes", "fixed_whole_early_bytes"),
    *("input_bytes", "checkpoint_bytes", "layer_peak_bytes", "fixed_layer_peak_bytes"),
    *("fixed_layer_early_bytes", "sent_bytes", "batch_bytes"),
)


def cluster_of(hosts, each, **changed):
    """A made-up cluster, whose devices share nothing and have any memory."""
    rates = {"flops": 1.0, "flops_fp32": 1.0, "memory_bandwidth": 50.0}
    links = {"intra_host": 240.0, "inter_host": 24.0, "latency": 0.01}
    rest = {"device_kind": "none", "peak_flops": None, "memory_bytes": None}
    given = {"hosts": hosts, "devices_per_host": each, **rates, **links, **rest}
    return ClusterShape("made up", **given | changed)


def in_order(shapes):
    """Submeshes of these logical meshes on the devices in their order."""
    ends = [0, *itertools.accumulate(data * model for data, model in shapes)]
    runs = itertools.pairwise(ends)
    return tuple(
        Submesh(tuple(range(*run)), shape) for run, shape in zip(runs, shapes, strict=True)
    )


def equal_stages(submeshes, layers, /, turns=1, **changed):
    """`turns` stages of equally many layers on each submesh."""
    count = len(submeshes) * turns
    given = Assignment(
        method="auto",
        layers=tuple(tuple(run.tolist()) for run in np.array_split(np.arange(layers), count)),
        submeshes=tuple(submeshes),
        mesh_of=tuple(range(len(submeshes))) * turns,
        num_micro_batches=4,
        schedule="1f1b",
        remat=("none",) * count,
        zero=(0,) * count,
    )
    return dataclasses.replace(given, **changed)


def random_problem(rng):
    """Up to five layers on up to eight devices; work and memory fall with the model axis."""
    hosts, each = int(rng.integers(1, 3)), int(rng.integers(1, 5))
    cluster, layers = cluster_of(hosts, each), int(rng.integers(1, 6))
    models = tuple(n for n in range(1, each + 1) if each % n == 0)
    cut = np.array(models)[:, None] ** rng.uniform(0, 1, (1, layers))
    of = {name: rng.uniform(1, 20, (1, layers)) / cut for name in LAYER_FIELDS}
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
    table = with_selective(LayerTable(models, of, parameters), rng.spawn(1)[0])
    return Problem(table, groups, batch, cluster, submesh_sizes(cluster, batch), memory)


def with_selective(table, rng):
    """Return every other table with layers that can be recomputed selectively."""
    of, shape = dict(table.of), (1, table.num_layers)
    if is_so := bool(rng.random() < 0.5):
        of["selective_seconds"] = of["work_seconds"] * rng.uniform(0.02, 0.5, shape)
        of["selective_bytes"] = of["forward_bytes"] * rng.uniform(0, 0.5, shape)
        of["kept_bytes"] = of["left_bytes"] * rng.uniform(0.1, 0.9, shape)
        of["selective_peak_bytes"] = of["layer_peak_bytes"] * rng.uniform(0.2, 1.1, shape)
    none = np.zeros_like(of["work_seconds"])
    return dataclasses.replace(
        table, of=dict.fromkeys(SELECTIVE_FIELDS, none) | of, selective=is_so
    )


def random_layers(rng, layers, hosts, each, batch):
    """Layers as networks have them: alike or not, in memory that may be short, on any links.

    Work, what is sent and parameters are of one order of magnitude, rates of links of several.
    """
    rates = {
        "memory_bandwidth": 10 ** rng.uniform(1, 3),
        "intra_host": 10 ** rng.uniform(1.5, 4),
        "inter_host": 10 ** rng.uniform(0.5, 3),
        "latency": 10 ** rng.uniform(-4, -1),
        "dispatch_overhead": 10 ** rng.uniform(-4, -1),
    }
    models = tuple(n for n in range(1, each + 1) if each % n == 0)
    spread = rng.choice([0.0, 0.2, 1.5])  # of the layers' sizes
    scale = np.exp(rng.uniform(-spread, spread, (1, layers)))
    cut = np.array(models)[:, None] ** rng.uniform(0.6, 1.0)

    def amount(low, high, of=scale):
        return rng.uniform(low, high) * of * np.ones((len(models), layers))

    of = {name: np.zeros((len(models), layers)) for name in LAYER_FIELDS}
    work = amount(5, 20)
    of |= {"work_seconds": work / cut, "back_seconds": 2 * work / cut}
    of |= {"fixed_seconds": amount(0, 0.02) / cut, "fixed_back_seconds": amount(0, 0.02) / cut}
    sent, left = np.floor(amount(5, 50, 1)), amount(20, 200) / cut
    for name in ("input_bytes", "checkpoint_bytes", "sent_bytes"):
        of[name] = sent * batch  # whole bytes in every slice
    of |= {"residual_bytes": batch * left, "left_bytes": batch * (left + sent)}
    for name in ("forward", "backward", "whole", "layer"):
        of[f"{name}_peak_bytes"] = batch * left * rng.uniform(0.2, 1.5)
    for name in ("forward", "backward"):
        of[f"{name}_sums"] = np.where(np.array(models)[:, None] > 1, 2.0, 0.0) * np.ones(
            (1, layers)
        )
        of[f"{name}_bytes"] = of[f"{name}_sums"] * sent * batch
    of["repeated_bytes"][:] = 0.0
    size = amount(20, 400)
    parameters = tuple(
        Parameters(
            layers=(i,),
            lengths=((840,),) * len(models),
            of={
                **dict.fromkeys(PARAMETER_FIELDS, size[:, i] / cut[:, 0]),
                "parameters": np.full(len(models), 2.0),
                "gradients": np.full(len(models), 2.0),
                "optimizer_bytes": rng.choice([0, 2]) * size[:, i] / cut[:, 0],
            },
        )
        for i in range(layers)
    )
    table = with_selective(LayerTable(models, of, parameters), rng.spawn(1)[0])
    cluster = dataclasses.replace(cluster_of(hosts, each), **rates)
    state = float(sum(one.of["parameter_bytes"][0] * 4 for one in parameters))
    least = state / cluster.num_devices + float(of["left_bytes"][0].sum()) / batch
    memory = rng.choice([np.inf, least * rng.uniform(0.8, 2.0), least * rng.uniform(0.4, 1.0)])
    groups = tuple((i,) for i in range(layers))
    return Problem(table, groups, batch, cluster, submesh_sizes(cluster, batch), float(memory))


def middle_problem(rng, layers, most_devices):
    """A problem of so many layers, and of up to so many devices."""
    each = int(rng.choice([n for n in (1, 2, 3, 4, 8) if n <= most_devices]))
    hosts = int(rng.integers(1, most_devices // each + 1))
    batch = int(rng.choice([4, 6, 8, 12, 16, 24]))
    return random_layers(rng, int(rng.integers(layers[0], layers[1] + 1)), hosts, each, batch)
