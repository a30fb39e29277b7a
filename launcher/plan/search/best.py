"""From the search's outlines to one plan that says what it beat. Pure; used by `plan.methods`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.errors import UnmeasuredError
from launcher.plan.make import complete
from launcher.plan.outline import Outline
from launcher.plan.plan import Plan, RunnerUp
from launcher.plan.profile.measured import MeasuredLayers
from launcher.plan.search.auto import search
from launcher.plan.search.problem import Candidate, Wanted
from launcher.trace.step import TracedStep


def best_plan(
    step: TracedStep,
    cluster: ClusterShape,
    wanted: Wanted,
    progress: Callable[[float], None] = lambda share: None,
    measured: MeasuredLayers | None = None,
) -> Plan:
    """The best plan; the next best ones stand in it as `runners_up`. `measured`: see `search`.

    The search's objective is a closed form; the few best outlines are completed, so that the
    simulated timeline decides, also between schedules where that is left open.

    Raises:
        PlanError: nothing fits the devices' memory, or nothing that does could be measured.
    """
    found = search(step, cluster, wanted, lambda share: progress(0.8 * share), measured)
    plans: list[Plan] = []
    unmeasured: list[UnmeasuredError] = []
    for k, outline in enumerate(_with_schedules(found, wanted)):
        try:
            plans.append(complete(step, outline, cluster, measured))
        except UnmeasuredError as error:
            unmeasured.append(error)
        progress(0.8 + 0.2 * (k + 1) / (len(found) + 1))
    if not plans:
        raise unmeasured[0]
    # The search's own estimate let them all pass; the exact one may not.
    fitting = [plan for plan in plans if _fits(plan, cluster)] or plans
    best, *others = sorted(fitting, key=lambda plan: plan.predicted_step_seconds)
    runners = tuple(
        RunnerUp(in_words(plan), plan.predicted_step_seconds, _why(plan, best)) for plan in others
    )
    return dataclasses.replace(best, runners_up=runners)


def _with_schedules(found: list[Candidate], wanted: Wanted) -> list[Outline]:
    """The outlines, and the first of them also with the schedule that leaves the least bubble."""
    outlines = [candidate.outline for candidate in found]
    first = outlines[0]
    if wanted.schedule is None and len(first.layers) > 1 and set(first.remat) == {"none"}:
        outlines.insert(1, dataclasses.replace(first, schedule="zero_bubble"))
    return outlines


def _fits(plan: Plan, cluster: ClusterShape) -> bool:
    most = max(stage.memory_bytes for stage in plan.stages)
    return cluster.memory_bytes is None or most <= cluster.memory_bytes


def in_words(plan: Plan) -> str:
    """A plan in a few words: stages, meshes, microbatches, what is computed again or cut."""
    shapes = list(dict.fromkeys(stage.logical_mesh for stage in plan.stages))
    meshes = " and ".join(f"{data}x{model}" for data, model in shapes[:3])
    remat = sorted({stage.remat for stage in plan.stages} - {"none"})
    count = len(plan.stages)
    parts = [
        f"{count} stage{'s' if count > 1 else ''} of {meshes}{' …' if len(shapes) > 3 else ''}",
        f"{plan.num_micro_batches} microbatch{'es' if plan.num_micro_batches > 1 else ''}",
        plan.schedule,
        *(f"remat {name}" for name in remat),
    ]
    return ", ".join(parts)


def _why(plan: Plan, best: Plan) -> str:
    """What costs a plan most time beside the best one."""
    busy = [_busiest(p) for p in (plan, best)]
    once = [max(stage.update_seconds for stage in p.stages) for p in (plan, best)]
    waiting = [p.predicted_bubble_fraction * p.predicted_step_seconds for p in (plan, best)]
    reasons = {
        f"its busiest stage works {busy[0]:.3g} s a step, not {busy[1]:.3g}": busy[0] - busy[1],
        f"gradients and update take {once[0]:.3g} s, not {once[1]:.3g}": once[0] - once[1],
        f"its devices wait {plan.predicted_bubble_fraction:.0%} of the pipeline's time, not "
        f"{best.predicted_bubble_fraction:.0%}": waiting[0] - waiting[1],
    }
    words = max(reasons, key=lambda reason: reasons[reason])
    return words if reasons[words] > 0 else "it is as good within the model's precision"


def _busiest(plan: Plan) -> float:
    each = [stage.forward_seconds + stage.backward_seconds for stage in plan.stages]
    return plan.num_micro_batches * max(each)
