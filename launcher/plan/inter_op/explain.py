"""Explanations of a search's result for a person.

They are the runners-up with what costs them time, other plans worth a trial, a batch that would
divide better, and, where nothing fits the memory, the nearest changes with which something does.
Every change that is named was tried by the same search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from launcher.hardware import LOCAL, ClusterShape
from launcher.partition import Assignment, PlanError
from launcher.plan.build import PlanBuilder
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.problem import Candidate, Constraints, Problem, best_of, of_batch
from launcher.plan.inter_op.refine import Estimated
from launcher.plan.inter_op.submeshes import spread_divisors, submesh_sizes
from launcher.plan.pipeline import Estimate, link_seconds
from launcher.plan.plan import Plan, RunnerUp, TooLargeError
from launcher.plan.profile.measure_layers import UnmeasuredError
from launcher.plan.stage_plan import Staged, describe_plan
from launcher.trace import BatchError

_MOST_MEMORY = 10000  # times what there is; beyond it any amount is tried
_PRECISION = 1.01
_MOST_TIMES = 64  # the devices there are
_RUNNERS_UP = 3
_MOST_TIMES_SLOWER = 2.0  # times the best plan's step: further off no prediction is
_NEAR = 1.25  # times the best prediction: plans of other kinds that are tried first
_SPARE = 2  # times as many are built at most, as some do not fit or cannot cut the batch
_MOST_FEWER = 0.1  # of the examples
_LEAST_SAVED = 0.1  # of the time of an example
_GIB = 2**30
_LINK = "cluster.links.inter_host_gb_per_second=12.5"


def nothing_fits(
    problem: Problem, wanted: Constraints, least: Candidate | None, built: Staged | None = None
) -> PlanError:
    """Return the error that explains to a person why `best_of` found nothing.

    Args:
        problem: the problem.
        wanted: what the user fixed.
        least: the plan that exceeds the memory least (`leanest`).
        built: the same as it is shown; None: by its estimate.
    """
    if reason := _too_many_stages(problem, wanted):
        return PlanError(reason)
    if problem.memory_bytes is None or least is None:
        count = wanted.num_micro_batches
        return PlanError(
            f"a batch of {problem.batch_size} does not divide into "
            f"{f'{count} microbatches' if count else 'microbatches'}; change "
            "train.global_batch_size or parallel.num_micro_batches"
        )
    shown, usable = built, problem.memory_bytes
    if shown is None:
        with suppress(UnmeasuredError):  # its memory is known all the same
            shown = make_estimate(least.assignment, problem)
    memory: Sequence[float] = least.memory
    if shown:
        memory = [stage.memory_bytes for stage in shown.stages]
    needed = max(memory)
    words = f" ({describe_plan(shown)})" if shown else ""
    asked = [
        f"parallel.{name}={value}"
        for name in ("num_micro_batches", "remat", "schedule")
        if (value := getattr(wanted, name))
    ]

    def advice() -> str:
        changes = "; or ".join(_changes(problem, wanted))
        return f"This would fit: {changes or 'take a smaller model or larger devices'}"

    return TooLargeError(
        f"the model does not fit{' with ' + ' '.join(asked) if asked else ''}: in the leanest plan "
        f"found{words} stage {memory.index(needed)} needs "
        f"{needed / _GIB:.2f} GiB a device, "
        f"{(needed - usable) / _GIB:.2f} GiB more than the {usable / _GIB:.2f} GiB that can be "
        "used. ",
        least.assignment,
        advice,
    )


def _too_many_stages(problem: Problem, wanted: Constraints) -> str:
    """Return a message if there are fewer layers or devices than requested stages; otherwise ""."""
    asked = wanted.num_stages or 1
    layers, devices = sum(map(len, problem.groups)), problem.cluster.num_devices
    for most, words in (
        (len(problem.groups), f"the model's {layers} layers (one more than its marks)"),
        (devices, f"the {devices} devices (cluster.gpus)"),
    ):
        if asked > most:
            return (
                f"parallel.num_stages={asked} is more than {words}; each stage needs one. Give at "
                f"most {min(devices, layers)}, or parallel.num_stages=auto"
            )
    return ""


def leanest(problem: Problem, wanted: Constraints) -> Candidate | None:
    """Return the plan that would fit with the least additional memory, to a hundredth of it."""
    if problem.memory_bytes is None or _too_many_stages(problem, wanted):
        return None
    low, high = problem.memory_bytes, problem.memory_bytes
    found: list[Candidate] = []
    while not found:
        if high > _MOST_MEMORY * problem.memory_bytes:
            high = np.inf
        low, high = high, 2 * high
        found = best_of(dataclasses.replace(problem, memory_bytes=high), wanted)
        if not found and high == np.inf:
            return None
    while (high := min(high, *(max(c.memory) for c in found))) > _PRECISION * low:
        middle = (low * high) ** 0.5
        leaner = best_of(dataclasses.replace(problem, memory_bytes=middle), wanted)
        low, high = (low, middle) if leaner else (middle, high)
        found = leaner or found
    return min(found, key=lambda c: max(c.memory))


def _changes(problem: Problem, wanted: Constraints) -> list[str]:
    """Return changes of the settings alone if any suffice; else of the batch and the devices."""
    if setting := _settings(problem, wanted):
        return [setting]
    free = Constraints(reduction=wanted.reduction)
    for asked, words in ((wanted, ""), (free, f" with {_as_auto(_asked(wanted))}")):
        found = [change for change in (_batch(problem, asked), _devices(problem, asked)) if change]
        if found or asked == wanted == free:
            return [change + words for change in found]
    return []


_SETTINGS = "num_micro_batches", "remat", "schedule", "num_stages"


def _as_auto(names: Iterable[str]) -> str:
    return " ".join(f"parallel.{name}=auto" for name in names)


def _asked(wanted: Constraints) -> tuple[str, ...]:
    return tuple(name for name in _SETTINGS if getattr(wanted, name))


def _settings(problem: Problem, wanted: Constraints) -> str:
    """Return the requested settings that should be left to the search, as few as suffice."""
    asked = _asked(wanted)
    for names in (*((name,) for name in asked), asked):
        left_open: dict[str, Any] = dict.fromkeys(names)
        if names and best_of(problem, dataclasses.replace(wanted, **left_open)):
            return _as_auto(names)
    return ""


def _batch(problem: Problem, wanted: Constraints) -> str:
    for parts in spread_divisors(problem.batch_size, problem.batch_size)[1:]:
        size = problem.batch_size // parts
        # The table is of the whole batch: fewer samples cost their share.
        if best_of(of_batch(problem, size), wanted):
            return f"train.global_batch_size={size}"
    return ""


def _devices(problem: Problem, wanted: Constraints) -> str:
    cluster, times = problem.cluster, 1
    while times < _MOST_TIMES:
        times *= 2
        more = dataclasses.replace(cluster, hosts=cluster.hosts * times)
        sizes = submesh_sizes(more, problem.batch_size)
        if best_of(dataclasses.replace(problem, cluster=more, sizes=sizes), wanted):
            return _as_settings(cluster, more)
    return ""


def _as_settings(there: ClusterShape, more: ClusterShape) -> str:
    """Return the settings that ask for more hosts, which are accepted as they stand."""
    words = f"cluster.hosts={more.hosts} cluster.gpus={more.num_devices}"
    if there.name == LOCAL:  # a machine does not grow
        return f"{more.num_devices} of these devices in a Slurm job: cluster=slurm {words}"
    if there.hosts == 1:
        return f"{words} {_LINK} (100 Gbit/s between hosts, or what there is)"
    return words


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
        needed = (plan or estimate[1]).most_bytes
        fits = needed <= (best.cluster["memory_bytes"] or math.inf)
        if not fits:
            why = f"it needs {'' if plan else 'about '}{needed / 2**30:.1f} GiB a device"
        else:
            why = reason(plan, best) if plan else reason(estimate[1], chosen[1])
        found.append(RunnerUp(describe_plan(estimate[1]), seconds, why, fits))
    found.sort(key=lambda runner: runner.predicted_step_seconds)
    return tuple(found[:_RUNNERS_UP])


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


def next_best(
    builder: PlanBuilder,
    best: Plan,
    chosen: Estimated,
    built: Sequence[tuple[Plan, Estimated]],
    ranked: Sequence[Estimated],
    count: int,
) -> list[tuple[Plan, Assignment]]:
    """Return up to `count` other plans that fit, each with its assignment, best first.

    No two are the same in words. Predictions err alike for plans with as many stages, and for those
    on the same submeshes: the best with other numbers of submeshes come first, as far as their
    predictions are near, then the best on other ones, then the next best.

    Args:
        builder: builds plans.
        best: the best plan.
        chosen: its estimate.
        built: the plans that are built already, with their estimates.
        ranked: the estimates of all plans, best first.
        count: the most plans to return.
    """
    known = {estimate[0]: plan for plan, estimate in built}
    found: list[tuple[Plan, Assignment]] = []
    for k, (assignment, _) in enumerate(_by_kind(chosen, ranked)):
        if len(found) == count or k == _SPARE * count:
            break
        try:
            plan = known.get(assignment) or builder.build(assignment)
        except BatchError:
            continue
        near = plan.predicted_step_seconds <= _MOST_TIMES_SLOWER * best.predicted_step_seconds
        if plan.missing_bytes <= 0 and near:
            found.append((plan, assignment))
    return sorted(found, key=lambda pair: pair[0].predicted_step_seconds)


def _by_kind(chosen: Estimated, ranked: Sequence[Estimated]) -> Iterator[Estimated]:
    """Yield estimates that differ in words from the chosen one, the best of each kind first."""
    distinct: dict[str, Estimated] = {}
    for estimate in (chosen, *ranked):
        distinct.setdefault(describe_plan(estimate[1]), estimate)
    _, *others = distinct.values()
    first, near = [chosen], _NEAR * chosen[1].predicted_step_seconds
    for key, limit in ((_num_meshes, near), (_kind, math.inf)):
        known, later = {key(estimate) for estimate in first}, []
        for estimate in others:
            if key(estimate) in known or estimate[1].predicted_step_seconds > limit:
                later.append(estimate)
            else:
                known.add(key(estimate))
                first.append(estimate)
        others = later
    yield from (*first[1:], *others)


def _num_meshes(estimate: Estimated) -> int:
    return len(estimate[1].meshes)


def _kind(estimate: Estimated) -> tuple[int, ...]:
    """Return the number of devices of every stage."""
    return tuple(math.prod(stage.logical_mesh) for stage in estimate[1].stages)


def fewer_examples_note(problem: Problem, wanted: Constraints, plan: Estimate) -> tuple[str, ...]:
    """Return a note that names a batch of fewer examples and what a step of it takes; or none.

    A batch is tried that all devices can share, unless the one that is asked for is such a batch.
    Its plan is the best of a search by the closed form alone, so that it may be better yet.

    Args:
        problem: the problem of the batch that is asked for.
        wanted: what the user fixed.
        plan: the estimate of the plan that was found.
    """
    rows, devices = problem.batch_size, problem.cluster.num_devices
    fewer = rows - rows % devices
    if not problem.sliced or fewer == rows or fewer < (1 - _MOST_FEWER) * rows:
        return ()
    smaller = dataclasses.replace(of_batch(problem, fewer), refused=frozenset())
    best = math.inf
    for candidate in best_of(smaller, wanted):
        try:
            estimate = make_estimate(candidate.assignment, smaller)
        except UnmeasuredError:
            continue
        if problem.fits(estimate):
            best = min(best, estimate.predicted_step_seconds)
    saved = 1 - (best / fewer) / (plan.predicted_step_seconds / rows)
    if saved <= _LEAST_SAVED:
        return ()
    takes = f"{1e3 * best:.3g} ms" if best < 1 else f"{best:.3g} s"
    return (
        f"a global batch of {fewer} instead of {rows} examples would take {takes} a step "
        f"({saved:.0%} less per example), since all {devices} devices can share it",
    )
