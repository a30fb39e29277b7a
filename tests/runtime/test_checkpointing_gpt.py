"""Checkpointing a GPT's blocks: nothing but their inputs is held, causal masks neither."""

import jax
import numpy as np
import pytest

import launcher
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.gpt import model as gpt

BLOCKS, ROWS, LENGTH, WIDTH = 8, 8, 128, 64
TOKENS = np.zeros((ROWS, LENGTH), np.int32)
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def compiled(remat, blocks=BLOCKS):
    """Bytes that the passes of one stage need, with what is left between them; and as predicted."""
    options = GPTOptions(
        size=None,
        num_layers=blocks,
        num_heads=4,
        hidden_size=WIDTH,
        vocab_size=64,
        sequence_length=LENGTH,
    ).filled()
    model = gpt.build(options, "fp32")

    def step(params, batch):
        (value, _), grads = launcher.value_and_grad(model.loss, has_aux=True)(params, batch, None)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    method = launcher.DataParallel(remat=remat)
    run = launcher.parallelize(step, method=method, devices=jax.devices()[:1], donate_argnums=())
    executable = run.executable(params, BATCH)
    gradients = sum(w.nbytes for w in jax.tree.leaves(params))
    said = [
        one.memory_analysis()
        for name, one in executable._compiled.items()
        if name.startswith("stage")
    ]
    between = sum(one.output_size_in_bytes for one in said) - gradients
    needed = between + max(one.temp_size_in_bytes for one in said)
    predicted = executable.plan.stages[0].memory_bytes - 2 * gradients - 2 * TOKENS.nbytes
    return needed, predicted


@pytest.mark.slow
def test_a_stage_holds_the_inputs_of_its_blocks_and_one_block():
    inputs = (BLOCKS - 1) * ROWS * LENGTH * WIDTH * 4
    one, _ = compiled("none", blocks=1)
    full, said_full = compiled("full")
    selective, said_selective = compiled("selective")
    none, said_none = compiled("none")
    assert full == pytest.approx(inputs + one, rel=0.1)
    assert full < selective < none
    assert said_full == pytest.approx(full, rel=0.1)
    assert said_selective == pytest.approx(selective, rel=0.1)
    assert said_none == pytest.approx(none, rel=0.1)
