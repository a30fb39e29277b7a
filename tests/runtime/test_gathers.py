"""Parameters that are sharded along data are cast before they are gathered, to the same bits.

XLA:CPU, which computes bf16 in 32 bits, gathers them in 32 again; `gpu_compile` counts the bytes.
"""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from filled import filled_params
from trainings import RECIPES, ROWS, first_state, run, update

from launcher.partition import gathered, gathering_less
from launcher.plan import local_shape
from launcher.plan.methods import Zero3Parallel
from launcher.recipes import build_model
from launcher.runtime import compile_step
from launcher.runtime.programs import stage_programs
from launcher.trace import trace_step

DEVICES = 4
MODELS = {
    "tied": RECIPES["gpt_tied"],
    "untied": RECIPES["gpt_short"],
    "scanned": dataclasses.replace(RECIPES["gpt_short"], scan_layers=True),
    "pieces": dataclasses.replace(RECIPES["gpt_tied"], scan_layers=True),
}


@functools.cache
def training(name):
    options = MODELS[name]
    model = build_model(options, "bf16")

    def step(state, batch):
        return update(state, lambda p: model.loss(p, batch, None)[0])

    size = 3, ROWS, options.sequence_length + 1
    texts = np.random.default_rng(0).integers(0, options.vocab_size, size).astype(np.int32)
    batches = [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in texts]
    return step, lambda key: first_state(filled_params(model, std=0.02)), batches


def compiled(name, **how):
    step, init, batches = training(name)
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), batches[0]))
    plan = Zero3Parallel(**how).plan(traced, local_shape(DEVICES, 1, "cpu"))
    return compile_step(traced, plan, jax.devices())


def states(executable, name):
    _, init, batches = training(name)
    return run(executable, executable.create(init, jax.random.key(0)), batches)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("untied", {"num_micro_batches": 2}),
        ("tied", {"num_micro_batches": 2, "remat": "full"}),
        ("scanned", {"num_micro_batches": 1}),
        ("pieces", {"num_micro_batches": 2, "remat": "full"}),
    ],
)
def test_casting_before_a_gather_changes_no_bit(name, how, monkeypatch):
    taken = []

    def noted(program, layout):
        narrow = gathering_less(program, layout)
        taken.extend(v.aval for v in gathered(narrow, layout).values())
        return narrow

    monkeypatch.setattr(stage_programs, "gathering_less", noted)
    has = states(compiled(name, **how), name)
    sizes = collections.Counter()
    for aval in taken:
        sizes[aval.dtype.name] += aval.size
    assert sizes["bfloat16"] > 5 * sizes["float32"]  # which are the norms' alone
    monkeypatch.setattr(stage_programs, "gathering_less", lambda program, layout: program)
    had = states(compiled(name, **how), name)
    jax.tree.map(np.testing.assert_array_equal, had, has)
