"""A plan is climbed from a decision at a time: nothing that fits is a single move better."""

import dataclasses

import numpy as np
import pytest
from exhaustive import seconds_of
from random_problems import random_layers

from launcher.partition.assignment import Assignment, Submesh
from launcher.plan.inter_op.climb import climbed, with_less_again
from launcher.plan.inter_op.estimate import make_estimate, make_pipeline
from launcher.plan.inter_op.problem import Wanted
from launcher.plan.inter_op.search import Found


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


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_as_few_stages_compute_again_as_fit(seed, share):
    assignment, problem = four_stages(seed, share)
    estimate = make_estimate(assignment, problem)
    found, better = climbed(assignment, estimate, problem, with_less_again)
    assert seconds_of(found, problem) == better.predicted_step_seconds < np.inf
    assert better.predicted_step_seconds <= estimate.predicted_step_seconds
    for other in with_less_again(found):
        assert seconds_of(other, problem) >= 0.999 * better.predicted_step_seconds
    if share == 1.0:
        assert better.predicted_step_seconds < estimate.predicted_step_seconds


def test_microbatches_are_counted_up_and_down_from_the_best_plan():
    assignment, problem = four_stages(0, share=1.0)
    problem = dataclasses.replace(problem, memory_bytes=np.inf)
    found = Found(problem)
    found.add(dataclasses.replace(assignment, num_micro_batches=1))
    found.recount(Wanted())
    least = min(
        seconds_of(dataclasses.replace(assignment, num_micro_batches=n), problem)
        for n in (1, 2, 4, 8)
    )
    assert found.best == least
    assert found.tasks == 2 * 4  # those of the first only: the bound's proof loses none
