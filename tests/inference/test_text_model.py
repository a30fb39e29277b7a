"""`launcher/inference/placed_model.py`: a generating model on its devices."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from launcher.config.compose import load
from launcher.inference import model_workers
from launcher.inference.placed_model import (
    ModelLayout,
    ModelPlaces,
    everywhere,
    layout_of,
    text_generator,
)
from launcher.recipes import build_model
from launcher.trace import CONTRACTIONS, make_jaxpr, walk
from launcher.train.program import build_program

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runtime")]
from launch import together  # noqa: E402

GPT = (
    *("model=gpt", "model.vocab_size=40", "model.num_layers=2", "model.num_heads=2"),
    *("model.hidden_size=8", "model.sequence_length=16"),
)
SHAPES = {"params.w": (6, 8), "params.b": (8,), "params.odd": (3, 5)}


def stage(devices, mesh, **shardings):
    return SimpleNamespace(
        devices=devices,
        logical_mesh=mesh,
        shardings={f"0.params.{name}": spec for name, spec in shardings.items()},
    )


def plan_of(*stages):
    meshes = tuple(dict.fromkeys(one.devices for one in stages))
    return SimpleNamespace(
        stages=stages,
        all_stages=stages,
        all_meshes=meshes,
        num_devices=sum(map(len, meshes)),
        num_replicas=min(one.logical_mesh[0] for one in stages),
    )


def test_a_plan_of_one_mesh_says_where_its_model_lies():
    four = (0, 1, 2, 3)
    shard = plan_of(stage(four, (2, 2), w=(None, "model"), b=("model",)))
    specs = {"params.w": (None, "model"), "params.b": ("model",), "params.odd": (None, None)}
    assert layout_of(shard, SHAPES, 4) == ModelLayout({"model": 2}, specs)
    zero = plan_of(stage(four, (4, 1), w=(None, "data"), b=("data",)))
    assert layout_of(zero, SHAPES, 4).sizes == {"data": 4}
    data = plan_of(stage(four, (4, 1), w=(None, None)))
    assert layout_of(data, SHAPES, 4).num_devices == 1
    assert layout_of(shard, SHAPES, 1).num_devices == 1  # fewer than the plan needs


def test_stages_are_cut_over_the_devices_of_all():
    stages = plan_of(stage((0, 1, 2, 3), (4, 1)), stage((4, 5), (2, 1)))
    layout = layout_of(stages, SHAPES, 8)
    assert list(layout.sizes.values()) == [3, 2]
    assert layout.specs == {
        "params.w": ("part_0", "part_1"),
        "params.b": ("part_1",),
        "params.odd": ("part_0", None),
    }
    assert layout_of(stages, SHAPES, 2).sizes == {"part_0": 2}
    assert layout_of(None, SHAPES, 4).num_devices == 4  # a plan of another version
    assert layout.of_cache((5, 16, 6, 7)) == (None, None, ("part_0", "part_1"), None)
    assert layout.of_cache((6, 16, 1, 7)) == (("part_0", "part_1"), None, None, None)
    assert layout.of_cache((5, 5)) == (None, None)


@pytest.mark.devices
def test_arrays_are_the_same_everywhere():
    values = np.array([-0.0, np.nan, 1e-40, 3.5], np.float32)
    assert everywhere(jax.numpy.asarray(values)).tobytes() == values.tobytes()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["parallel=manual", "parallel.num_stages=2", "cluster.gpus=2"], 0.55),
        (["parallel=zero3", "cluster.gpus=4"], 0.3),
    ],
    ids=["stages", "zero3"],
)
def test_processes_of_a_training_speak_as_one_device_does(words, share):
    prompts = [[1, 2, 3], [7]]
    text = ["dataset=synthetic", "train.eval_every=0", "train.global_batch_size=8"]
    given = {"words": [*words, "cluster.hosts=2"], "model": GPT, "prompts": prompts}
    devices = 1 if "cluster.gpus=2" in words else 2
    told = [
        json.loads(answer)
        for answer in together(HERE / "text_peer.py", 2, devices, given=json.dumps(given))
    ]
    config = load([*GPT, *text, "cluster=emulated", "cluster.gpus=1"])
    program = build_program(config)
    params = jax.jit(program.init)(program.seed).params
    greedy = dataclasses.replace(config.generate, temperature=0.0)
    places = ModelPlaces(ModelLayout({}, {}), jax.devices())
    generate = text_generator(dataclasses.replace(config, generate=greedy), places)
    wanted = [row.tolist() for row in generate(params, prompts, 8)]
    assert [tokens for tokens, _ in told] == [wanted] * 2
    assert all(of_device <= share for _, of_device in told)


def test_a_finished_model_has_the_attention_and_the_products_of_its_gpu(monkeypatch):
    """One without bfloat16 refuses the products of attention, whose algorithm has a name."""
    places = ModelPlaces(ModelLayout({}, {}), jax.devices())
    assert places.compute_capability is None
    config = load([*GPT, "dataset=synthetic", "train.precision=bf16"])
    model = build_model(config.model, "bf16")
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = {name: np.zeros((2, 16), np.int32) for name in ("tokens", "targets")}
    row, text, evaluated = np.zeros(2, np.int32), np.zeros((2, 4), np.int32), []
    held_out = SimpleNamespace(validation=lambda number: batch)
    monkeypatch.setattr(ModelPlaces, "whole", None)
    monkeypatch.setattr(model_workers, "make_eval_step", lambda m: evaluated.append(m) or abs)

    def products():
        read = text_generator(config, places)._decoder
        yield make_jaxpr(read.read, params, read.cache(2), text, row, row)
        evaluated.clear()
        assert [*model_workers._means(config, held_out, None, places, 0, 2)] == []
        yield make_jaxpr(lambda p: evaluated[0].loss(p, batch, None), params)

    for said, has in ("8.6", True), ("7.5", False):
        gpu = SimpleNamespace(compute_capability=said)
        monkeypatch.setattr(places, "_mesh", SimpleNamespace(devices=np.array([gpu])))
        for program in products():
            found = [eqn for eqn in walk(program.eqns) if eqn.primitive.name in CONTRACTIONS]
            types = {v.aval.dtype for eqn in found for v in eqn.invars}
            assert found
            assert (np.dtype(jax.numpy.bfloat16) in types) == has
