"""Logical meshes have named axes: one of a single device more leaves every plan as it is."""

import numpy as np
import pytest
from random_problems import random_layers

from launcher.partition.layout import DATA, MODEL
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.search import find_plans
from launcher.plan.inter_op.submeshes import Mesh


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
