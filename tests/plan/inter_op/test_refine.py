"""Plans near one that was found: with fewer layers computed again, or other microbatches."""

import dataclasses
import itertools

import numpy as np
import pytest
from exhaustive import seconds_of
from random_problems import equal_stages, in_order, random_layers

from launcher.partition.stages import group_layers
from launcher.plan.inter_op.estimate import make_estimate, make_pipeline
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.refine import SearchResult, climbed, fewest_again, no_moves
from launcher.plan.inter_op.search import find_plans


def four_stages(seed, share):
    """A pipeline that computes all again, and so much of the memory it takes not to."""
    whole = random_layers(np.random.default_rng(seed), 8, hosts=1, each=4, batch=8)
    given = {"num_micro_batches": 8, "remat": ("full",) * 4, "sequence": (False,) * 4}
    assignment = equal_stages(in_order([(1, 1)] * 4), 8, **given)
    whole = dataclasses.replace(whole, memory_bytes=np.inf)
    needed = [
        max(stage.memory_bytes for stage in make_pipeline(plan, whole).stages)
        for plan in (assignment, dataclasses.replace(assignment, remat=("none",) * 4))
    ]
    memory = needed[0] + share * (needed[1] - needed[0])
    return assignment, dataclasses.replace(whole, memory_bytes=memory)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_as_little_is_computed_again_as_fits(seed, share):
    assignment, problem = four_stages(seed, share)
    assert problem.table.selective == (seed == 5)
    found = fewest_again(assignment, problem)
    some = ("selective", "full:1+selective") if problem.table.selective else ()
    words = "none", "full:1", "full", *some
    every = (dataclasses.replace(assignment, remat=of) for of in itertools.product(words, repeat=4))
    assert seconds_of(found, problem) == min(seconds_of(one, problem) for one in every)
    if share == 1.0:
        assert set(found.remat) == {"none"}


def test_nothing_fits_where_computing_all_again_does_not():
    assignment, problem = four_stages(0, share=0.0)
    less = dataclasses.replace(problem, memory_bytes=0.99 * problem.memory_bytes)
    assert fewest_again(assignment, less) is None


def test_stages_on_one_submesh_share_its_memory():
    assignment, problem = four_stages(0, share=0.6)
    layers = tuple((i,) for i in range(8))
    assignment = dataclasses.replace(
        assignment,
        layers=layers,
        mesh_of=(0, 1, 2, 3) * 2,
        schedule="interleaved_1f1b",
        remat=("full",) * 8,
        zero=(0,) * 8,
        sequence=(False,) * 8,
    )
    found = fewest_again(assignment, problem)
    assert seconds_of(found, problem) < np.inf
    for s, word in enumerate(found.remat):
        if word == "full":
            other = (*found.remat[:s], "none", *found.remat[s + 1 :])
            assert seconds_of(dataclasses.replace(found, remat=other), problem) == np.inf


def test_what_a_machine_shared_with_idle_devices_takes_is_left_to_the_timeline():
    """Its tasks are faster than what each takes with all devices at work."""
    assignment, problem = four_stages(0, share=1.0)
    cluster = dataclasses.replace(
        problem.cluster, devices_per_host=8, effective_parallelism=1.0, dispatch_overhead=0.0
    )
    shared = dataclasses.replace(problem, cluster=cluster)
    estimate = make_estimate(assignment, shared)
    less, faster = climbed(assignment, estimate, shared, no_moves, [assignment], True)
    assert set(less.remat) == {"none"}
    assert faster.predicted_step_seconds < estimate.predicted_step_seconds


def test_microbatches_are_counted_up_and_down_from_the_best_plan():
    assignment, problem = four_stages(0, share=1.0)
    problem = dataclasses.replace(problem, memory_bytes=np.inf)
    found = SearchResult(problem, Constraints())
    found.add(dataclasses.replace(assignment, num_micro_batches=1))
    found.recount()
    least = min(
        seconds_of(dataclasses.replace(assignment, num_micro_batches=n), problem)
        for n in (1, 2, 4, 8)
    )
    assert found.best == least
    assert found.tasks == 2 * 4  # those of the first only: the bound's proof loses none


def problems(seed):
    """Six layers on two devices, and the same as three pairs."""
    whole = random_layers(np.random.default_rng(seed), 6, hosts=1, each=2, batch=8)
    whole = dataclasses.replace(whole, memory_bytes=np.inf)
    groups = group_layers([1.0] * 6, 3)
    joined = dataclasses.replace(whole, table=whole.table.grouped(groups), groups=groups)
    return whole, joined


def test_stages_end_between_joined_layers_where_that_is_faster():
    two = Constraints(num_stages=2, schedule="1f1b", remat="none", num_micro_batches=8)
    odd = 0
    for seed in range(8):
        whole, joined = problems(seed)
        coarse = find_plans(joined, two)
        fine = find_plans(dataclasses.replace(joined, unjoined=whole.table), two)
        (best, estimate) = fine.ranked[0]
        assert fine.best <= coarse.best
        assert fine.least_seconds <= fine.best
        assert seconds_of(best, whole) == pytest.approx(estimate.predicted_step_seconds)
        cut = len(best.layers[0])
        odd += cut % 2
        for other in {cut - 1, cut + 1} & set(range(1, 6)):  # no further move of one layer helps
            ends = tuple(range(other)), tuple(range(other, 6))
            again = seconds_of(dataclasses.replace(best, layers=ends), whole)
            assert again >= 0.999 * fine.best
    assert odd  # some are moved
