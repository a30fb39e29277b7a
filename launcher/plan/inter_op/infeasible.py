"""Where nothing fits the memory: which stage lacks how much, and the nearest changes that would do.

Every change that is named was tried by the same search. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from launcher.hardware.cluster_shape import LOCAL, ClusterShape
from launcher.partition.errors import PlanError
from launcher.plan.errors import TooLargeError, UnmeasuredError
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.problem import (
    Candidate,
    Constraints,
    Problem,
    best_of,
    of_batch,
)
from launcher.plan.inter_op.submeshes import spread_divisors, submesh_sizes
from launcher.plan.stage_plan import Staged
from launcher.plan.words import describe_plan

_MOST_MEMORY = 10000  # times what there is; beyond it any amount is tried
_PRECISION = 1.01
_MOST_TIMES = 64  # the devices there are
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
    shown, usable = built or _estimated(least, problem), problem.memory_bytes
    memory: Sequence[float] = least.memory
    if shown:
        memory = [stage.memory_bytes for stage in shown.stages]
    needed = max(memory)
    words = f" ({describe_plan(shown)})" if shown else ""
    asked = [
        f"parallel.{name}={value}"
        for name, value in (
            ("num_micro_batches", wanted.num_micro_batches),
            ("remat", wanted.remat),
            ("schedule", wanted.schedule),
        )
        if value
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


def _estimated(least: Candidate, problem: Problem) -> Staged | None:
    try:
        return make_estimate(least.assignment, problem)
    except UnmeasuredError:  # its memory is known all the same
        return None


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
    while min(high, most := _most_bytes(found)) > _PRECISION * low:
        high = min(high, most)
        middle = (low * high) ** 0.5
        leaner = best_of(dataclasses.replace(problem, memory_bytes=middle), wanted)
        low, high = (low, middle) if leaner else (middle, high)
        found = leaner or found
    return min(found, key=lambda c: max(c.memory))


def _most_bytes(found: Sequence[Candidate]) -> float:
    return min(max(candidate.memory) for candidate in found)


def _changes(problem: Problem, wanted: Constraints) -> list[str]:
    """Return changes of the settings alone if any suffice; else of the batch and the devices."""
    if setting := _settings(problem, wanted):
        return [setting]
    free = Constraints(reduction=wanted.reduction)
    for asked, words in ((wanted, ""), (free, f" with {_as_auto(wanted)}")):
        found = [change for change in (_batch(problem, asked), _devices(problem, asked)) if change]
        if found or asked == wanted == free:
            return [change + words for change in found]
    return []


_SETTINGS = "num_micro_batches", "remat", "schedule", "num_stages"


def _as_auto(wanted: Constraints) -> str:
    return " ".join(f"parallel.{name}=auto" for name in _SETTINGS if getattr(wanted, name))


def _settings(problem: Problem, wanted: Constraints) -> str:
    """Return the requested settings that should be left to the search, as few as suffice."""
    asked = [name for name in _SETTINGS if getattr(wanted, name)]
    singles = [(name,) for name in _SETTINGS if name in asked]
    for names in (*singles, tuple(asked)):
        left_open: dict[str, Any] = dict.fromkeys(names)
        if names and best_of(problem, dataclasses.replace(wanted, **left_open)):
            return " ".join(f"parallel.{name}=auto" for name in names)
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
        return f"so many of these devices in a Slurm job: cluster=slurm {words}"
    if there.hosts == 1:
        return f"{words} {_LINK} (100 Gbit/s between hosts, or what there is)"
    return words
