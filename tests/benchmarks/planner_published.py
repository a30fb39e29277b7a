"""Our plans for the cluster of the Alpa paper, beside the plans and the rates published for it.

    python tests/benchmarks/planner_published.py [most GPUs]

GPT, weak scaling on 1 … 64 V100-16GB of p3.16xlarge, batch 1024, 16 bits (Zheng et al. 2022, arXiv
2201.12023, section 8.1; plans and rates: its artifact, `results_e2e_ref.tsv`). The rates count
rematerialised work. One number, the device's sustained share of its peak, is calibrated, so that
the one-GPU model runs at its published rate. Everything is predicted by one cost model.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys

from turns import table

from launcher.cluster.kinds import kind_of
from launcher.config.compose import load
from launcher.partition.assignment import Assignment, Submesh
from launcher.partition.stages import group_layers
from launcher.plan import ClusterShape, Plan, describe_plan
from launcher.plan.build import build_plan
from launcher.plan.inter_op.layer_construction import make_problem
from launcher.plan.inter_op.problem import Constraints, best_of
from launcher.plan.inter_op.select import search
from launcher.trace import TracedStep
from launcher.train.program import build_program

BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Point:
    """One published point: TFLOPS a GPU, and the plan as groups of equal stages
    `(stages, (data, model), layers a stage out of all)`."""

    gpus: int
    size: str
    auto: float
    intra: float
    inter: float
    stages: tuple[tuple[int, tuple[int, int]], ...]


POINTS = (
    Point(1, "350m", 45.1, 46.2, 44.2, ((1, (1, 1)),)),
    Point(2, "760m", 57.9, 59.5, 57.9, ((2, (1, 1)),)),
    Point(4, "1.3b", 58.2, 58.4, 54.0, ((2, (2, 1)),)),
    Point(8, "2.6b", 61.6, 50.8, 56.6, ((2, (2, 1)), (1, (4, 1)))),
    Point(16, "6.7b", 60.0, 48.4, 59.7, ((2, (2, 4)),)),
    Point(32, "15b", 59.9, 35.1, 49.8, ((4, (2, 4)),)),
    Point(64, "39b", 57.0, 2.1, 50.5, ((16, (1, 4)),)),
)


def cluster_of(gpus: int, sustained: float) -> ClusterShape:
    """So many V100 of as few p3.16xlarge as there need be, by the named shape's figures."""
    cluster = load(["task=plan", "cluster=p3_16xlarge_x8"]).cluster
    shape, share = kind_of(cluster).shape(None), sustained / cluster.device.sustained
    return dataclasses.replace(
        shape,
        name="p3_16xlarge",
        hosts=max(1, gpus // 8),
        devices_per_host=min(gpus, 8),
        flops=sustained * shape.peak_flops,  # our bf16 stands for their fp16, which a V100 has
        flops_fp32=share * shape.flops_fp32,
        compute_capability=None,
    )


def traced(size: str) -> TracedStep:
    """The train step of a GPT, with Adam."""
    words = f"model=gpt model.size={size} dataset=synthetic optimizer=adam optimizer.clip_norm=null"
    words += f" train.precision=bf16 train.eval_every=0 train.global_batch_size={BATCH}"
    return build_program(load(words.split())).train


def published(step: TracedStep, point: Point, cluster: ClusterShape) -> Plan:
    """The published plan: layers in proportion to devices, rematerialised, gradients and state cut
    along data where there is that axis. The fewest microbatches
    that fit."""
    meshes = [mesh for count, mesh in point.stages for _ in range(count)]
    sizes = [data * model for data, model in meshes]
    unit = min(sizes)
    parts = group_layers([1.0] * step.loss(1).num_layers, sum(size // unit for size in sizes))
    layers, submeshes, first, device = [], [], 0, 0
    for size, mesh in zip(sizes, meshes, strict=True):
        end = first + size // unit
        layers.append(tuple(layer for part in parts[first:end] for layer in part))
        submeshes.append(Submesh(tuple(range(device, device + size)), mesh))
        first, device = end, device + size
    assignment = Assignment(
        method="published",
        layers=tuple(layers),
        submeshes=tuple(submeshes),
        mesh_of=tuple(range(len(meshes))),
        num_micro_batches=1,
        schedule="1f1b",
        remat=("full",) * len(meshes),
        zero=tuple(2 if data > 1 else 0 for data, _ in meshes),
    )
    rows = BATCH // max(data for data, _ in meshes)
    for count in (64, 128, 256, 512, 1024):
        if rows % count:
            break
        plan = build_plan(step, dataclasses.replace(assignment, num_micro_batches=count), cluster)
        if fits(plan):
            break
    return plan


def fits(plan: Plan) -> bool:
    """Whether it takes no more than a device's memory."""
    return plan.missing_bytes <= 0


def restricted(step: TracedStep, cluster: ClusterShape, intra: bool) -> Plan | None:
    """The best plan of one stage on all devices, or of stages of one device each."""
    problem = make_problem(step, cluster)
    sizes = (cluster.num_devices,) if intra else (1,)
    found = best_of(dataclasses.replace(problem, sizes=sizes), Constraints(schedule="1f1b"))
    return build_plan(step, found[0].assignment, cluster) if found else None


def calibrated(step: TracedStep) -> float:
    """The sustained share at which the one-GPU model runs at its published rate: its time is a part
    that falls with the share and a part that does not."""
    point = POINTS[0]
    plan = [published(step, point, cluster_of(1, share)) for share in (0.5, 1.0)]
    slow, fast = (p.predicted_step_seconds for p in plan)
    falls, rest = slow - fast, 2 * fast - slow
    flops = plan[0].predicted_tflops_per_device_with_remat * slow
    return falls / (flops / point.auto - rest)


def main(most: int = 64) -> None:
    share = calibrated(traced(POINTS[0].size))
    print(f"sustained: {share:.3f} of the peak")
    rows, off = [], []
    for point in (point for point in POINTS if point.gpus <= most):
        step, cluster = traced(point.size), cluster_of(point.gpus, share)
        theirs, ours = published(step, point, cluster), search(step, cluster, Constraints())[0][0]
        others = (restricted(step, cluster, way) for way in (True, False))
        speeds = [p.predicted_samples_per_second if p else 0.0 for p in (ours, theirs, *others)]
        rate = theirs.predicted_tflops_per_device_with_remat
        off.append(abs(rate / point.auto - 1))
        name = f"{point.size}, {point.gpus} GPUs{'' if fits(theirs) else '*'}"
        rows.append((name, *speeds, rate, point.auto, describe_plan(ours)))
    heads = "samples/s (* does not fit)", "auto", "published", "intra", "inter"
    table((*heads, "TFLOPS predicted", "measured", "auto's plan"), rows)
    print(f"median distance from the published rates: {statistics.median(off):.0%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
