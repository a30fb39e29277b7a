"""Padded vocabularies: losses, gradients, texts and files are those without, and arrays are cut."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest
from filled import filled_params

from launcher import checkpoint
from launcher.checkpoint.flat import mismatch
from launcher.checkpoint.hugging_face import Folder, write_hugging_face
from launcher.config.compose import load
from launcher.config.families import find_models
from launcher.config.schema import CustomModel
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import with_notes
from launcher.plan import local_shape
from launcher.recipes import build_model
from launcher.recipes.models import hugging_face
from launcher.recipes.models.decoding import Generator, Sampling, build_decoder
from launcher.recipes.models.hugging_face import family_named, padded
from launcher.runtime import compile_step
from launcher.train.program import build_program, build_steps

VOCABULARY, ROWS = 253, 256
EMBEDDING = "params.word_embeddings.embedding"
TINY = {"size": None, "vocab_size": VOCABULARY, "sequence_length": 8, "num_layers": 2}
TINY |= {"num_heads": 4, "hidden_size": 16}
MORE = {"moe": {"num_experts": 4, "capacity_factor": 0.0}}
FAMILIES = [
    name for name, family in find_models().items() if "vocab_size" in family.__dataclass_fields__
]
UNTIED = [name for name in FAMILIES if "tie_embeddings" in find_models()[name].row]
PLANS = {
    "data": "parallel=data cluster.gpus=4",
    "shard": "parallel=shard parallel.data=1 parallel.model=4 cluster.gpus=4",
    "stages": "parallel=manual parallel.num_stages=2 parallel.num_micro_batches=2 cluster.gpus=4",
}
STEPS = 3
WAYS = Sampling(temperature=0), Sampling(temperature=9.0, seed=3)


def without():
    return mock.patch.object(hugging_face, "_MOST_ADDED", 0.0)


def options_of(name, **changes):
    return find_models()[name](**TINY | MORE.get(name, {}) | changes).filled()


def shapes_of(options):
    return jax.eval_shape(build_model(options, "fp32").init, jax.random.key(0))


def padded_like(params, shapes, padding=0.0):
    """The same arrays, filled up to these shapes."""

    def one(array, like):
        more = [(0, whole - n) for n, whole in zip(array.shape, like.shape, strict=True)]
        return np.pad(array, more, constant_values=padding)

    return jax.tree.map(one, params, shapes)


def assert_padded(found, want):
    """The same arrays but for rounding, followed by zeros alone."""

    def one(array, expected):
        own = np.asarray(array)[tuple(slice(0, n) for n in expected.shape)]
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
        assert np.count_nonzero(array) == np.count_nonzero(own)

    jax.tree.map(one, found, want)


def written(folder, options, params):
    """A folder of Hugging Face's with these parameters."""
    leaves, name = jax.tree_util.tree_leaves_with_path(params), jax.tree_util.keystr
    arrays = {f"params.{name(at, simple=True, separator='.')}": x for at, x in leaves}
    family = family_named(options.name)
    content = Folder(family.config_of(options), list(family.tensors(options)))
    write_hugging_face(
        folder, content, lambda names: {n: arrays[n] for n in names}, "float32", private=False
    )


def batch_of(name):
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(4, 9)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return batch | ({"weights": np.float32(tokens[:, 1:] % 3 == 0)} if name == "bert" else {})


@pytest.mark.parametrize(
    ("vocabulary", "rows"),
    [(50_257, 50_304), (30_522, 30_592), (51_200, 51_200), (253, 256), (300, 300), (1000, 1024)],
)
def test_a_few_percent_are_added(vocabulary, rows):
    assert padded(vocabulary) == rows


@pytest.mark.devices(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {"loss_chunks": 2}) for name in FAMILIES]
    + [(name, {"tie_embeddings": False}) for name in UNTIED],
)
def test_losses_and_gradients_are_those_without(name, changes):
    options, batch = options_of(name, num_layers=1, **changes), batch_of(name)
    model = build_model(options, "fp32")

    def with_gradient(params):
        return jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, None), has_aux=True))(
            params
        )

    with without():
        params = filled_params(model)
        (want, metrics), slopes = with_gradient(params)
    (got, told), found = with_gradient(padded_like(params, shapes_of(options), 9.0))
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    assert told.keys() == metrics.keys()
    for key in told:
        assert float(told[key]) == pytest.approx(float(metrics[key]), rel=1e-6)
    assert any(ROWS in x.shape for x in jax.tree.leaves(found))
    assert_padded(found, slopes)


