"""Plans for a step with several losses: the method plans one, and the others follow it.

They run on the same submeshes, on as many microbatches and replicas. A layer goes where its
parameters live by the plans that are there already, and they keep their specs. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from launcher.hardware import ClusterShape
from launcher.partition import Assignment, PlanError
from launcher.plan.build import PlanBuilder, build_plan
from launcher.plan.followers.following import following_assignment
from launcher.plan.followers.places import Places, successors
from launcher.plan.plan import Plan
from launcher.plan.profile.measured_layers import MeasuredLayers
from launcher.trace import TracedStep, is_var, program_flops, source_line


def lead_of(step: TracedStep) -> TracedStep:
    """Return the part of a step that the method plans: of those that train the most work."""
    return max(step.parts, key=_work) if step.other_losses else step


def _work(part: TracedStep) -> tuple[bool, float]:
    loss = part.loss(1)
    return bool(loss.wrt), program_flops(loss.equations)


def build_parts(step: TracedStep, assignment: Assignment, cluster: ClusterShape) -> Plan:
    """Return the plan of a step by the assignment of its leading part (`lead_of`).

    Raises:
        PlanError: as `PlanBuilder.build`, for any of the losses.
        BatchError: as `PlanBuilder.build`, for any of the losses.
    """
    plan = build_plan(lead_of(step), assignment, cluster)
    return with_further(step, plan, assignment)


def with_further(
    step: TracedStep,
    plan: Plan,
    assignment: Assignment,
    measured: MeasuredLayers | None = None,
) -> Plan:
    """Return the plan of a step, given that of its leading part.

    Args:
        step: the step.
        plan: the plan of its leading part.
        assignment: the assignment that it was built from.
        measured: the measured seconds of that part's layers, if it was built with them.

    Raises:
        PlanError: another loss cannot follow.
        BatchError: the batch does not divide, or slices cannot compute what another loss means.
    """
    if not step.other_losses:
        return plan
    lead, places, cluster = lead_of(step), Places(step), ClusterShape(**plan.cluster)
    places.add(lead, plan)
    built = []
    for part in step.parts:
        if part is lead:
            built.append((plan, PlanBuilder(part, cluster, measured), assignment))
            continue
        of_part = following_assignment(part, assignment, places)
        builder = PlanBuilder(part, cluster)
        built.append((builder.build(of_part, places.kept(part)), builder, of_part))
        places.add(part, built[-1][0])
    plans = []
    for part, (first, builder, of_part) in zip(step.parts, built, strict=True):
        kept = places.kept(part)
        if all(kept.get(s.devices, {}).items() <= s.shardings.items() for s in first.stages):
            again = first
        else:  # another loss trains what this one reads
            again = builder.build(of_part, kept)
            again = dataclasses.replace(again, runners_up=first.runners_up)
        plans.append(places.with_the_rest(part, places.with_note(part, again)))
    return plan_of_parts(step, plans)


def checked_fit(plan: Plan) -> Plan:
    """Return a plan that was searched for.

    Raises:
        PlanError: it does not fit the devices' memory with what its other losses hold.
    """
    if plan.further and plan.missing_bytes > 0:
        missing = f"{plan.missing_bytes / 2**30:.2f} GiB"
        raise PlanError(
            f"the {len(plan.parts)} losses of the step need {missing} a device more than it has: "
            "the search is for the plan of one loss, beside which the others keep parameters of "
            "their own. Give the stages by hand, or use more devices"
        )
    return plan


def plan_of_parts(step: TracedStep, plans: Sequence[Plan]) -> Plan:
    """Return the plans of a step's losses as one, that of the first, with predictions for all."""
    first, *further = plans
    seconds = sum(plan.predicted_step_seconds for plan in plans)

    def mean(values: Iterable[float]) -> float:
        """Return the mean over the step's time."""
        pairs = zip(values, plans, strict=True)
        return sum(value * plan.predicted_step_seconds for value, plan in pairs) / seconds

    lines = ", ".join(source_line(part.loss_equation) for part in step.parts)
    note = f"{len(plans)} losses a step, one after the other: {lines}"
    return dataclasses.replace(
        first,
        num_parameters=max(_num_parameters(step), *(plan.num_parameters for plan in plans)),
        flops_per_step=sum(plan.flops_per_step for plan in plans),
        predicted_step_seconds=seconds,
        predicted_samples_per_second=step.batch_size / seconds,
        predicted_tflops_per_device=mean(p.predicted_tflops_per_device for p in plans),
        predicted_tflops_per_device_with_remat=mean(
            p.predicted_tflops_per_device_with_remat for p in plans
        ),
        predicted_bubble_fraction=mean(p.predicted_bubble_fraction for p in plans),
        notes=(note, *dict.fromkeys(of_part for plan in plans for of_part in plan.notes)),
        further=tuple(further),
        least_step_seconds=None,  # it was of the leading one
    )


def _num_parameters(step: TracedStep) -> int:
    """Return how many numbers the losses differentiate, of those that the step takes."""
    same, arguments = successors(step), set(step.whole.invars)
    trained = (
        part.loss_equation.invars[i]
        for part in step.parts
        for i in part.loss_equation.params["wrt"]
    )
    return sum(v.aval.size for v in {same.get(v, v) for v in trained if is_var(v)} & arguments)
