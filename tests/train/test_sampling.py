"""What a model writes in the middle of a training is what its parameters say, wherever they lie."""

import dataclasses
import sys
import weakref
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from launcher.arrays.stacked_array import StackedArray
from launcher.config.compose import load
from launcher.recipes.models.decoding import Generator, Sampling, build_decoder
from launcher.train import sampling
from launcher.train.sampling import Sample, Sampler

sys.path.insert(0, str(Path(__file__).parent))
from adapted import merge
from checkpoint_peer import Trainee

WORDS = (
    *("model=gpt", "dataset=text", f"dataset.path={__file__}", "model.hidden_size=16"),
    *("model.num_layers=2", "model.num_heads=2", "model.sequence_length=32"),
    *("optimizer.learning_rate=3e-2", "optimizer.lora.rank=2", "cluster.gpus=2"),
)
PLANS = {"two_stages": ["parallel=manual", "parallel.num_stages=2"], "zero3": ["parallel=zero3"]}


@pytest.mark.parametrize("name", ["two_stages", pytest.param("zero3", marks=pytest.mark.stress)])
def test_samples_are_the_text_of_the_gathered_parameters(name):
    worker = Trainee([*WORDS, *PLANS[name]], model=()).worker
    worker.create()
    for step in (1, 2):
        worker.step(step)
    config = worker._config
    greedy = dataclasses.replace(config.generate, temperature=0.0)
    worker._sampler = Sampler(dataclasses.replace(config, generate=greedy), worker._train.plan)
    worker.flush()
    prompts = [list(b"def "), list(b"x")]
    sample = worker.sample(2, prompts, 12)
    params = merge(jax.tree.map(np.asarray, worker._state.params), config.optimizer.lora)
    generator = Generator(build_decoder(config.model, "fp32"), Sampling(0.0))
    rows = np.array(list(generator(params, prompts, 12))).T
    assert (sample.step, sample.tokens) == (2, tuple(map(tuple, rows.tolist())))
    worker.step(3)  # nothing was donated
    assert np.isfinite(worker.flush().metrics["train/loss"])
    worker.close()


def test_one_layer_of_a_model_is_gathered_at_a_time(monkeypatch):
    words = "model.scan_layers=true", "optimizer.lora.rank=0", *PLANS["two_stages"]
    worker = Trainee([*WORDS, *words], model=()).worker
    worker.create()
    params, gathered, alive = worker._state.params, [], []
    everywhere = sampling.everywhere

    def watched(leaf):
        alive.append(sum(ref() is not None for ref in gathered))
        value = np.array(everywhere(leaf))
        gathered.append(weakref.ref(value))
        return value

    monkeypatch.setattr(sampling, "everywhere", watched)
    placed = Sampler(worker._config, worker._train.plan).placed(params)
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, StackedArray))
    stacks = [leaf for leaf in leaves if isinstance(leaf, StackedArray)]
    assert len(gathered) == len(leaves) + sum(len(leaf.rows) - 1 for leaf in stacks)
    assert stacks
    assert max(alive) <= 1
    for one, leaf in zip(jax.tree.leaves(placed), leaves, strict=True):
        np.testing.assert_array_equal(one, leaf)
    assert {d for leaf in jax.tree.leaves(placed) for d in leaf.devices()} == {*jax.devices()[:2]}
    worker.close()


def test_a_decoder_that_fails_is_told_and_not_raised(monkeypatch):
    sampler = Sampler(load([*WORDS, *PLANS["zero3"]]), plan=None)
    broken = Exception(), TypeError("shapes (3,) and (4,)\nand more"), MemoryError()
    for error, problem in zip(
        broken, ("Exception", "TypeError: shapes (3,) and (4,)", "MemoryError"), strict=True
    ):
        monkeypatch.setattr(Sampler, "placed", mock.Mock(side_effect=error))
        assert sampler.sample(3, {}, [[1]], 2) == Sample(3, problem=problem)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(MemoryError):  # the other process would wait for this one
        sampler.sample(3, {}, [[1]], 2)
