"""Reasons why a runner-up is slower than the best plan."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from random_problems import equal_stages, in_order, random_layers

from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.explain import reason
from launcher.plan.pipeline import link_seconds


def estimate_of(inter_host, ends, sizes, count=4):
    """Stages that end at these layers of four, in order on the devices of two hosts of two."""
    problem = random_layers(np.random.default_rng(2), 4, hosts=2, each=2, batch=16)
    rates = {"inter_host": inter_host, "intra_host": 1e4, "memory_bandwidth": 1e6, "latency": 1e-4}
    cluster = dataclasses.replace(problem.cluster, **rates)
    problem = dataclasses.replace(problem, cluster=cluster, memory_bytes=np.inf)
    layers = tuple(tuple(range(*span)) for span in itertools.pairwise((0, *ends)))
    submeshes = in_order([(size, 1) for size in sizes])
    plan = equal_stages(submeshes, 4, layers=layers, num_micro_batches=count)
    return make_estimate(plan, problem)


ALONE = (4,), (2,)  # one stage on one host
BOTH = (2, 4), (2, 2)  # a stage on each


def test_the_busiest_link_is_the_reason_where_it_is_busier_than_the_devices():
    plan, best = estimate_of(15, *BOTH, 8), estimate_of(15, *ALONE)
    busiest, other = (max(link_seconds(p).values()) for p in (plan, best))
    assert busiest > plan.busy_seconds
    assert reason(plan, best) == f"its busiest link takes {busiest:.3g} s a step, not {other:.3g}"


def test_a_link_that_devices_hide_is_not_the_reason():
    plan, best = estimate_of(1e3, (1, 4), (2, 2)), estimate_of(1e3, *BOTH)
    assert 0 < max(link_seconds(plan).values()) < plan.busy_seconds
    assert "link" not in reason(plan, best)


@pytest.mark.parametrize(
    ("plan", "best", "words"),
    [
        ((*ALONE, 4), (*BOTH, 4), "its busiest devices work "),
        ((*BOTH, 1), (*BOTH, 4), "its devices wait "),
        ((*BOTH, 4), (*BOTH, 4), "it is as good within the model's precision"),
    ],
)
def test_what_costs_most_time_is_said(plan, best, words):
    assert re.match(words, reason(*(estimate_of(1e3, *of) for of in (plan, best))))
