"""The plans that came next, each with what costs it the most time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.plan.inter_op.found import Estimated
from launcher.plan.links import link_seconds
from launcher.plan.pipeline import Estimate
from launcher.plan.plan import Plan, RunnerUp
from launcher.plan.stage_plan import Staged
from launcher.plan.words import describe_plan

_RUNNERS_UP = 3


def runners_up(
    best: Plan,
    chosen: Estimated,
    built: Sequence[tuple[Plan, Estimated]],
    estimates: Sequence[Estimated],
) -> tuple[RunnerUp, ...]:
    """Return the next best plans, of plans that read the same in words only the best.

    Those that were only estimated are compared with the best one's estimate.
    """
    known = {estimate[0]: plan for plan, estimate in built}
    scale = best.predicted_step_seconds / chosen[1].predicted_step_seconds
    words, found = {describe_plan(chosen[1])}, []
    for estimate in estimates:
        plan = known.get(estimate[0])
        if estimate[0] == chosen[0] or (describe_plan(estimate[1]) in words and not plan):
            continue
        words.add(describe_plan(estimate[1]))
        seconds = (plan or estimate[1]).predicted_step_seconds * (1.0 if plan else scale)
        needed = most_bytes(plan or estimate[1])
        if needed > (best.cluster["memory_bytes"] or math.inf):
            why = f"it needs {'' if plan else 'about '}{needed / 2**30:.1f} GiB a device"
        else:
            why = reason(plan, best) if plan else reason(estimate[1], chosen[1])
        found.append(RunnerUp(describe_plan(estimate[1]), seconds, why))
    found.sort(key=lambda runner: runner.predicted_step_seconds)
    return tuple(found[:_RUNNERS_UP])


def most_bytes(plan: Staged) -> int:
    """Return the bytes of the device that needs the most."""
    return max(stage.memory_bytes for stage in plan.stages)


def reason(plan: Plan | Estimate, best: Plan | Estimate) -> str:
    """Return what costs a plan most time, compared with the best one."""
    busy = [p.busy_seconds for p in (plan, best)]
    once = [max(stage.update_seconds for stage in p.stages) for p in (plan, best)]
    crossing = [max(link_seconds(p).values(), default=0.0) for p in (plan, best)]
    waiting = [p.predicted_bubble_fraction * p.predicted_step_seconds for p in (plan, best)]
    waits_for_link = crossing[0] > busy[0]  # else what crosses is hidden
    reasons = {
        f"its busiest devices work {busy[0]:.3g} s a step, not {busy[1]:.3g}": busy[0] - busy[1],
        f"gradients and update take {once[0]:.3g} s, not {once[1]:.3g}": once[0] - once[1],
        f"its busiest link takes {crossing[0]:.3g} s a step, not {crossing[1]:.3g}": (
            crossing[0] - crossing[1] if waits_for_link else 0.0
        ),
        f"its devices wait {plan.predicted_bubble_fraction:.0%} of the pipeline's time, not "
        f"{best.predicted_bubble_fraction:.0%}": (
            waiting[0] - waiting[1] if not waits_for_link else 0.0
        ),
    }
    words = max(reasons, key=lambda words: reasons[words])
    return words if reasons[words] > 0 else "it is as good within the model's precision"
