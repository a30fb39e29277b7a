"""Every case, by every method, computes what the serial step computes.

`METHODS` says how: a method, its number of devices and of slices of the batch. A few pairs that
cover most cases and all methods run by default, more are slow, all of them `stress`.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import launcher

sys.path.insert(0, str(Path(__file__).parent))
from cases import serial
from models import MODELS
from steps import STEPS

ROUNDS = 5
CASES = {case.name: case for case in (*MODELS, *STEPS)}
UNIFORM = launcher.UniformStageOption
METHODS = {  # name: (method, devices, slices of the batch)
    "data": (launcher.DataParallel(), 4, 4),
    "data_micro": (launcher.DataParallel(num_micro_batches=3), 2, 6),
    "zero2": (launcher.Zero2Parallel(num_micro_batches=2), 4, 8),
    "zero3": (launcher.Zero3Parallel(num_micro_batches=2), 4, 8),
    "shard": (launcher.ShardParallel(num_micro_batches=2, logical_mesh_shape=(2, 2)), 4, 4),
    "three_d": (
        launcher.ThreeDParallel(data=2, model=2, pipeline=2, num_micro_batches=2),
        8,
        4,
    ),
    "whole": (launcher.PipeshardParallel(stage_option=UNIFORM(4)), 4, 1),
    "stages_4": (launcher.PipeshardParallel(num_micro_batches=3, stage_option=UNIFORM(4)), 4, 3),
    "stages_2x2": (launcher.PipeshardParallel(num_micro_batches=2, stage_option=UNIFORM(2)), 4, 4),
    "remat": (
        launcher.PipeshardParallel(num_micro_batches=2, stage_option=UNIFORM(2), remat="full"),
        2,
        2,
    ),
    "zero_bubble": (
        launcher.PipeshardParallel(
            num_micro_batches=3, stage_option=UNIFORM(2), schedule="zero_bubble"
        ),
        2,
        3,
    ),
    "interleaved": (
        launcher.PipeshardParallel(
            num_micro_batches=2, stage_option=UNIFORM(4), schedule="interleaved_1f1b"
        ),
        2,
        2,
    ),
}
FAST = {
    ("u_net", "three_d"),
    ("sums", "zero3"),
    ("experts", "stages_2x2"),
    ("while", "data"),
    ("checkpoint", "zero_bubble"),
    ("cond", "remat"),
    ("loss_scale", "stages_4"),
    ("augmented", "stages_4"),
    ("two_networks", "interleaved"),
    ("flax", "stages_2x2"),
}
NETWORKS = {case.name for case in MODELS} - {"gpt_tied", "gpt_untied"}


def pairs():
    """Networks by every method, one pair in twenty with CI; steps that do something unusual by
    two, in turn. GPTs are compared by every method elsewhere, too."""
    for k, name in enumerate(CASES):
        turn = {(5 * k + j * 4) % len(METHODS) for j in range(2)}
        for m, method in enumerate(METHODS):
            if name in NETWORKS or m in turn or (name, method) in FAST:
                by_hand = pytest.mark.stress if (k + m) % 20 else pytest.mark.slow
                yield pytest.param(name, method, marks=[] if (name, method) in FAST else [by_hand])


def run(step, state, case):
    history = []
    for k in range(ROUNDS):
        state, metrics = step(state, case.batch(k))
        history.append(jax.device_get(metrics))
    return jax.device_get(state), history


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "method"), list(pairs()))
def test_parity(name, method):
    case, (how, devices, slices) = CASES[name], METHODS[method]
    train = launcher.parallelize(case.step, method=how, devices=jax.devices()[:devices])
    key = jax.random.key(0)
    got = run(train, train.create(case.init, key, like=case.batch(0)), case)
    want = run(serial(case, slices), jax.jit(case.init)(key), case)
    jax.tree.map(lambda a, b: close(a, b), _data(got), _data(want))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * max(1.0, float(np.abs(b).max())))


def _data(tree):
    """Keys as the numbers they are."""

    def of(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(of, tree)
