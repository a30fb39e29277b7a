"""Several real processes run one plan and compute what one device does."""

import json

import jax
import launch
import numpy as np
import pytest
from trainings import serial

ONE_F_ONE_B = {"method": "manual", "num_micro_batches": 3, "schedule": "1f1b"}
# A submesh of one device, and one of three that lies in both processes.
UNEQUAL = {
    "forward_stage_layer_ids": [[0, 1], [2, 3]],
    "submesh_shapes": [[1, 1], [1, 3]],
}
GPIPE = {**ONE_F_ONE_B, "schedule": "gpipe"}


def together(count, devices, settings):
    given, timeout = json.dumps(settings), 200 + 50 * len(settings)
    told = launch.together("peer.py", count, devices, given=given, timeout=timeout)
    return [json.loads(each) for each in told]


def check(settings, told):
    """Every process that knows the losses has those of one device."""
    for each in settings:
        _, losses = serial(each.get("training", "tiny"))
        known = [peer[json.dumps(each)]["losses"] for peer in told]
        assert any(known), each
        for found in filter(None, known):
            np.testing.assert_allclose(found, losses, rtol=1e-5, err_msg=str(each))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("count", "devices", "settings"),
    [
        (
            *(2, 2),
            [
                {**ONE_F_ONE_B, "stages": 4},
                {"method": "zero3", "num_micro_batches": 3},  # a stage over both processes
                UNEQUAL,
                {"training": "gan", "method": "manual", "num_micro_batches": 2, "stages": 2},
            ],
        ),
        (
            *(2, 2),
            [
                {**GPIPE, "stages": 2},  # a stage a process, two replicas each
                # Many small tasks: a process must not run ahead of the other without bound.
                {**ONE_F_ONE_B, "stages": 2, "num_micro_batches": 12},
                {**ONE_F_ONE_B, "stages": 4, "schedule": "zero_bubble"},
                {"method": "data", "num_micro_batches": 1},
                {"method": "zero2", "num_micro_batches": 3},
                {"method": "shard", "logical_mesh_shape": [2, 2]},
                {"method": "three_d", "data": 1, "model": 2, "pipeline": 2},
                {"training": "gan", "method": "zero3", "num_micro_batches": 2},
            ],
        ),
        (3, 1, [{**GPIPE, "stages": 3}]),
        (4, 1, [{**ONE_F_ONE_B, "stages": 4}]),
    ],
)
def test_processes_together_equal_one_device(count, devices, settings):
    total = sum(x.size for x in jax.tree.leaves(serial("tiny")[0]))
    told = together(count, devices, settings)
    check(settings, told)
    for each in settings:
        answers = [peer[json.dumps(each)] for peer in told]
        # Here no process holds the whole state.
        if each.get("stages", 1) >= count and "training" not in each:
            assert all(a["elements_here"] < total for a in answers)
            assert sum(a["elements_here"] for a in answers) == total
