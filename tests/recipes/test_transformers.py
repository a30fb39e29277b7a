"""What `transformers` itself computes from our files, and we from its: where it is installed.

pip install torch transformers
pytest -m stress tests/recipes/test_transformers.py
"""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import transformers_reference
from test_hugging_face import (
    FAMILIES,
    FORMS,
    KINDS,
    TOKENS,
    apply,
    in_form,
    random_params,
    read,
    write,
)

from launcher import checkpoint
from launcher.config.compose import load
from launcher.recipes import build_model
from launcher.testing import assert_allclose
from launcher.train.lora import with_adapters

pytestmark = [pytest.mark.devices, pytest.mark.stress]


def theirs(kind, folder):
    """A model of `transformers`, and its logits."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    loader = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    model = getattr(transformers, loader).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model, model(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_both_ways(kind, tmp_path):
    options, params = KINDS[kind], random_params(KINDS[kind])
    write(options, params, tmp_path / "ours")
    model, logits = theirs(kind, tmp_path / "ours")
    assert_allclose(apply(options, params, TOKENS), logits, rtol=1e-5, atol=1e-5)
    assert_allclose(
        transformers_reference.logits(tmp_path / "ours", TOKENS), logits, rtol=1e-5, atol=1e-5
    )
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    again = apply(options, read(options, tmp_path / "theirs"), TOKENS)
    assert_allclose(np.asarray(again), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_in_every_form(kind, form, tmp_path):
    options, params = KINDS[kind], random_params(KINDS[kind])
    in_form(form, options, params, tmp_path)
    _, logits = theirs(kind, tmp_path)
    ours = apply(options, read(options, tmp_path), TOKENS)
    assert_allclose(np.asarray(ours), logits, rtol=1e-5, atol=1e-5)


def test_what_is_tied_is_what_transformers_ties():
    transformers = pytest.importorskip("transformers")
    for module in FAMILIES:
        for kind in module.MODEL_TYPES:
            config = transformers.AutoConfig.for_model(kind)
            model = getattr(transformers, module.AUTO_CLASS)._model_mapping[type(config)]
            assert model._tied_weights_keys == module.TIED


def run(folder, *words):
    """Run the launcher; it must succeed."""
    command = [sys.executable, "-m", "launcher", "run.id=mine", f"run.dir={folder}", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_adapters_are_merged_into_what_transformers_loads(tmp_path):
    """A Llama learns by adapters; the loss with them apart is the exported model's."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    options, start = KINDS["llama"], tmp_path / "start"
    write(options, random_params(options), start)
    words = ["model=llama", f"model.size=hf:{start}", f"train.init_from=hf:{start}"]
    words += ["optimizer.lora.rank=3", "optimizer.lora.alpha=6", "dataset=synthetic"]
    run(
        tmp_path, *words, "train.steps=3", "train.global_batch_size=8", "train.eval_every=0",
        "optimizer.warmup_steps=0", "optimizer.learning_rate=3e-2", "parallel=manual",
        "parallel.num_stages=2", "parallel.num_micro_batches=2", "cluster=emulated",
        "cluster.gpus=4", "wandb.mode=disabled",
    )  # fmt: skip
    run(tmp_path, "task=export", "export.format=hf", f"export.path={tmp_path}/there")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "there", dtype=torch.float32
    )
    before = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokens = torch.tensor(np.concatenate([TOKENS, TOKENS[:, :4]], 1))
    with torch.no_grad():
        theirs, first = (one(tokens, labels=tokens).loss.item() for one in (model, before))
    adapted = with_adapters(build_model(options, "fp32"), load(words).optimizer.lora)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(adapted.init, jax.random.key(0)),
    )
    saved = tmp_path / "mine" / "checkpoints" / "3"
    raw = checkpoint.restore_model(saved, {"params": like})["params"]
    batch = {"tokens": tokens[:, :-1].numpy(), "targets": tokens[:, 1:].numpy()}
    ours, _ = adapted.loss(raw, batch, None)
    assert abs(float(ours) - theirs) < 1e-5
    assert abs(first - theirs) > 1e-2
