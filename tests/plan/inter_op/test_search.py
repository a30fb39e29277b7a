"""The search finds what simulating every plan of its space finds, and proves how near it is."""

import dataclasses
import itertools

import numpy as np
import pytest
from exhaustive import least_seconds, seconds_of
from random_problems import middle_problem, random_layers, random_problem

from launcher.partition.layout import DATA, MODEL
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.interleaved import interleaved_plans
from launcher.plan.inter_op.problem import Constraints, candidate_of, price, settings
from launcher.plan.inter_op.search import _crossings, _on_one_host, _round_trips, find_plans
from launcher.plan.inter_op.stage_construction import (
    BestStages,
    StageTables,
    objective,
    stages_by_objective,
)
from launcher.plan.inter_op.submeshes import Mesh, submesh_sizes

SCHEDULES = "1f1b", "eager_1f1b", "zero_bubble"


def small_problem(seed, most):
    """A problem of at most so many pairs of layers and devices, and what is fixed."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    while len(problem.groups) * problem.cluster.num_devices > most:
        problem = random_problem(rng)
    return problem, Constraints(int(rng.choice([1, 2])) if rng.random() < 0.3 else None)


def every_plan(problem, wanted):
    """Yield every plan whose stages have submeshes of their own, with its bound and setting."""
    devices = problem.cluster.num_devices
    wide = dataclasses.replace(problem, sizes=tuple(range(1, devices + 1)))
    for schedule in SCHEDULES:
        for setting in settings(problem, wanted, schedule):
            priced = price(wide, setting, None, beaten=True)
            for stages in choices_of_stages(priced.tables, devices):
                at = [(len(stages) - 1 - s, *stage) for s, stage in enumerate(stages)]
                costs = priced.tables.seconds, priced.tables.rest
                bound = objective(*([float(of[i]) for i in at] for of in costs))
                one = candidate_of(BestStages(stages, bound), priced, setting, problem)
                yield bound, one.assignment, setting


def choices_of_stages(tables: StageTables, devices):
    """Yield all stages that cover the layers and fit."""
    if not tables.sizes:
        return
    depth, layers = tables.seconds.shape[:2]

    def before(end, left, stages):
        if end == 0:
            yield stages
        elif len(stages) < depth:
            fits = np.isfinite(tables.seconds[len(stages), :end, end])
            for first, j in np.argwhere(fits).tolist():
                if tables.sizes[j] <= left:
                    yield from before(first, left - tables.sizes[j], ((first, end, j), *stages))

    yield from before(layers, devices, ())


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(200))
def test_the_best_plan_is_that_of_brute_force_and_the_bound_is_tight(seed):
    problem, wanted = small_problem(seed, most=10)
    found = find_plans(problem, wanted)
    least = np.inf
    for bound, assignment, _ in sorted(every_plan(problem, wanted), key=lambda one: one[0]):
        if bound >= least:
            break
        least = min(least, seconds_of(assignment, problem))
    for setting in settings(problem, wanted, "interleaved_1f1b"):
        plans = interleaved_plans(problem, wanted, setting, np.inf)
        least = min([least, *(seconds_of(assignment, problem) for _, assignment in plans)])
    # It may be better: even cuts of interleaved pipelines and more counts are not enumerated here.
    assert found.best <= least * (1 + 1e-3)
    least = min(least, found.best)
    if np.isfinite(least):
        assert 0.99 * least <= found.least_seconds <= least * (1 + 1e-9)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    "remat", ["none", "full", "selective", "full/2", "full:2", "dots_saveable"]
)
def test_an_open_schedule_is_searched_with_any_policy_that_is_fixed(remat, hosts):
    problem = random_layers(np.random.default_rng(1), 4, hosts, each=2, batch=8)
    problem = dataclasses.replace(problem, memory_bytes=np.inf)
    found = find_plans(problem, Constraints(remat=remat))
    assert found.least_seconds <= found.best < np.inf
    assert {word for plan in found.estimates for word in plan.remat} == {remat}
    assert remat == "none" or "zero_bubble" not in {plan.schedule for plan in found.estimates}


def solved(seed):
    """4 to 8 layers on up to 8 devices, links and memory at random; and what the search finds."""
    problem = middle_problem(np.random.default_rng(seed), (4, 8), most_devices=8)
    return problem, find_plans(problem, Constraints())


@pytest.mark.sampled(100)
@pytest.mark.parametrize("seed", range(200))
def test_no_plan_is_below_the_bound_nor_faster_than_the_one_found(seed):
    """Of all divisors of the batch and all schedules; by 1 %."""
    problem, found = solved(seed)
    if np.isinf(found.best):
        assert least_seconds(problem, np.inf) == (np.inf, None)
        return
    assert found.best <= found.least_seconds / 0.99
    limit = max(found.least_seconds * (1 - 1e-9), 0.99 * found.best)
    assert least_seconds(problem, limit) == (limit, None)


def test_gpipe_is_tried_on_the_best_plan():
    """Behind slow links one that holds all microbatches may be the fastest."""
    problem, found = solved(108)
    best, estimate = found.ranked[0]
    assert best.schedule == "gpipe"
    eager = make_estimate(dataclasses.replace(best, schedule="eager_1f1b"), problem)
    assert estimate.predicted_step_seconds < 0.99 * eager.predicted_step_seconds


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("hosts", "each", "seed"), [(2, 7, 1), (2, 7, 3), (2, 5, 3), (2, 3, 0)])
def test_hosts_of_few_divisors_are_left_partly_idle(hosts, each, seed):
    """Whole hosts cannot share the batch, nor can the divisors of their number of devices."""
    batch = 64 if each == 7 else 16
    problem = random_layers(np.random.default_rng(seed), 5, hosts, each, batch)
    found = find_plans(problem, Constraints())
    limit = max(found.least_seconds * (1 - 1e-9), 0.99 * found.best)
    assert least_seconds(problem, limit) == (limit, None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("hosts", "each", "fewer"), [(5, 7, 4), (2, 7, 4), (3, 6, 4)])
def test_more_devices_on_each_host_are_no_slower(hosts, each, fewer, seed):
    problem = random_layers(np.random.default_rng(seed), 5, hosts, each, batch=64)
    cluster = dataclasses.replace(problem.cluster, devices_per_host=fewer)
    sizes = submesh_sizes(cluster, problem.batch_size)
    few = find_plans(dataclasses.replace(problem, cluster=cluster, sizes=sizes), Constraints())
    found = find_plans(problem, Constraints())
    assert found.best <= few.best * (1 + 1e-3)
    assert found.least_seconds <= few.best


def test_a_host_alone_has_all_sizes_of_its_own():
    """Of whose devices there are more than one host has in the cluster."""
    problem = random_layers(np.random.default_rng(0), 3, hosts=2, each=7, batch=60)
    assert _on_one_host(problem).sizes == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_faster_than_its_bound(seed):
    problem, wanted = small_problem(seed, most=12)
    plans = list(itertools.islice(every_plan(problem, wanted), 0, None, 7))
    for bound, assignment, setting in plans[:200]:
        if assignment.num_replicas == setting.replicas:  # else another setting has it, too
            seconds = make_estimate(assignment, problem).predicted_step_seconds
            assert bound <= seconds * (1 + 1e-9), assignment


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_faster_than_its_bound_where_links_between_hosts_are_slow(seed):
    """Which the activations and the gradients of stages that share a host go over."""
    rng = np.random.default_rng(seed)
    problem = middle_problem(rng, (4, 6), most_devices=6)
    cluster = dataclasses.replace(problem.cluster, hosts=3, devices_per_host=2)
    slow = dataclasses.replace(cluster, inter_host=cluster.inter_host / 10 ** rng.uniform(0, 2))
    problem = dataclasses.replace(
        problem,
        cluster=slow,
        sizes=submesh_sizes(slow, problem.batch_size),
        memory_bytes=np.inf,
        unjoined=None,
    )
    for schedule in SCHEDULES:
        for setting in list(settings(problem, Constraints(), schedule))[::3]:
            if setting.replicas > 1 or setting.num_micro_batches > 32:
                continue
            priced = price(problem, setting, None, beaten=True)
            found = stages_by_objective(
                priced.tables,
                6,
                lambda: np.inf,
                300,
                crossings=_crossings(problem, setting),
                round_trips=_round_trips(problem, setting),
            )
            for bound, one in itertools.islice(found, 0, None, 5):
                if one is None:
                    continue
                assignment = candidate_of(one, priced, setting, problem).assignment
                if assignment.num_replicas == setting.replicas:
                    seconds = make_estimate(assignment, problem).predicted_step_seconds
                    assert bound <= seconds * (1 + 1e-9), assignment


def test_a_bound_counts_the_round_trips_that_only_follow_one_another():
    """1F1B holds two microbatches in the last but one stage, which wait for slow links."""
    problem = random_layers(np.random.default_rng(0), 3, hosts=1, each=3, batch=48)
    slow = dataclasses.replace(problem.cluster, intra_host=20.0, latency=0.01)
    problem = dataclasses.replace(problem, cluster=slow, memory_bytes=np.inf)
    setting = next(settings(problem, Constraints(48), "1f1b"))
    priced = price(problem, setting, None, beaten=True)

    def best(round_trips):
        way = priced.tables, 3, lambda: np.inf, 300, 3
        return next(stages_by_objective(*way, round_trips=round_trips))

    (without, _), (bound, one) = best([]), best(_round_trips(problem, setting))
    assignment = candidate_of(one, priced, setting, problem).assignment
    seconds = make_estimate(assignment, problem).predicted_step_seconds
    assert 1.2 * without < bound <= seconds < 1.05 * bound


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_no_interleaved_plan_is_faster_than_its_bound(seed):
    problem, wanted = small_problem(1000 + seed, most=40)
    problem = dataclasses.replace(problem, memory_bytes=np.inf)
    checked = 0
    for setting in settings(problem, wanted, "interleaved_1f1b"):
        for bound, assignment in interleaved_plans(problem, wanted, setting, np.inf)[:20]:
            assert len(assignment.layers) > len(assignment.submeshes) > 1
            if assignment.num_replicas == setting.replicas:
                checked += 1
                seconds = make_estimate(assignment, problem).predicted_step_seconds
                assert bound <= seconds * (1 + 1e-9), assignment
    layers, devices = len(problem.groups), problem.cluster.num_devices
    assert checked or layers != 4 or devices == 1


@pytest.mark.parametrize("remat", [None, "full:1"])
def test_no_interleaved_plan_of_eight_layers_is_faster_than_its_bound(remat):
    """Its last stage may run both passes as one program; of others one layer may run again."""
    whole = random_layers(np.random.default_rng(2), 8, hosts=1, each=4, batch=8)
    problem, wanted = dataclasses.replace(whole, memory_bytes=np.inf), Constraints(remat=remat)
    checked = 0
    for setting in settings(problem, wanted, "interleaved_1f1b"):
        for bound, assignment in interleaved_plans(problem, wanted, setting, np.inf)[:20]:
            if assignment.num_replicas == setting.replicas:
                checked += 1
                assert bound <= seconds_of(assignment, problem) * (1 + 1e-9), assignment
    assert checked


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(60))
def test_stages_come_by_their_objective_and_none_is_left_out(seed):
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    sizes = tuple(rng.integers(1, devices + 1, rng.integers(1, 4)).tolist())
    shape = (min(layers, devices), layers, layers + 1, len(sizes))
    first, end = np.indices(shape[1:3])
    seconds = rng.integers(1, 20, shape) / 4
    seconds[:, end <= first] = np.inf
    seconds[rng.random(shape) < 0.2] = np.inf
    tables = StageTables(sizes, seconds, np.where(np.isinf(seconds), np.inf, 3 * seconds))
    num_stages = int(rng.integers(1, 4)) if rng.random() < 0.3 else None
    *found, last = stages_by_objective(tables, devices, lambda: np.inf, 10**6, num_stages)
    assert last == (np.inf, None)
    assert [value for value, _ in found] == sorted(one.objective for _, one in found)
    want = list(choices_of_stages(tables, devices))
    assert sorted(one.stages for _, one in found) == sorted(
        stages for stages in want if num_stages in (None, len(stages))
    )
    for value, one in found:
        at = [(len(one.stages) - 1 - s, *stage) for s, stage in enumerate(one.stages)]
        rest = tables.rest
        assert value == pytest.approx(objective([seconds[i] for i in at], [rest[i] for i in at]))


def test_an_enumeration_that_gives_up_says_what_is_left():
    seconds = np.full((3, 3, 4, 1), np.inf)
    for first, end in itertools.combinations(range(4), 2):
        seconds[:, first, end] = end - first
    tables = StageTables((1,), seconds, np.zeros_like(seconds))
    *found, (left, none) = stages_by_objective(tables, 3, lambda: np.inf, 3)
    assert none is None
    assert len(found) < 4
    assert left == 3.0


def with_experts(cls, data, model, row):
    return cls((("expert", 1), (DATA, data), (MODEL, model)), row)


@pytest.mark.parametrize("seed", range(3))
def test_an_axis_of_one_device_changes_no_plan(seed, monkeypatch):
    problem = random_layers(np.random.default_rng(seed), 5, hosts=1 + seed % 2, each=4, batch=8)
    known = find_plans(problem, Constraints())
    monkeypatch.setattr(Mesh, "of", classmethod(with_experts))
    assert Mesh.of(2, 2, 0).devices == 4
    found = find_plans(
        random_layers(np.random.default_rng(seed), 5, hosts=1 + seed % 2, each=4, batch=8),
        Constraints(),
    )
    assert found.estimates == known.estimates
    assert found.least_seconds == known.least_seconds
