"""Every method computes, with every model, what plain `jax.jit` computes on one device.

A few pairs that cover all kinds of methods run by default, a few with a language model are slow,
all of them `stress`.
"""

import itertools
import sys
from pathlib import Path

import jax
import pytest

import launcher
from launcher.plan import local_shape
from launcher.runtime import compile_step
from launcher.trace import trace_step

sys.path.insert(0, str(Path(__file__).parent))
import cases
import models
from plans import METHODS, by_name
from trainings import assert_same, run, serial, training

UNTIED = "shard 2x2, 2", "3d", "2+4, zero3", "1+3"  # it differs at both ends only
SLOW = {
    ("gpt_tied", "3d, zero bubble"),
    ("gpt_untied", "2+4, zero3"),
    ("mlp", "1+3, whole"),
}
FAST = {
    ("mlp", "data, 2"),
    ("mlp", "zero3, 1"),
    ("mlp", "3d"),
    ("mlp", "1+3"),
    ("mlp", "2+4, zero2"),
    ("mlp", "given"),
    ("mlp", "2+4, zero3"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*pair, marks=[] if pair in FAST else [by_hand])
        for pair in [
            *itertools.product(("mlp", "gpt_tied"), METHODS),
            *itertools.product(("gpt_untied",), UNTIED),
            *itertools.product(("gpt_chunks",), ("3d", "zero3, 1", "2+4, zero3")),
        ]
        for by_hand in [pytest.mark.slow if pair in SLOW else pytest.mark.stress]
    ],
)
def test_parity(name, method):
    step, init, batches = training(name)
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), batches[0]))
    plan = by_name(traced, method, local_shape(METHODS[method][0], 1, "cpu"))
    plan.validate(traced)
    executable = compile_step(traced, plan, jax.devices())
    got = run(executable, executable.create(init, jax.random.key(0)), batches)
    assert_same(got, serial(name))


# The other methods are compared in test_models_parity.
FOUR_LAYERS = {"conv", "experts", "scan"}
UNEQUAL = "1+3", "2+4", "2+4, zero3"


@pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(case, method, id=f"{case.name}-{method}", marks=each)
        for k, case in enumerate(c for c in models.MODELS if c.name in FOUR_LAYERS)
        for m, method in enumerate(UNEQUAL)
        for each in [pytest.mark.slow if (k, m) in ((0, 0), (1, 2)) else pytest.mark.stress]
    ],
)
def test_parity_of_other_networks(case, method):
    """With batch statistics, experts, loops and long skips; slice by slice, as the plan cuts."""
    batches = [case.batch(k) for k in range(5)]
    key = jax.random.key(0)
    traced = trace_step(case.step, (jax.eval_shape(case.init, key), batches[0]))
    plan = by_name(traced, method, local_shape(METHODS[method][0], 1, "cpu"))
    executable = compile_step(traced, plan, jax.devices())
    want = cases.serial(case, plan.num_micro_batches * plan.num_replicas)
    got, state = executable.create(case.init, key), case.init(key)
    for batch in batches:
        got, metrics = executable(got, batch)
        state, expected = want(state, batch)
        close(metrics, expected)
    close(got["params"], state["params"])


def close(got, want):
    """A bias before a normalisation has no gradient but rounding, hence the absolute part."""
    launcher.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
