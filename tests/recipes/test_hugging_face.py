"""Weights between our models and Hugging Face's folders: equal logits, and what is refused."""

import contextlib
import dataclasses
import functools
import json
import sys
import weakref
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file, save_file
from whole_logits import whole_logits

import launcher.recipes.models
from launcher import checkpoint
from launcher.checkpoint import hugging_face
from launcher.checkpoint.hugging_face import Folder, write_hugging_face
from launcher.checkpoint.train_state import TrainState
from launcher.config.compose import load, to_written
from launcher.config.errors import ConfigError
from launcher.config.families import modules_of_families
from launcher.driver.planning.init_from import check_start, find_start
from launcher.driver.tasks.export import ExportTask
from launcher.recipes import build_model
from launcher.recipes.data.corpus.tokenizer_files import tokenizer_files
from launcher.recipes.models.bert import BERTOptions
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.hugging_face import family_named
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.moe import MoEOptions
from launcher.testing import assert_allclose

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import transformers_reference
from checkpoint_peer import Trainee

pytestmark = pytest.mark.devices

SMALL = {"vocab_size": 64, "sequence_length": 16, "num_layers": 2, "num_heads": 4}
SMALL |= {"hidden_size": 32, "size": None}
SHARED = LlamaOptions(**SMALL, num_kv_heads=2, mlp_size=48).filled()
KINDS = {
    "llama": SHARED,
    "llama, stretched": dataclasses.replace(SHARED, rope_factor=8.0, rope_base=5e5),
    "llama, tied": dataclasses.replace(SHARED, tie_embeddings=True, num_kv_heads=4),
    "mistral": dataclasses.replace(SHARED, sliding_window=5),
    "qwen2": dataclasses.replace(SHARED, qkv_bias=True, norm_epsilon=1e-6),
    "qwen3": dataclasses.replace(SHARED, head_norm=True, head_size=16),
    "gemma": dataclasses.replace(
        SHARED, scale_embeddings=True, activation="gelu", tie_embeddings=True, num_kv_heads=1
    ),
    "mixtral": MoEOptions(
        **SMALL, num_kv_heads=2, mlp_size=48, num_experts=4, sliding_window=5
    ).filled(),
    "qwen3_moe": MoEOptions(
        **SMALL,
        num_kv_heads=2,
        mlp_size=48,
        num_experts=4,
        head_norm=True,
        expert_size=24,
        expert_every=2,
        experts_per_token=3,
    ).filled(),
    "bert": BERTOptions(**SMALL).filled(),
    "gpt2": GPTOptions(**SMALL).filled(),
    "gpt2, untied": GPTOptions(**SMALL, tie_embeddings=False, mlp_ratio=2).filled(),
}
for name in ("mixtral", "qwen3_moe"):  # which drop no token
    KINDS[name] = dataclasses.replace(KINDS[name], capacity_factor=0.0)
TOKENS = np.arange(24).reshape(2, 12) * 7 % 64


def apply(options, params, tokens):
    """Our logits."""
    return jax.jit(functools.partial(whole_logits, options))(params, tokens)


