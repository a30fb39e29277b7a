"""Our plans for mixtures of experts and wide residual networks, on the cluster of the Alpa paper.

    python tests/benchmarks/planner_families.py [most GPUs]

Weak scaling on V100-16GB of p3.16xlarge (Zheng et al. 2022, arXiv 2201.12023, section 8.1 and its
tables 6 to 8): the models' sizes, batches and precisions are the paper's. For each are printed the
predicted samples a second of the plan that the search finds, of the best one stage on all devices,
of the best pipeline of single devices, and of plain data parallelism with everything cut (ZeRO-3).
"""

from __future__ import annotations

import sys

from planner_published import cluster_of, fits, restricted
from turns import table

from launcher.config.compose import load
from launcher.plan import Plan, describe_plan
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.select import search
from launcher.plan.methods import Zero3Parallel
from launcher.trace import TracedStep
from launcher.train.program import build_program

SUSTAINED = 0.4  # of the datasheet's peak; any: only plans of one model are compared
COMMON = ("dataset=synthetic", "optimizer=adam", "optimizer.clip_norm=null", "train.eval_every=0")
# The names of sizes, by GPUs.
MIXTURES = {1: "380m", 2: "690m", 4: "1.3b", 8: "2.4b", 16: "10b", 32: "27b"}
RESIDUALS = {1: "250m", 2: "500m", 4: "1b", 8: "2b", 16: "4b", 32: "6.8b"}


def mixture(size: str) -> TracedStep:
    """GShard's network, in 16 bits."""
    return _traced("model=moe", size, "train.precision=bf16", "train.global_batch_size=1024")


def residual(size: str) -> TracedStep:
    """Wide-ResNet on pictures of 224 x 224, in 32 bits."""
    return _traced("model=wide_resnet", size, "train.global_batch_size=1536")


def _traced(model: str, size: str, *words: str) -> TracedStep:
    return build_program(load([model, f"model.size={size}", *COMMON, *words])).train


def plans(step: TracedStep, gpus: int) -> dict[str, Plan | None]:
    """The plan that is found, and those that have only one kind of parallelism."""
    cluster = cluster_of(gpus, SUSTAINED)
    return {
        "auto": search(step, cluster, Constraints())[0][0],
        "intra": restricted(step, cluster, intra=True),
        "inter": restricted(step, cluster, intra=False),
        "zero3": Zero3Parallel(step.batch_size // (2 * gpus)).plan(step, cluster),
    }


def main(most: int = 16) -> None:
    rows = []
    for make, sizes in ((mixture, MIXTURES), (residual, RESIDUALS)):
        for gpus in (gpus for gpus in sizes if gpus <= most):
            found = plans(make(sizes[gpus]), gpus)
            speeds = (
                f"{p.predicted_samples_per_second:.1f}{'' if fits(p) else '*'}" if p else "-"
                for p in found.values()
            )
            name = f"{make.__name__} {sizes[gpus]}, {gpus} GPUs"
            rows.append((name, *speeds, describe_plan(found["auto"])))
    table(("samples/s (* does not fit)", "auto", "intra", "inter", "zero3", "auto's plan"), rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
