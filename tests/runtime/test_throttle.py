"""A process may run ahead of its devices and of the other processes, and never hangs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_processes import together
from tiny import serial

import launcher
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel
from launcher.runtime import compile_step
from launcher.trace import trace_step

STEPS = 30
MANY = {"num_micro_batches": 12, "schedule": "1f1b", "stages": 2}
PLANS = [
    {"method": "manual", **MANY},  # a stage a process, two replicas each
    {"method": "data", "num_micro_batches": 6},  # a stage over both processes
    {"method": "manual", **MANY, "stages": 4},  # a stage a device
]


def test_many_programs_over_several_devices_of_one_process():
    """More, and longer ones, than the client lets its devices have in flight: unthrottled, the
    process would hang."""

    def busy(weight, x):
        def loss(weight, x):
            for _ in range(20):
                x = jnp.tanh(x @ weight)
            return (x**2).mean()

        value, gradient = launcher.value_and_grad(loss)(weight, x)
        return weight - gradient, value

    weight, x = np.eye(128, dtype=np.float32), np.ones((512, 128), np.float32)
    traced = trace_step(busy, (weight, x))
    plan = DataParallel(4).plan(traced, local_shape(8, 1, "cpu"))
    executable = compile_step(traced, plan, jax.devices())
    state = jax.device_put(weight, executable.in_shardings[0])
    for _ in range(20):
        state, value = executable(state, x)
    assert np.isfinite(float(value))


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", ["pull", "collective"])
@pytest.mark.parametrize("devices", [2, 1])
def test_processes_run_ahead_of_one_another(devices, transport):
    settings = [{**each, "transport": transport, "ahead": STEPS} for each in PLANS[: 1 + devices]]
    told, expected = together(2, devices, settings), serial(STEPS)[1][-1]
    for each in settings:
        known = [losses for peer in told for losses in peer[json.dumps(each)]["losses"]]
        assert known
        np.testing.assert_allclose(known, expected, rtol=1e-4)
