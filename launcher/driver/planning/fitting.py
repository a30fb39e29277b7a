"""Advice for a plan that does not fit the devices' memory.

`auto` only finds plans that fit; the other methods plan what they are asked to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.config.parallel import Auto, Data, Parallel, Planned, Zero3
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import ClusterShape, Plan, PlanError, describe_plan
from launcher.report.text import bytes_text
from launcher.trace import BatchError, TracedStep

_FITS = "This would fit: "  # a search's errors say it, too


def too_large(plan: Plan) -> str:
    """Return how much memory the largest stage lacks, in words; empty if all stages fit."""
    if plan.missing_bytes <= 0:
        return ""
    stage = max(range(len(plan.stages)), key=lambda s: plan.stages[s].memory_bytes)
    needed, missing = plan.stages[stage].memory_bytes, plan.missing_bytes
    return (
        f"the plan does not fit: stage {stage} needs {bytes_text(needed)} a device, "
        f"{bytes_text(missing)} more than its {bytes_text(needed - missing)}"
    )


def what_fits(parallel: Parallel, step: TracedStep, cluster: ClusterShape, plan: Plan) -> str:
    """Return a sentence with the smallest changes that make the step fit; each one was planned."""
    options = []
    for words, changed in _changes(parallel, step, plan):
        try:
            fits = plan_of(changed, step, cluster).missing_bytes <= 0
        except (PlanError, BatchError):  # such as a batch that does not divide
            continue
        if fits:
            options.append(words)
            break
    try:
        num_layers = getattr(parallel, "num_layers", None)
        automatic = plan_of(Auto(num_layers=num_layers), step, cluster)
        options.append(f"parallel=auto ({describe_plan(automatic)})")
    except PlanError as error:
        if advice := str(error).partition(_FITS)[2]:
            options.append(f"parallel=auto with {advice}")
    return (
        f"{_FITS if options else ''}"
        f"{'; or '.join(options) or 'Take a smaller model, or larger devices'}. "
        "To run it anyway, set parallel.allow_over_memory=true"
    )


def _changes(parallel: Parallel, step: TracedStep, plan: Plan) -> Iterator[tuple[str, Parallel]]:
    """Yield changes that take less memory under the same or a similar method, small ones first."""
    if isinstance(parallel, Auto) or not isinstance(parallel, Planned):
        return
    most = step.batch_size // max(stage.logical_mesh[0] for stage in plan.stages)
    methods: list[Planned] = [parallel]
    if isinstance(parallel, Data) and not isinstance(parallel, Zero3):
        kept = {name: value for name, value in vars(parallel).items() if name != "method"}
        methods.append(Zero3(**kept))
    ways = (
        {"remat": "full"},
        {"num_micro_batches": most},
        {"remat": "full", "num_micro_batches": most},
    )
    for method in methods:
        is_other = method is not parallel
        for way in ({}, *ways) if is_other else ways:
            settings = {f"parallel.{key}={value}" for key, value in way.items()}
            words = ([f"parallel={method.method}"] if is_other else []) + sorted(settings)
            yield " ".join(words), replace(method, **way)
