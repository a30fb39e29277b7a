"""Outlines of several settings at once are what each stage costs alone, to the last bit."""

import dataclasses

import numpy as np
import pytest
from random_problems import random_problem

from launcher.plan.inter_op.layer_table import FEWEST, OPEN
from launcher.plan.inter_op.problem import (
    Constraints,
    Outlines,
    alike_but_replicas,
    hidden_forwards,
    settings,
)
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.submeshes import Mesh
from launcher.schedule import SCHEDULES


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("seed", range(5))
def test_replicas_change_what_they_change_and_nothing_else(seed, schedule):
    problem = random_problem(np.random.default_rng(seed))
    seen = set()
    for alike in alike_but_replicas(settings(problem, Constraints(schedule=schedule), schedule)):
        assert [one.replicas for one in alike] == sorted({one.replicas for one in alike})
        outlines = Outlines(problem, alike[0])
        for setting in reversed(alike):  # in any order
            known = outlines.of(setting)
            seen.add(setting.replicas)
            device_seconds = np.full(problem.table.spans["work_seconds"][0].shape, np.inf)
            for k, choice in enumerate(known.choices):
                first, rest, work = alone(problem, setting, choice)
                np.testing.assert_array_equal(known.tables.seconds[0, :, :, k], first)
                np.testing.assert_array_equal(known.tables.rest[0, :, :, k], rest)
                device_seconds = np.minimum(device_seconds, work * known.tables.sizes[k])
            np.testing.assert_array_equal(known.device_seconds, device_seconds)
    assert problem.cluster.num_devices == 1 or len(seen) > 1


def alone(problem, setting, choice):
    """Return the seconds of a choice on its mesh alone, infinite where it cannot fit."""
    cluster, (data, model) = problem.cluster, choice.logical_mesh
    count = setting.num_micro_batches
    goes_back = SCHEDULES[setting.schedule].last_stage_alternates(count)
    mesh = Mesh.of(data, model, problem.table.index(model, choice.sequence))
    alone = dataclasses.replace(setting, replicas=None)
    every = StageCosts(problem.table, [mesh], cluster, alone, goes_back)
    costs = StageCosts(problem.table, [mesh], cluster, setting, goes_back)
    hidden = max(hidden_forwards(problem, setting))
    assert choice.remat == FEWEST
    most = setting.memory_bytes or np.inf
    lost = np.where(every.memory(choice.zero, OPEN, [1])[0, 0] <= most, 0.0, np.inf)
    first, rest, work, _ = costs.seconds(choice.zero, OPEN, [hidden])
    return first[0] + lost, rest[0, 0] + lost, work[0] + lost