def random_params(options, seed=0):
    """Parameters none of which is 0 or 1, and which matter."""
    shapes = jax.eval_shape(build_model(options, "fp32").init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    drawn = [rng.normal(0.5 if x.ndim == 1 else 0, 0.3, x.shape).astype("f4") for x in leaves]
    return jax.tree.unflatten(tree, drawn)


def flat(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    name = jax.tree_util.keystr
    return {f"params.{name(p, simple=True, separator='.')}": x for p, x in leaves}


def write(options, params, folder, dtype="float32", **more):
    family, arrays = family_named(options.name), flat(params)
    return write_hugging_face(
        folder, Folder(family.config_of(options), list(family.tensors(options))),
        lambda names: {name: arrays[name] for name in names}, dtype, private=False, **more,
    )  # fmt: skip


def read(options, folder):
    shapes = jax.eval_shape(build_model(options, "fp32").init, jax.random.key(0))
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
    check_start(f"hf:{folder}", folder, {"params": like})
    return checkpoint.restore_model(folder, {"params": like})["params"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_and_arrays_come_back(kind, tmp_path):
    options, folder = KINDS[kind], tmp_path / "theirs"
    params = random_params(options)
    count = write(options, params, folder)
    assert count == len(list(family_named(options.name).tensors(options))) >= len(flat(params))
    expected = transformers_reference.logits(folder, TOKENS)
    assert np.abs(expected).max() > 1
    assert_allclose(apply(options, params, TOKENS), expected, rtol=1e-5, atol=1e-5)
    for name, array in flat(read(options, folder)).items():
        tolerance = {"rtol": 0, "atol": 1e-7 if kind == "gemma" else 0}  # norms less 1
        np.testing.assert_allclose(array, flat(params)[name], **tolerance)
    found = load([f"model={options.name}", f"model.size=hf:{folder}", "dataset=synthetic"]).model
    assert dataclasses.replace(found, size=None) == options


def test_several_files_are_one_model(tmp_path):
    options, folder = KINDS["llama"], tmp_path / "parts"
    params = random_params(options)
    write(options, params, folder, largest=16_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert jax.tree.all(jax.tree.map(np.array_equal, read(options, folder), params))
    files[1].unlink()
    with pytest.raises(ConfigError, match=f"it has no {files[1].name}, which .*json names"):
        read(options, folder)


class Held:
    """Counts, as each array or file of them is read, what is held of those before."""

    def __init__(self):
        self._refs, self.held = [], []

    def reads(self, *arrays):
        self.held.append(sum(ref() is not None for ref in self._refs))
        copies = [np.array(array) for array in arrays]  # views keep these alive
        self._refs += map(weakref.ref, copies)
        return copies


@pytest.mark.parametrize(
    ("kind", "scan", "most"),
    [("llama", False, 0), ("llama", True, 1), ("mixtral", False, 3)],  # the parts of an array
)
def test_no_two_arrays_that_are_read_are_held_at_a_time(kind, scan, most, tmp_path, monkeypatch):
    options = KINDS[kind]
    write(options, random_params(options), tmp_path / "theirs")
    held, opened = Held(), hugging_face._opened

    @contextlib.contextmanager
    def watched(file):
        with opened(file) as archive:
            yield SimpleNamespace(
                keys=archive.keys,
                get_slice=archive.get_slice,
                get_tensor=lambda name: held.reads(archive.get_tensor(name))[0],
            )

    monkeypatch.setattr(hugging_face, "_opened", watched)
    read(dataclasses.replace(options, scan_layers=scan), tmp_path / "theirs")
    assert len(held.held) == len(list(family_named(options.name).tensors(options)))
    assert max(held.held) <= most


def test_the_arrays_of_one_file_are_held_at_a_time_as_they_are_written(tmp_path):
    options, held, sizes = KINDS["llama"], Held(), []
    family, arrays = family_named("llama"), flat(random_params(KINDS["llama"]))

    def get(names):
        sizes.append(sum(arrays[name].nbytes for name in names))
        return dict(zip(names, held.reads(*(arrays[name] for name in names)), strict=True))

    folder = Folder(family.config_of(options), list(family.tensors(options)))
    write_hugging_face(tmp_path / "theirs", folder, get, "float32", private=False, largest=16_000)
    assert len(sizes) > 2
    assert max(sizes) <= 16_000
    assert max(held.held) == 0


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_scanned_layers_start_from_the_same_files(kind, tmp_path):
    options = KINDS[kind]
    params = random_params(options)
    write(options, params, tmp_path / "theirs")
    scanned = dataclasses.replace(options, scan_layers=True)
    found = read(scanned, tmp_path / "theirs")
    assert_allclose(apply(scanned, found, TOKENS), apply(options, params, TOKENS), rtol=1e-6)


def changed(folder, change):
    """Rewrite the arrays of a folder."""
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors")


Q = "model.layers.1.self_attn.q_proj.weight"


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
KEY = "bert.encoder.layer.0.attention.self.key.bias"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", lambda a: a.pop(Q), f"it has no {Q}"),
        ("llama", lambda a: a.update(extra=a[Q]), "it has extra, which the model does not have"),
        ("llama", lambda a: a.update({Q: a[Q][:-1]}), f"{Q} is (31, 32), and (32, 32) by config"),
        ("llama", lambda a: a.update({Q: a[Q].astype("i4")}), f"{Q} is of type I32"),
        # Several arrays there that are one here.
        ("mixtral", lambda a: a.pop(EXPERT), f"it has no {EXPERT}"),
        ("mixtral", lambda a: a.update({EXPERT: a[EXPERT].T.copy()}), f"{EXPERT} is (32, 48), and"),
        (
            "mixtral",
            lambda a: a.update({EXPERT.replace(".2.", ".4."): a[EXPERT]}),
            f"it has {EXPERT.replace('.2.', '.4.')}, which the model does not have",
        ),
        ("bert", lambda a: a.pop(KEY), f"it has no {KEY}"),
    ],
)
def test_an_array_that_is_not_as_it_should_be_is_named(kind, change, words, tmp_path):
    write(KINDS[kind], random_params(KINDS[kind]), tmp_path / "theirs")
    changed(tmp_path / "theirs", change)
    with pytest.raises(ConfigError) as refused:
        read(KINDS[kind], tmp_path / "theirs")
    assert words in str(refused.value)
    assert f"train.init_from=hf:{tmp_path}/theirs does not fit the model" in str(refused.value)


# Of each family, arrays that older files have beside the model's, and `transformers` leaves aside.
BUFFERS = {
    "gpt": {
        "transformer.h.1.attn.bias": np.ones((1, 1, 16, 16), bool),
        "transformer.h.0.attn.masked_bias": np.array(-1e4, "f4"),
    },
    "llama": {
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, "f4"),
        "model.rotary_emb.inv_freq": np.ones(4, "f4"),
    },
    "bert": {
        "bert.embeddings.position_ids": np.arange(16)[None],
        "bert.pooler.dense.weight": np.zeros((32, 32), "f4"),
        "cls.seq_relationship.bias": np.zeros(2, "f4"),
    },
}
BUFFERS["moe"] = BUFFERS["llama"]
FAMILIES = [import_module(name) for name in modules_of_families(launcher.recipes.models, "hf")]


def base_of(options):
    """The prefix of the base model, with its dot."""
    return next(iter(family_named(options.name).tensors(options))).theirs.partition(".")[0] + "."


def twins(options):
    """Names that are other arrays' in this model, and those."""
    own = {tensor.theirs for tensor in family_named(options.name).tensors(options)}
    tied = family_named(options.name).TIED
    return {name: other for name, other in tied.items() if name not in own}


def older(name):
    """The name of an array in older files."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta")


def twice(options, name):
    base = base_of(options)
    return base + name if name.startswith(base) else name


# The forms of a folder that `transformers` reads: their names of the arrays of a model, or what
# else is done to them.
NAMED = {
    "without the prefix": lambda o, name: name.removeprefix(base_of(o)),
    "with the prefix twice": twice,
    "with old names and buffers": lambda o, name: older(name),
    "as the hub has gpt2, with buffers": lambda o, name: name.removeprefix(base_of(o)),
    "under the other name of tied arrays": lambda o, name: {
        other: twin for twin, other in twins(o).items()
    }.get(name, name),
}
FORMS = [*NAMED, "with tied arrays twice", "in float16", "in bfloat16, sharded", "a stale index"]


def in_form(form, options, params, folder):
    """Write a folder in one of the forms."""
    if "sharded" in form:
        write(options, params, folder, dtype="bfloat16", largest=8_000)
        return
    write(options, params, folder)
    arrays = load_file(folder / "model.safetensors")
    if "buffers" in form:
        arrays |= BUFFERS[options.name]
    if "twice" in form and form not in NAMED:
        arrays |= {name: arrays[other].copy() for name, other in twins(options).items()}
    if form == "in float16":
        arrays = {name: array.astype("f2") for name, array in arrays.items()}
    name_of = NAMED.get(form, lambda options, name: name)
    arrays = {name_of(options, name): array for name, array in arrays.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    if "stale" in form:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "lost"}}')


def test_every_type_of_model_has_a_case_here():
    """A new family of models, or type of one, is to be read in all of `FORMS`."""
    assert {one for module in FAMILIES for one in module.MODEL_TYPES} == {
        family_named(kind.name).config_of(kind)["model_type"] for kind in KINDS.values()
    }
    for options in KINDS.values():
        family = family_named(options.name)
        assert all(family.UNREAD.search(name) for name in BUFFERS[options.name])
        own = [tensor.theirs for tensor in family.tensors(options)]
        assert not any(family.UNREAD.search(name) for name in own)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_read_in_every_form_that_transformers_reads(kind, form, tmp_path):
    options, params = KINDS[kind], random_params(KINDS[kind])
    in_form(form, options, params, tmp_path)
    tolerance = 0.01 if "float16" in form else 1e-7 if kind == "gemma" else 0
    for name, array in flat(read(options, tmp_path)).items():
        np.testing.assert_allclose(array, flat(params)[name], tolerance, tolerance, err_msg=name)


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize("kind", KINDS)
def test_heads_prefixes_and_pickled_weights_that_transformers_lacks_are_named(kind, tmp_path):
    options, base, file = KINDS[kind], base_of(KINDS[kind]), tmp_path / "model.safetensors"
    write(options, random_params(options), tmp_path)
    arrays = load_file(file)
    kept = {name: array for name, array in arrays.items() if name.startswith(base)}
    cases = [({f"module.{n}": a for n, a in arrays.items()}, "it has no .* it has module\\.")]
    for name, other in twins(options).items():
        words = f"({name} and {other}|{other} and {name}) differ"
        cases.append((arrays | {name: arrays[other] + 1}, words))
    if arrays.keys() - kept:
        cases.append((kept, "it has no (lm_head|cls).*saved without the model's head"))
    for held, words in cases:
        save_file(held, file)
        with pytest.raises(ConfigError, match=words):
            read(options, tmp_path)
    file.rename(tmp_path / "pytorch_model-00001-of-00002.bin")
    loader = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    with pytest.raises(ConfigError, match=f"from transformers import {loader} as M; M.from_pretr"):
        read(options, tmp_path)


def test_weights_may_be_used_with_another_capacity(tmp_path):
    write(KINDS["mixtral"], random_params(KINDS["mixtral"]), tmp_path / "theirs")
    words = [f"model.size=hf:{tmp_path}/theirs", f"train.init_from=hf:{tmp_path}/theirs"]
    words += ["model=moe", "dataset=synthetic", "model.capacity_factor=1.5"]
    assert find_start(load(words), 0) == tmp_path / "theirs"
    with pytest.raises(ConfigError, match=r"has experts_per_token=2, and model\.experts"):
        find_start(load([*words, "model.experts_per_token=1"]), 0)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("mixtral", {"norm_topk_prob": False, "model_type": "qwen3_moe"}, "norm_topk_prob=false"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers is not supported"),
        ("mixtral", {"hidden_act": "relu"}, "the activation 'relu' is not supported"),
        ("bert", {"hidden_act": "gelu_new"}, "hidden_act=gelu_new is not supported"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            "layers with and without a sliding window",
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layers with and without a sliding window",
        ),
        (
            "bert",
            {"intermediate_size": 50},
            "intermediate_size=50 is not a multiple of hidden_size",
        ),
    ],
)
def test_what_these_families_cannot_express_is_refused(kind, change, words, tmp_path):
    family = family_named(KINDS[kind].name)
    content = family.config_of(KINDS[kind]) | change
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        load([f"model={KINDS[kind].name}", f"model.size=hf:{tmp_path}", "dataset=synthetic"])


@pytest.mark.parametrize(
    ("layers", "window"),
    [
        ({"max_window_layers": 2}, 0),
        ({"max_window_layers": 0}, 5),
        ({}, 0),
        ({"max_window_layers": 0, "use_sliding_window": False}, 0),
        ({"layer_types": ["sliding_attention"] * 2}, 5),
    ],
)
def test_a_window_is_taken_where_all_layers_have_it(layers, window, tmp_path):
    content = family_named("llama").config_of(KINDS["qwen3"])
    content |= {"use_sliding_window": True, "sliding_window": 5} | layers
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert (
        load(["model=llama", f"model.size=hf:{tmp_path}", "dataset=synthetic"]).model.sliding_window
        == window
    )


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        *(("mixtral", {key: value}, f"transformers has no .* with model.{key}")
          for key, value in (("activation", "gelu"), ("shared_size", 8), ("qkv_bias", True),
                             ("expert_every", 2))),
        ("llama", {"gated_mlp": False}, "no Llama whose MLP is not gated"),
    ],
)  # fmt: skip
def test_what_transformers_lacks_is_refused(kind, change, words, tmp_path):
    options = dataclasses.replace(KINDS[kind], **change)
    with pytest.raises(ValueError, match=words):
        write(options, random_params(options), tmp_path / "theirs")


def settings(folder, *words):
    return load(
        ["model=llama", f"model.size=hf:{folder}", f"train.init_from=hf:{folder}",
         "dataset=synthetic", *words], []
    )  # fmt: skip


def test_settings_that_give_the_same_shapes_another_meaning_are_refused(tmp_path):
    write(KINDS["llama"], random_params(KINDS["llama"]), tmp_path / "theirs")
    assert find_start(settings(tmp_path / "theirs"), 0) == tmp_path / "theirs"
    with pytest.raises(ConfigError) as refused:
        find_start(settings(tmp_path / "theirs", "model.rope_base=500"), 0)
    assert "has rope_base=10000.0, and model.rope_base is 500.0" in str(refused.value)
    assert f"model.size=hf:{tmp_path}/theirs" in str(refused.value)
    with pytest.raises(ConfigError, match=r"is a llama, which model=gpt is not"):
        find_start(load([f"train.init_from=hf:{tmp_path}/theirs"], []), 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "config.json: No such file or directory"),
        ("{", "config.json: it is not JSON"),
        ("{}", "config.json names no model_type"),
        ('{"model_type": "mamba"}', "model_type is 'mamba'; these are known: bert, gemma, gpt2"),
        ('{"model_type": "gpt2"}', "it is a model=gpt, not a model=llama"),
        ('{"model_type": "llama"}', "config.json lacks 'vocab_size'"),
        ('{"model_type": "llama", "mlp_bias": true}', "mlp_bias=true is not supported"),
        (
            '{"model_type": "llama", "rope_scaling": 3}',
            "config.json holds a value that is not a dim",
        ),
        ('{"model_type": "bert", "hidden_size": 0, "intermediate_size": 4}', "a value that is no"),
        (
            '{"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}',
            "the rotary positions 'yarn' are not supported",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(content, words, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    model = "model=bert" if "bert" in str(content) else "model=llama"
    with pytest.raises(ConfigError) as refused:
        load([model, f"model.size=hf:{tmp_path}", "dataset=synthetic"], [])
    assert f"model.size=hf:{tmp_path} cannot be used: " in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "scan_layers"),
    [pytest.param("qwen3", False, marks=pytest.mark.slow), ("qwen3", True), ("bert", True)],
)
def test_a_run_is_exported_as_transformers_reads_it(kind, scan_layers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = dataclasses.replace(KINDS[kind], scan_layers=scan_layers)
    params = random_params(options)
    home = tmp_path / "outputs" / "mine"
    state = TrainState(jnp.int32(3), params, {"mu": params}, jnp.zeros(2, jnp.uint32))
    checkpoint.save(home / "checkpoints", 3, checkpoint.copy_to_host(state), {})
    words = [f"model.{key}={value}" for key, value in dataclasses.asdict(options).items()
             if key not in ("name", "size", "sizes") and value is not None]  # fmt: skip
    theirs = tmp_path / "theirs"  # where the run started; it names the tokenizer
    theirs.mkdir()
    (theirs / "tokenizer.json").write_bytes(tokenizer_files("bytes").files["tokenizer.json"])
    words += ["dataset=synthetic", "run.id=mine", f"train.init_from=hf:{theirs}"]
    run = load([f"model={options.name}", "model.size=null", *words], [])
    (home / "config.yaml").write_text(yaml.safe_dump(to_written(run)))
    asked = load(["task=export", "run.id=mine", "export.format=hf"], [])
    assert ExportTask().run(asked, Console(quiet=True)) == 0
    expected = transformers_reference.logits(home / "hf-3", TOKENS)
    assert_allclose(apply(options, params, TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert json.loads((home / "hf-3" / "config.json").read_text())["eos_token_id"] == 256
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (home / "hf-3" / name).is_file()
    with pytest.raises(ConfigError, match="exists already"):
        ExportTask().run(asked, Console(quiet=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_from_there_goes_back_trained_in_two_stages_of_two_devices(
    kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options, home = KINDS[kind], tmp_path / "outputs" / "mine"
    params = random_params(options)
    write(options, params, tmp_path / "start")
    words = [
        *(f"model={options.name}", "model.size=hf:start", "train.init_from=hf:start"),
        *("dataset=synthetic", "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-2"),
        *("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=2"),
        *("cluster.gpus=4", "run.id=mine"),
    ]
    trainee = Trainee(words, model=())
    assert trainee.slices() == 4
    trainee.worker.create("start")
    trainee.worker.step(1)
    trainee.worker.flush()
    (home / "checkpoints").mkdir(parents=True)
    trainee.worker.save(str(home / "checkpoints"), 1, {"config": {}}, "a")
    assert trainee.worker.saved() is None
    trained = jax.tree.map(np.asarray, trainee.worker._state.params)
    trainee.worker.close()
    (home / "config.yaml").write_text(yaml.safe_dump(to_written(load(words))))
    for one, other in zip(jax.tree.leaves(trained), jax.tree.leaves(params), strict=True):
        assert 0 < np.abs(one - other).max() < 0.02  # a step of Adam from there
    asked = load(["task=export", "run.id=mine", "export.format=hf"])
    assert ExportTask().run(asked, Console(quiet=True)) == 0
    ours = apply(options, trained, TOKENS)
    theirs = transformers_reference.logits(home / "hf-1", TOKENS)
    assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    before = transformers_reference.logits(tmp_path / "start", TOKENS)
    assert np.abs(theirs - before).max() > 1e-2
