"""Whether a plan fits the devices' memory, and what would.

`auto` only finds what fits; the other methods do as they are told, and what they lack is said here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.config.schema import Parallel
from launcher.driver.plan_from_config import plan_of
from launcher.plan import ClusterShape, Plan, PlanError, in_words
from launcher.report.text import bytes_text
from launcher.trace import BatchError, TracedStep

_FITS = "This would fit: "  # as a search says it, too


def too_large(plan: Plan) -> str:
    """Which stage needs how much more than there is; "" where all fit."""
    if plan.missing_bytes <= 0:
        return ""
    stage = max(range(len(plan.stages)), key=lambda s: plan.stages[s].memory_bytes)
    needed, missing = plan.stages[stage].memory_bytes, plan.missing_bytes
    return (
        f"the plan does not fit: stage {stage} needs {bytes_text(needed)} a device, "
        f"{bytes_text(missing)} more than its {bytes_text(needed - missing)}"
    )


def what_fits(parallel: Parallel, step: TracedStep, cluster: ClusterShape, plan: Plan) -> str:
    """The nearest changes with which the step fits, each of which was tried, in a sentence."""
    found = []
    for words, changed in _changes(parallel, step, plan):
        try:
            fits = plan_of(changed, step, cluster).missing_bytes <= 0
        except (PlanError, BatchError):  # the batch does not divide, or so
            continue
        if fits:
            found.append(words)
            break
    try:
        automatic = plan_of(Parallel(num_layers=parallel.num_layers), step, cluster)
        found.append(f"parallel=auto ({in_words(automatic)})")
    except PlanError as error:
        if advice := str(error).partition(_FITS)[2]:
            found.append(f"parallel=auto with {advice}")
    return (
        f"{_FITS if found else ''}"
        f"{'; or '.join(found) or 'Take a smaller model, or larger devices'}. "
        "To do it all the same, set parallel.allow_over_memory=true"
    )


def _changes(parallel: Parallel, step: TracedStep, plan: Plan) -> Iterator[tuple[str, Parallel]]:
    """What takes less memory under the same method, or one like it: less of a change first."""
    if parallel.method in ("auto", "replay"):
        return
    most = step.batch_size // max(stage.logical_mesh[0] for stage in plan.stages)
    methods = [parallel.method]
    if parallel.method in ("data", "zero2"):
        methods.append("zero3")
    ways = (
        {"remat": "full"},
        {"num_micro_batches": most},
        {"remat": "full", "num_micro_batches": most},
    )
    for method in methods:
        is_other = method != parallel.method
        for way in ({}, *ways) if is_other else ways:
            settings = {f"parallel.{key}={value}" for key, value in way.items()}
            words = ([f"parallel={method}"] if is_other else []) + sorted(settings)
            yield " ".join(words), replace(parallel, method=method, **way)
