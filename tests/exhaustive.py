"""Brute force over all plans of a made-up search problem, with nothing of the search's own bounds.

Stages are chosen one after another, in every way that the search may choose: layers, numbers of
devices (any number, some may stay idle), logical meshes, ZeRO levels, how many of its first layers
are recomputed in full, and whether the others are selectively; under every schedule, number of
microbatches and of common replicas. A beginning is left only where it needs more memory for its
state alone than there is, or more time than asked for, by its devices' work or by one microbatch's
way there and back. Complete choices are simulated as plans are.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from launcher.partition.assignment import Assignment, Submesh
from launcher.plan.cost.formulas import activation_bytes, transfer_seconds
from launcher.plan.inter_op.estimate import grouped_layers, make_estimate, make_pipeline
from launcher.plan.inter_op.layer_table import NOTHING, Recompute, every_recompute, recompute_of
from launcher.plan.inter_op.problem import ZERO_LEVELS
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.submeshes import Mesh, SearchPoint, in_order, place_submeshes
from launcher.schedule import SCHEDULES, Kind, training_schedules


@dataclass(frozen=True, eq=False)
class Use:
    """A use of some devices by a stage: arrays `[first, end]` of what it takes and holds."""

    shape: tuple[int, int]
    size: int
    row: int
    zero: int
    again: Recompute
    forward: np.ndarray
    back: np.ndarray  # of the backward pass, what the stages before wait for
    whole: np.ndarray  # both passes
    once: np.ndarray
    held: np.ndarray  # bytes of a device with one microbatch
    left: np.ndarray  # and of each more


def seconds_of(assignment, problem):
    """Return its simulated step; infinite if it does not fit."""
    estimate = make_estimate(assignment, problem)
    needed = max(stage.memory_bytes for stage in estimate.stages)
    fits = needed <= (problem.memory_bytes or math.inf)
    return estimate.predicted_step_seconds if fits else math.inf


def least_seconds(problem, below, counts=None, schedules=None):
    """Return the least step of all plans that take less than `below`, and a plan that takes it.

    If there is none, these are `below` and None. Plans that recompute more than they must are
    not counted: one of their stages, the slower for it, may happen to order transfers better.

    Args:
        problem: the problem.
        below: seconds that are of interest.
        counts: numbers of microbatches; None: all that divide the batch.
        schedules: names; None: all.
    """
    best = below, None
    for count, replicas in itertools.product(
        counts or range(1, problem.batch_size + 1), range(1, problem.cluster.num_devices + 1)
    ):
        if problem.batch_size % (count * replicas):
            continue
        known = {}
        for name in schedules or training_schedules():
            setting = SearchPoint(count, problem.batch_size, replicas, name, (), None)
            of = SCHEDULES[name]
            alike = of.splits_backward, of.last_stage_alternates(count)
            if alike not in known:
                known[alike] = list(uses_of(problem, setting))
            for assignment in plans_below(problem, setting, known[alike], lambda: best[0]):  # noqa: B023 (asked at once)
                seconds = seconds_of(assignment, problem)
                if seconds < best[0] and computes_again_what_it_must(assignment, problem):
                    best = seconds, assignment
    return best


def computes_again_what_it_must(assignment, problem):
    """Return whether no stage fits that computes less again, by its seconds.

    The last one may compute more again, to have both passes in one program.
    """
    groups, own = grouped_layers(assignment, problem), make_pipeline(assignment, problem).stages
    selective, most = problem.table.selective, problem.memory_bytes or math.inf
    for s, of in enumerate(groups[:-1]):
        if recompute_of(assignment.remat[s], of, selective) == NOTHING:
            continue
        for again in every_recompute(len(of), selective):
            word = again.remat(of)
            changed = (*assignment.remat[:s], word, *assignment.remat[s + 1 :])
            other = make_pipeline(dataclasses.replace(assignment, remat=changed), problem).stages[s]
            if other.memory_bytes <= most and other.backward_seconds < own[s].backward_seconds:
                return False
    return True


def plans_below(problem, setting, uses, below):
    """Yield the plans that may take less than `below()` seconds."""
    of = SCHEDULES[setting.schedule]
    if of.splits_backward:
        uses = [use for use in uses if use.again == NOTHING]
    if of.interleaves:
        yield from _interleaved(problem, setting, uses, below)
    elif uses:
        for stages in _chains(problem, setting, uses, below):
            if math.gcd(*(use.shape[0] for _, _, use in stages)) == setting.replicas:
                yield assignment_of(problem, setting, stages, len(stages))


def uses_of(problem, setting):
    """Yield what a stage may do with its devices."""
    table, rows = problem.table, problem.batch_size // setting.num_micro_batches
    goes_back = SCHEDULES[setting.schedule].last_stage_alternates(setting.num_micro_batches)
    every = range(1, problem.cluster.num_devices + 1)
    for size, (row, model) in itertools.product(every, enumerate(table.model_sizes)):
        data = size // model
        if size % model or rows % data or data % setting.replicas:
            continue
        mesh = Mesh.of(data, model, row)
        costs = StageCosts(table, [mesh], problem.cluster, setting, goes_back)
        levels, layers = ZERO_LEVELS if data > 1 else (0,), len(problem.groups)
        alone = NOTHING, Recompute(layers), Recompute(0, selective=True)
        # Without a limit only one program of both passes, which leaves little, is worth any.
        is_limited = np.isfinite(problem.memory_bytes or np.inf)
        again = table.recomputes
        counts = again if is_limited else [of for of in again if of in alone]
        for zero, again in itertools.product(levels, counts):
            passes = costs.passes(zero, again)
            whole = passes.forward + passes.backward
            yield Use(
                (data, model),
                size,
                row,
                zero,
                again,
                forward=passes.forward[0],
                back=(passes.backward - passes.weight)[0],
                whole=whole[0],
                once=costs.once(zero, again)[0],
                held=(costs.held(zero) + activation_bytes(1, *costs.working(again)))[0],
                left=costs.working(again)[0][0],
            )


def _chains(problem, setting, uses, below):
    """Yield the choices of stages, each `(first, end, use)`, that may take less than `below()`."""
    layers, count = len(problem.groups), setting.num_micro_batches
    memory, devices = problem.memory_bytes or math.inf, problem.cluster.num_devices
    chain, work = _least_behind(uses, layers, count)
    # By the stages behind it.
    ahead = [_most_ahead(setting, behind) for behind in range(min(layers, devices))]

    def round_trips(stages, sends, behind):
        """What each mesh has left to do when its first gradient can be there."""
        there = sum(use.forward[first, end] for first, end, use in stages) + sum(sends)
        back = chain[stages[-1][1]]
        for s in reversed(range(len(stages))):
            first, end, use = stages[s]
            done = ahead[len(stages) - 1 - s + behind] * use.forward[first, end]
            yield there + back + count * use.whole[first, end] - done
            back += use.back[first, end] + sends[s]

    def go_on(first, left, there, back, busy, once, stages, sends):  # noqa: PLR0913
        if first == layers:
            every = enumerate(reversed(stages))
            if all(
                u.held[f, e] + (ahead[k] - 1) * u.left[f, e] <= memory for k, (f, e, u) in every
            ):
                yield stages
            return
        sizes = tuple(use.size for _, _, use in stages)
        for end, use in itertools.product(range(first + 1, layers + 1), uses):
            idle, at = left - use.size, (first, end)
            if use.again.full > end - first - use.again.selective:
                continue
            if idle < 0 or (end < layers and not idle) or use.held[at] > memory:
                continue
            sent = 0.0
            if stages:
                size = float(problem.table.of["sent_bytes"][use.row, first - 1]) / count
                parts = stages[-1][2].shape[0], use.shape[0]
                sent = _crossing(problem.cluster, (*sizes, use.size), size, parts)
            one, after, to = float(use.whole[at]), float(use.back[at]), there + sent
            forward, most = float(use.forward[at]), max(once, float(use.once[at]))
            weights = count * (one - forward - after)
            busiest = max(busy, there + count * sent)
            busiest = max(busiest, to + count * one, to + count * one - weights + back + sent)
            behind = work[end] / idle if idle else 0.0
            limit, home = below() - most, back + sent + after
            if max(busiest, to + forward + behind, to + forward + home + chain[end]) >= limit:
                continue
            longer, links = (*stages, (first, end, use)), (*sends, sent)
            if max(round_trips(longer, links, min(layers - end, idle))) < limit:
                yield from go_on(end, idle, to + forward, home, busiest, most, longer, links)

    yield from go_on(0, devices, 0.0, 0.0, 0.0, 0.0, (), ())


@functools.cache
def _crossing(cluster, sizes, size, parts):
    """Return the seconds of a transfer between the last two submeshes, at least.

    More submeshes may follow, so that all of them are placed in order.
    """
    found = []
    for placed in (place_submeshes(sizes, cluster), in_order(sizes, cluster)):
        hosts = [{cluster.host_of(device) for device in devices} for devices in placed[-2:]]
        counts = tuple(map(len, hosts))
        found.append(transfer_seconds(size, parts, counts, hosts[0] == hosts[1], cluster))
    return float(min(found))


def _most_ahead(setting, behind):
    """Return the forward passes before the first gradient of a mesh with up to so many behind."""
    schedule, most = SCHEDULES[setting.schedule], 0
    for meshes in range(1, behind + 2):
        kinds = [task.kind for task in schedule.tasks(meshes, setting.num_micro_batches)[0]]
        most = max(most, next(i for i, kind in enumerate(kinds) if kind is not Kind.FORWARD))
    return most


def _least_behind(uses, layers, count):
    """Return what layers `first …` take one microbatch at least, and all devices together."""
    chain, work = np.zeros((2, layers + 1))
    for first in reversed(range(layers)):
        at = [(use, end) for use in uses for end in range(first + 1, layers + 1)]
        chain[first] = min(u.forward[first, e] + u.back[first, e] + chain[e] for u, e in at)
        work[first] = min(count * u.size * u.whole[first, e] + work[e] for u, e in at)
    return chain, work


def _interleaved(problem, setting, uses, below):
    """Yield the pipelines of equal runs of layers that go round equal submeshes in turn."""
    layers, count = len(problem.groups), setting.num_micro_batches
    for meshes, each in itertools.product(range(2, layers // 2 + 1), (2, 3, 4)):
        if layers % (meshes * each):
            continue
        ends = np.linspace(0, layers, meshes * each + 1, dtype=int).tolist()
        at = list(itertools.pairwise(ends))
        either = [use for use in uses if use.again in (NOTHING, Recompute(layers))]
        for use, last in itertools.product(either, either):
            alike = (use.shape, use.row, use.zero) == (last.shape, last.row, last.zero)
            if not alike or use.size * meshes > problem.cluster.num_devices:
                continue
            if use.shape[0] != setting.replicas:
                continue
            chosen = [(*span, use) for span in at[:-1]] + [(*at[-1], last)]
            whole = np.array([one.whole[first, end] for first, end, one in chosen])
            once = max(float(one.once[first, end]) for first, end, one in chosen)
            busy = count * whole.reshape(each, meshes).sum(0).max()
            if max(busy, whole.sum()) + once < below():
                yield assignment_of(problem, setting, chosen, meshes)


def assignment_of(problem, setting, stages, meshes):
    """Return the assignment of stages, each `(first, end, use)`, on the first so many submeshes."""
    sizes = [use.size for _, _, use in stages[:meshes]]
    devices = place_submeshes(sizes, problem.cluster)
    shapes = [use.shape for _, _, use in stages[:meshes]]
    groups = problem.groups
    return Assignment(
        method="auto",
        layers=tuple(
            tuple(layer for group in groups[first:end] for layer in group)
            for first, end, _ in stages
        ),
        submeshes=tuple(map(Submesh, devices, shapes)),
        mesh_of=tuple(s % meshes for s in range(len(stages))),
        num_micro_batches=setting.num_micro_batches,
        schedule=setting.schedule,
        remat=tuple(use.again.remat(groups[first:end]) for first, end, use in stages),
        zero=tuple(use.zero for _, _, use in stages),
        sequence=tuple(problem.table.is_sequence(use.row) for _, _, use in stages),
    )
