"""Plans near one that was found: with fewer layers computed again, or other microbatches."""

import dataclasses
import itertools

import numpy as np
import pytest
from exhaustive import seconds_of
from random_problems import random_layers

from launcher.partition.assignment import Assignment, Submesh
from launcher.plan.inter_op.estimate import make_estimate, make_pipeline
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.refine import SearchResult, climbed, fewest_again, no_moves


def four_stages(seed, share):
    """A pipeline that computes all again, and so much of the memory it takes not to."""
    whole = random_layers(np.random.default_rng(seed), 8, hosts=1, each=4, batch=8)
    assignment = Assignment(
        method="auto",
        layers=((0, 1), (2, 3), (4, 5), (6, 7)),
        submeshes=tuple(Submesh((d,), (1, 1)) for d in range(4)),
        mesh_of=(0, 1, 2, 3),
        num_micro_batches=8,
        schedule="1f1b",
        remat=("full",) * 4,
        zero=(0,) * 4,
        sequence=(False,) * 4,
    )
    whole = dataclasses.replace(whole, memory_bytes=np.inf)
    needed = [
        max(stage.memory_bytes for stage in make_pipeline(plan, whole).stages)
        for plan in (assignment, dataclasses.replace(assignment, remat=("none",) * 4))
    ]
    memory = needed[0] + share * (needed[1] - needed[0])
    return assignment, dataclasses.replace(whole, memory_bytes=memory)


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