def settings(name, plan=""):
    changes = TINY | MORE.get(name, {}) | ({"tie_embeddings": True} if name in UNTIED else {})
    return load([
        f"model={name}", *(f"model.{k}={'null' if v is None else v}" for k, v in changes.items()),
        *("dataset=synthetic", "train.global_batch_size=8", "train.eval_every=0"),
        *("optimizer=adamw", "optimizer.weight_decay=0.5", "optimizer.warmup_steps=0"),
        *("optimizer.learning_rate=1e-2", "optimizer.eps=1e-4", "cluster=emulated", *plan.split()),
    ])  # fmt: skip


@functools.cache
def without_padding(name):
    """The losses and the last parameters of a training on one device."""
    config, losses = settings(name), []
    with without():
        program = build_program(config)
        init, step = build_steps(config, build_model(config.model, "fp32"))
        state, step = jax.jit(init)(program.seed), jax.jit(step)
        for k in range(STEPS):
            state, metrics = step(state, program.dataset.train(k))
            losses.append(float(metrics["loss"]))
    return losses, state.params


@pytest.mark.devices
@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_plan_trains_as_one_device_does_without(name, plan):
    """From a seed, by AdamW with weight decay; padding stays zero."""
    config = settings(name, PLANS[plan])
    program = build_program(config)
    chosen = with_notes(config, plan_of(config.parallel, program.train, local_shape(4, 1, "cpu")))
    assert "vocabulary padded from 253 to 256, so that devices divide it" in chosen.notes
    cut = chosen.stages[0].shardings[f"0.{EMBEDDING}"]
    assert plan == "shard" or "model" not in cut
    step = compile_step(program.train, chosen, jax.devices())
    state, losses = step.create(program.init, program.seed), []
    for k in range(STEPS):
        state, metrics = step(state, program.dataset.train(k))
        losses.append(float(metrics["loss"]))
    expected, params = without_padding(name)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    found = jax.tree.map(np.asarray, state.params)
    assert found["word_embeddings"]["embedding"].shape[0] == ROWS
    assert_padded(found, params)


@pytest.mark.parametrize(
    ("changes", "devices", "notes"),
    [
        ({}, 1, ["vocabulary padded from 253 to 256, so that devices divide it"]),
        ({"vocab_size": 256}, 4, []),
        (
            {"vocab_size": 256}, 8,
            ["not cut: model.num_heads, which 8 devices do not divide; heads are not padded"],
        ),
        (
            {"vocab_size": 301}, 4,
            ["not cut: model.vocab_size, which 4 devices do not divide"],
        ),
    ],
)  # fmt: skip
def test_a_plan_says_what_is_padded_and_what_is_not_cut(changes, devices, notes):
    assert list(options_of("gpt", **changes).notes(devices)) == notes


@pytest.mark.parametrize(
    ("here", "is_told"),
    [((256, 16), True), ((256, 32), False), ((384, 16), False), ("missing", False)],
)
def test_what_an_earlier_version_did_not_pad_is_told_how_to_take_over(here, is_told):
    words = mismatch("params.w", (253, 16), here, "here")
    assert words.startswith(f"params.w is (253, 16) there and {here} here")
    assert ("export.format=hf" in words) == is_told
    options = options_of("gpt")
    checkpoint.check_vocabulary(options, {EMBEDDING: (256, 16)})
    checkpoint.check_vocabulary(CustomModel(module="theirs"), {EMBEDDING: (253, 16)})
    with pytest.raises(checkpoint.Mismatch, match=r"\(253, 16\) there .* export.format=hf"):
        checkpoint.check_vocabulary(options, {EMBEDDING: (253, 16)})


@pytest.mark.devices(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bert"])
def test_texts_are_those_without(name):
    options, prompts = options_of(name, num_layers=1), [[1, 2, 3], [252]]
    decoder = build_decoder(options, "fp32")
    with without():
        params = filled_params(build_model(options, "fp32"))
        want = [list(Generator(decoder, way)(params, prompts, 6)) for way in WAYS]
    likeliest = padded_like(params, shapes_of(options), 9.0)
    got = [list(Generator(decoder, way)(likeliest, prompts, 6)) for way in WAYS]
    np.testing.assert_array_equal(got, want)


@pytest.mark.devices(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_hugging_face_hold_no_padding(name, tmp_path):
    options = options_of(name, **({"tie_embeddings": False} if name in UNTIED else {}))
    shapes = shapes_of(options)
    with without():
        params = filled_params(build_model(options, "fp32"))
        written(tmp_path / "without", options, params)
    likeliest = padded_like(params, shapes, 9.0)
    written(tmp_path / "with", options, likeliest)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
    checkpoint.check_model(tmp_path / "without", {"params": like})
    read = checkpoint.restore_model(tmp_path / "without", {"params": like})["params"]
    jax.tree.map(np.testing.assert_array_equal, read, padded_like(params, shapes))
    written(tmp_path / "again", options, read)
    files = [
        (tmp_path / of / "model.safetensors").read_bytes() for of in ("without", "with", "again")
    ]
    assert files[0] == files[1] == files[2]
