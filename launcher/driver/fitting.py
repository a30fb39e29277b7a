"""Whether a plan fits the devices' memory, and what would.

`auto` only finds what fits; the other methods do as they are told, and what they lack is said here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.config.parallel import Auto, Data, Parallel, Planned, Zero3
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
        num_layers = getattr(parallel, "num_layers", None)
        automatic = plan_of(Auto(num_layers=num_layers), step, cluster)
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
