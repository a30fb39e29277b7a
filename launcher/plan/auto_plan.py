"""The search for a plan as a method or the settings ask for it: what they fix, what is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from launcher.hardware import ClusterShape
from launcher.partition import DEFAULT_REDUCTION, Assignment, PlanError, Reduction, remat_of_stages
from launcher.plan.followers.further import checked_fit, lead_of, with_further
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.select import search
from launcher.plan.inter_op.submeshes import model_sizes
from launcher.plan.options import checked_micro_batches
from launcher.plan.plan import Plan
from launcher.plan.profile.measure_layers import measure_layers
from launcher.plan.profile.measured_layers import MeasuredLayers
from launcher.schedule import training_schedules
from launcher.trace import BatchError, TracedStep


def auto_plans(  # noqa: PLR0913 (the search's settings)
    step: TracedStep,
    cluster: ClusterShape,
    num_micro_batches: int | None,
    schedule: str,
    remat: str | Sequence[str],
    cost: str = "measured",
    progress: Callable[[float], None] = lambda share: None,
    num_stages: int | None = None,
    reduction: Reduction = DEFAULT_REDUCTION,
    how_many: Callable[[Plan], int] = lambda best: 1,
) -> list[Plan]:
    """Return the best plan that the search finds and, if asked for, others that are worth trying.

    Args:
        step: the traced train step, cut into layers.
        cluster: the devices to plan for.
        num_micro_batches: number of microbatches; None: searched for.
        schedule: name of a schedule, or "auto".
        remat: name of a rematerialisation policy, or "auto".
        cost: see `AutoStageOption`.
        progress: called with the share that is done, 0 … 1.
        num_stages: number of stages; None: as many as are best.
        reduction: how gradients are summed over the replicas.
        how_many: returns how many plans to return, given the best.

    Raises:
        PlanError: the search does not know the schedule, policy or cost, or nothing fits.
    """
    check_cost(cost)
    searched = training_schedules(interleaves=False)
    if schedule not in ("auto", *searched):
        raise PlanError(
            f"parallel.schedule={schedule} is not searched for; give auto, "
            f"{', '.join(searched[:-1])} or {searched[-1]}, or use parallel=manual"
        )
    if remat != "auto":
        remat = remat_of_stages(remat, 1)[0]
    wanted = Constraints(
        num_micro_batches=num_micro_batches and checked_micro_batches(num_micro_batches),
        schedule=None if schedule == "auto" else schedule,
        remat=None if remat == "auto" else str(remat),
        num_stages=num_stages,
        reduction=reduction,
    )
    measured = None
    if cost == "profile":
        measured = measure_layers(
            lead_of(step),
            cluster,
            model_sizes(cluster),
            wanted.num_micro_batches,
            lambda share: progress(0.9 * share),
        )
    done = 0.9 if measured else 0.0
    found = search(
        step,
        cluster,
        wanted,
        lambda share: progress(done + (1 - done) * share),
        measured,
        how_many,
    )
    best = checked_fit(with_further(step, *found[0], measured))
    return [best, *_whole(step, found[1:], measured)]


def _whole(
    step: TracedStep, found: Sequence[tuple[Plan, Assignment]], measured: MeasuredLayers | None
) -> Iterator[Plan]:
    """Yield the plans of a whole step, but for those that its other losses cannot follow."""
    for plan, assignment in found:
        with suppress(PlanError, BatchError):
            yield checked_fit(with_further(step, plan, assignment, measured))


def check_cost(cost: str) -> None:
    """Raise PlanError if `cost` is unknown."""
    if cost not in ("measured", "model", "profile"):
        raise PlanError(f'cost={cost!r} is not "measured", "model" or "profile"')
