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
import cases  # noqa: E402
import models  # noqa: E402
from plans import METHODS  # noqa: E402
from trainings import serial  # noqa: E402

ONE_F_ONE_B = {"method": "manual", "num_micro_batches": 3, "schedule": "1f1b"}
# A submesh of one device, and one of three that lies in both processes.
UNEQUAL = {
    "forward_stage_layer_ids": [[0, 1], [2, 3]],
    "submesh_shapes": [[1, 1], [1, 3]],
}
GPIPE = {**ONE_F_ONE_B, "schedule": "gpipe"}


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
        told = [peer.communicate(timeout=200 + 50 * len(settings)) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
    for peer, (_, errors) in zip(peers, told, strict=True):
        assert peer.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def check(settings, told):
    """Every process that knows the losses has those of one device."""
    for each in settings:
        _, losses = serial(each.get("training", "tiny"))
        known = [peer[json.dumps(each)]["losses"] for peer in told]
        assert any(known), each
        for found in filter(None, known):
            np.testing.assert_allclose(found, losses, rtol=1e-5, err_msg=str(each))


@pytest.mark.parametrize(
    ("count", "devices", "settings"),
    [
        pytest.param(
            2,
            2,
            [
                {**ONE_F_ONE_B, "stages": 4},
                {"method": "zero3", "num_micro_batches": 3},  # a stage over both processes
                UNEQUAL,
                {"training": "gan", "method": "manual", "num_micro_batches": 2, "stages": 2},
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            2,
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
            marks=pytest.mark.stress,
        ),
        pytest.param(3, 1, [{**GPIPE, "stages": 3}], marks=pytest.mark.slow),
        pytest.param(
            4,
            1,
            [{**ONE_F_ONE_B, "stages": 4}],
            marks=pytest.mark.stress,
        ),
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


def by_method(model, num_devices):
    return [
        {"training": model, "plan": name} for name, (n, _) in METHODS.items() if n == num_devices
    ]


@pytest.mark.stress
@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        pytest.param(n // 2, by_method(model, n), id=f"{model}, {n}")
        for model in ("tiny", "gpt_tied")
        for n in (2, 4, 6, 8)
    ],
)
def test_every_method_over_two_processes(devices, settings):
    check(settings, together(2, devices, settings))


NETWORKS = "conv", "experts", "scan", "u_net"  # the others are above
KINDS = "shard 2x2, 2", "data, 2", "zero2, 2", "zero3, 2", "3d", "2 stages", "4 stages", "1+3"


@pytest.mark.stress
def test_other_networks_over_two_processes():
    """Batch statistics, experts, loops and long skips, by every kind of method."""
    settings = [
        {"network": name, "plan": plan}
        for i, name in enumerate(NETWORKS)
        for k, plan in enumerate(KINDS)
        if k % 2 == i % 2  # two networks by every kind
    ]
    told = together(2, 4, settings)
    for each in settings:
        answers = [peer[json.dumps(each)] for peer in told]
        case = next(case for case in models.MODELS if case.name == each["network"])
        step = cases.serial(case, answers[0]["slices"])
        state, history = case.init(jax.random.key(0)), []
        for k in range(5):
            state, metrics = step(state, case.batch(k))
            history.append(metrics)
        for name in history[0]:
            found = [answer["metrics"][name] for answer in answers if name in answer["metrics"]]
            assert found, (each, name)
            for values in found:
                want = [metrics[name] for metrics in history]
                np.testing.assert_allclose(values, want, rtol=1e-5, err_msg=f"{each} {name}")


@pytest.mark.stress
@pytest.mark.parametrize(("count", "devices", "first"), [(2, 2, 0), (2, 4, 6), (3, 2, 12)])
def test_plans_at_random_over_several_processes(count, devices, first):
    """A process that waits for ever is a time-out."""
    settings = [{"training": "chain", "seed": seed} for seed in range(first, first + 6)]
    check(settings, together(count, devices, settings))
