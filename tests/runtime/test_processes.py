"""Several real processes run one plan and compute what one device does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from tiny import BATCHES, init, step  # noqa: E402

ONE_F_ONE_B = {"method": "manual", "num_micro_batches": 3, "schedule": "1f1b"}
# A submesh of one device, and one of three that lies in both processes.
UNEQUAL = {
    "forward_stage_layer_ids": [[0, 1], [2, 3]],
    "submesh_shapes": [[1, 1], [1, 3]],
}
GPIPE = {**ONE_F_ONE_B, "schedule": "gpipe"}


def serial():
    state, losses = jax.jit(init)(jax.random.key(0)), []
    for batch in BATCHES:
        state, loss = jax.jit(step)(state, batch)
        losses.append(float(loss))
    return losses, sum(x.size for x in jax.tree.leaves(state))


def together(count, devices, settings):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    peers = [
        subprocess.Popen(
            [sys.executable, HERE / "peer.py", str(i), str(count), coordinator, str(devices)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for i in range(count)
    ]
    try:
        for peer in peers:
            peer.stdin.write(json.dumps(settings))
            peer.stdin.close()
            peer.stdin = None
        told = [peer.communicate(timeout=300) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
    for peer, (_, errors) in zip(peers, told, strict=True):
        assert peer.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


@pytest.mark.parametrize(
    ("count", "devices", "settings"),
    [
        (
            2,
            2,
            [
                {**ONE_F_ONE_B, "num_stages": 4},
                {**GPIPE, "num_stages": 2},  # a stage a process, two replicas each
                # Many small tasks: a process must not run ahead of the other without bound.
                {**ONE_F_ONE_B, "num_stages": 2, "num_micro_batches": 12},
                {**ONE_F_ONE_B, "num_stages": 4, "schedule": "zero_bubble"},
                {"method": "data", "num_micro_batches": 1},  # a stage over both processes
                {"method": "zero2", "num_micro_batches": 3},
                {"method": "zero3", "num_micro_batches": 3},
                {"method": "shard", "data": 2, "model": 2},
                {"method": "three_d", "data": 1, "model": 2, "pipeline": 2},
                UNEQUAL,
            ],
        ),
        pytest.param(
            3,
            1,
            [{**ONE_F_ONE_B, "num_stages": 3}, {**GPIPE, "num_stages": 3}],
            marks=pytest.mark.slow,
        ),
        pytest.param(4, 1, [{**ONE_F_ONE_B, "num_stages": 4}], marks=pytest.mark.slow),
    ],
)
def test_processes_together_equal_one_device(count, devices, settings):
    losses, total = serial()
    told = together(count, devices, settings)
    for each in settings:
        answers = [peer[json.dumps(each)] for peer in told]
        known = [a["losses"] for a in answers if a["losses"]]
        assert known
        for found in known:
            np.testing.assert_allclose(found, losses, rtol=1e-5)
        if each.get("num_stages", 1) >= count:  # no process holds the whole state
            assert all(a["elements_here"] < total for a in answers)
            assert sum(a["elements_here"] for a in answers) == total
