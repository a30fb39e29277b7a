"""On middle problems no random plan, and none by hand, is faster than the one that is found."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from exhaustive import seconds_of
from random_problems import random_layers

from launcher.partition import PlanError
from launcher.partition.assignment import Assignment, Submesh
from launcher.partition.stages import group_layers
from launcher.plan.inter_op.layer_table import recompute_of
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.search import find_plans
from launcher.plan.inter_op.submeshes import Mesh, SearchPoint, place_submeshes
from launcher.schedule import SCHEDULES, training_schedules

PLANS = 2000
_MOST_TASKS = 4096  # of a timeline


def middle_problem(rng):
    """12 to 64 layers on 8 to 64 devices; and the same with layers joined as the search does."""
    each = int(rng.choice([2, 4, 8]))
    hosts = int(rng.choice([n for n in (1, 2, 3, 4, 8, 16) if 8 <= n * each <= 64]))
    batch = int(rng.choice([32, 48, 64, 96, 128, 192, 256]))
    whole = random_layers(rng, int(rng.integers(12, 65)), hosts, each, batch)
    work = whole.table.of["work_seconds"][0].tolist()
    groups = group_layers(work, min(len(work), 16))
    joined = whole.table.grouped(groups)
    return whole, dataclasses.replace(whole, table=joined, groups=groups, unjoined=whole.table)


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def plan_of(problem, ends, shapes, count, schedule, remat, zero):
    """Stages that end at these layers, in turn on submeshes of these shapes."""
    sizes = [data * model for data, model in shapes]
    devices = place_submeshes(sizes, problem.cluster)
    return Assignment(
        method="auto",
        layers=tuple(tuple(range(*span)) for span in itertools.pairwise((0, *ends))),
        submeshes=tuple(map(Submesh, devices, shapes)),
        mesh_of=tuple(s % len(sizes) for s in range(len(ends))),
        num_micro_batches=count,
        schedule=schedule,
        remat=remat,
        zero=zero,
    )


def plans_by_hand(problem):
    """Equal stages on equal submeshes: data × model × pipeline, as in Megatron-LM, under every
    schedule, also several stages a submesh, with and without rematerialisation and ZeRO."""
    cluster, layers = problem.cluster, len(problem.groups)
    models = problem.table.model_sizes
    for size, model, schedule, remat, zero in itertools.product(
        problem.sizes, models, training_schedules(), ("none", "full"), (0, 2, 3)
    ):
        data, rest = divmod(size, model)
        if rest or (zero and data == 1):
            continue
        several = (2, 3, 4) if SCHEDULES[schedule].interleaves else (1,)
        used = {cluster.num_devices // size, cluster.devices_per_host // size or 1, 1}
        for meshes, times, count in itertools.product(used, several, divisors(problem.batch_size)):
            stages = meshes * times
            if stages > layers or problem.batch_size % (count * data):
                continue
            ends = np.linspace(0, layers, stages + 1).round().astype(int)[1:].tolist()
            way = [(data, model)] * meshes, count, schedule
            yield plan_of(problem, ends, *way, (remat,) * stages, (zero,) * stages)


def words(problem, *full):
    """What a stage may compute again."""
    some = ("selective", "full:2+selective") if problem.table.selective else ()
    return ["none", *full, *some]


def random_plan(problem, rng):
    """Any stages on any submeshes, some devices idle."""
    layers, left, shapes = len(problem.groups), problem.cluster.num_devices, []
    count = int(rng.choice(divisors(problem.batch_size)))
    while left and len(shapes) < layers and (not shapes or rng.random() < 0.8):
        size = int(rng.choice([n for n in problem.sizes if n <= left]))
        model = int(rng.choice([m for m in problem.table.model_sizes if size % m == 0]))
        shapes.append((size // model, model))
        left -= size
    stages = len(shapes)
    if any(problem.batch_size % (count * data) for data, _ in shapes):
        return random_plan(problem, rng)
    cuts = np.sort(rng.choice(np.arange(1, layers), stages - 1, replace=False)).tolist()
    schedule = str(rng.choice([s for s in training_schedules() if not SCHEDULES[s].interleaves]))
    remats = ["none"] if SCHEDULES[schedule].splits_backward else words(problem, "full")
    remat = tuple(rng.choice(remats, stages).tolist())
    zero = tuple(int(rng.choice([0, 2, 3])) if data > 1 else 0 for data, _ in shapes)
    return plan_of(problem, [*cuts, layers], shapes, count, schedule, remat, zero)


def changed(problem, plan, rng):
    """A plan with one or two of its decisions changed."""
    ends = [layers[-1] + 1 for layers in plan.layers]
    for _ in range(int(rng.integers(1, 3))):
        s, kind = int(rng.integers(len(ends))), int(rng.integers(5))
        if kind == 0 and s < len(ends) - 1:
            ends[s] += int(rng.choice([-2, -1, 1, 2]))
        elif kind == 1 and not SCHEDULES[plan.schedule].splits_backward:
            other = str(rng.choice(words(problem, "full:1", "full:2", "full")))
            plan = dataclasses.replace(plan, remat=(*plan.remat[:s], other, *plan.remat[s + 1 :]))
        elif kind == 2:
            count = int(rng.choice(divisors(problem.batch_size)))
            plan = dataclasses.replace(plan, num_micro_batches=count)
        elif kind == 3:
            one = int(rng.choice([0, 2, 3]))
            plan = dataclasses.replace(plan, zero=(*plan.zero[:s], one, *plan.zero[s + 1 :]))
        else:
            plan = dataclasses.replace(plan, schedule=str(rng.choice(training_schedules())))
    if sorted({0, *ends}) != [0, *ends]:
        return plan
    layers = tuple(tuple(range(*span)) for span in itertools.pairwise((0, *ends)))
    return dataclasses.replace(plan, layers=layers)


def least_possible(plan, problem):
    """What its devices, or one microbatch, take at least: not worth a timeline if that is long."""
    busy = [0.0] * len(plan.submeshes)
    chain, once = 0.0, 0.0
    for s, (layers, mesh) in enumerate(zip(plan.layers, plan.mesh_of, strict=True)):
        data, model = plan.submeshes[mesh].logical_mesh
        shape = Mesh.of(data, model, problem.table.index(model, False))
        costs = problem.costs(shape, _setting(plan, problem), False, None)
        at = 0, layers[0], layers[-1] + 1
        again = recompute_of(plan.remat[s], [(i,) for i in layers], problem.table.selective)
        passes = costs.passes(plan.zero[s], again)
        # Both passes may be one program, and start once.
        whole = passes.forward[at] + passes.backward[at] - problem.cluster.dispatch_overhead
        busy[mesh] += plan.num_micro_batches * whole
        chain += whole - passes.weight[at]
        once = max(once, costs.once(plan.zero[s], again)[at])
    return max(*busy, chain) + once


def _setting(plan, problem):
    count, replicas = plan.num_micro_batches, plan.num_replicas
    return SearchPoint(count, problem.batch_size, replicas, plan.schedule, (), None)


def runs(plan, problem):
    """Whether it is a plan at all, of tasks that are not too many here."""
    if 2 * len(plan.layers) * plan.num_micro_batches > _MOST_TASKS:
        return False
    if any(
        problem.batch_size % (plan.num_micro_batches * m.logical_mesh[0]) for m in plan.submeshes
    ):
        return False
    splits = SCHEDULES[plan.schedule].splits_backward
    try:
        plan.tasks()
    except PlanError:
        return False
    return not (splits and set(plan.remat) != {"none"})


# 34 and 46 were found by trying the best plan under other schedules, and with fewer stages that
# compute again.
SEEDS = 34, 46, *range(34), *range(35, 46), *range(47, 50)


@pytest.mark.slow
@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_by_hand_or_by_chance_is_faster(seed):
    rng = np.random.default_rng(seed)
    whole, joined = middle_problem(rng)
    found = find_plans(joined, Constraints())
    best = min((seconds_of(plan, whole) for plan in found.estimates), default=math.inf)
    plans = list(plans_by_hand(whole))
    rng.shuffle(plans)
    plans = plans[: PLANS // 2]
    for chosen, _ in found.ranked[:1]:
        plans += [changed(whole, chosen, rng) for _ in range(PLANS // 4)]
    plans += [random_plan(whole, rng) for _ in range(PLANS - len(plans))]
    faster = {}
    for plan in plans:
        if runs(plan, whole) and least_possible(plan, whole) < best / 1.01:
            seconds = seconds_of(plan, whole)
            if seconds < best / 1.01:
                faster[plan] = seconds
    assert not faster, (best, min(faster.items(), key=lambda one: one[1]))
