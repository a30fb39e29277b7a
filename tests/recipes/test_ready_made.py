"""`conf/recipe/`: the runs for a laptop train two steps, those for eight GPUs are planned."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from launcher.config.compose import load
from launcher.config.folders import CONF
from launcher.recipes import build_dataset, build_model
from launcher.recipes.data.corpus.tokenizer_files import tokenizer_files
from launcher.recipes.datasets.documents.prepare import prepare_corpus
from launcher.recipes.models.llama import LlamaOptions
from launcher.train.lora import with_adapters
from launcher.train.program import build_steps

sys.path.insert(0, str(Path(__file__).parent))
from test_hugging_face import random_params, write

pytestmark = pytest.mark.devices

NAMES = sorted(file.stem for file in (CONF / "recipe").glob("*.yaml"))
LARGE = [name for name in NAMES if name.endswith("_8gpus")]
THEIRS = "model.size=hf:my_llama", "dataset.tokenizer=my_llama"
# What those say that do not run as they are: where their data is, or a model for a test's time.
WORDS = {
    "finetune_hf": (*THEIRS, "dataset.path=talks.jsonl"),
    "chat_lora": (*THEIRS, "dataset.path=chats.jsonl", "dataset.chat_template=plain"),
    "gpt_text": ("dataset.path=books", "model.size=nano"),
    "pretrain_tokens": (
        "dataset.path=train.bin", "dataset.validation_path=val.bin", "model.size=nano",
        "model.sequence_length=64", "train.global_batch_size=8",
    ),
}  # fmt: skip
# For GPUs, but for a command of theirs that says otherwise.
SMALL = sorted({*NAMES} - {*LARGE, "pipeshard_tutorial"})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The files that the heads of the recipes speak of."""
    home = tmp_path_factory.mktemp("home")
    options = LlamaOptions(
        size=None, vocab_size=260, sequence_length=256, num_layers=2, num_heads=4, num_kv_heads=2,
        hidden_size=32, mlp_size=64,
    ).filled()  # fmt: skip
    write(options, random_params(options), home / "my_llama")
    for name, content in tokenizer_files("bytes").files.items():
        (home / "my_llama" / name).write_bytes(content)
    turns = [("user", "count to three"), ("assistant", "one, two, three")]
    chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
    text = {"text": "number 1 comes before number 2, and so on until there are enough of them"}
    (home / "talks.jsonl").write_text(f"{json.dumps(text)}\n" * 400)
    (home / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 400)
    (home / "books").mkdir()
    (home / "books" / "one.txt").write_text("Call me Ishmael. " * 4000)
    for name in ("train", "val"):
        np.arange(20_000, dtype="u2").__mod__(199).tofile(home / f"{name}.bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name in ("finetune_hf", "chat_lora"):
            prepare_corpus(load([f"recipe={name}", *WORDS[name]]).dataset, 1)
    return home


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMALL)
def test_it_trains_two_steps(name, home, monkeypatch):
    monkeypatch.chdir(home)
    words = [f"recipe={name}", "train.global_batch_size=8", *WORDS.get(name, ())]
    config = load([*words, "optimizer.warmup_steps=0"])
    if hasattr(config.model, "num_layers"):  # fewer are as good here
        small = {"hidden_size": 32, "num_heads": 4} if config.model.name == "gpt" else {}
        model = dataclasses.replace(config.model, num_layers=1, **small)
        config = dataclasses.replace(config, model=model)
    data = build_dataset(config.dataset, config.model, 8, 0)
    model = with_adapters(build_model(config.model, "fp32"), config.optimizer.lora)
    init, step = build_steps(config, model)
    begun = state = jax.jit(init)(jax.random.key_data(jax.random.key(0)))
    step = jax.jit(step)
    losses = []
    for number in range(2):
        state, result = step(state, data.train(number))
        losses.append(float(result["loss"]))
    assert np.isfinite(losses).all()
    moved = jax.tree.map(lambda one, other: bool((one != other).any()), begun.params, state.params)
    assert any(jax.tree.leaves(moved))
    if config.optimizer.lora.rank:
        assert not any(jax.tree.leaves({**moved, "lora": {}}))  # the model stays as it is


def launch(home, *words):
    command = [sys.executable, "-m", "launcher", "wandb.mode=disabled", *words]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.stress
@pytest.mark.parametrize("name", SMALL)
def test_it_trains_from_the_command_line(name, home):
    run = f"run.id={name}"
    launch(home, f"recipe={name}", *WORDS.get(name, ()), run, "train.steps=2")
    summary = json.loads((home / "outputs" / name / "summary.json").read_text())
    assert summary["steps"] == 2
    assert np.isfinite(summary["final_loss"])


@pytest.mark.stress
@pytest.mark.parametrize("name", [*LARGE, "pretrain_tokens", "pipeshard_tutorial"])
def test_it_is_planned_for_the_machine_that_it_names(name, home):
    head = (CONF / "recipe" / f"{name}.yaml").read_text()
    (command,) = re.findall(r"^#   python -m launcher (task=plan .*)$", head, re.MULTILINE)
    launch(home, *shlex.split(command), f"run.id={name}")
    plan = json.loads((home / "outputs" / name / "plan.json").read_text())
    memory = [stage["memory_bytes"] for stage in plan["stages"]]
    assert max(memory) < 141e9  # the largest machine that one of them names has
    assert plan["predicted_step_seconds"] > 0
    if name in LARGE:
        assert len({device for stage in plan["stages"] for device in stage["devices"]}) == 8
