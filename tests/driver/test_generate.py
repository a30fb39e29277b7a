"""`task=generate`: whatever plan has trained a model, the text is that of a plain loop."""

import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from rich.console import Console

from launcher.config.compose import load, to_dict
from launcher.config.errors import ConfigError
from launcher.driver.evaluate import evaluate
from launcher.driver.generate import decoded_after, generate_text
from launcher.driver.text_tokens import stored_plan
from launcher.report.console import make_console
from launcher.train import checkpoint
from launcher.train.text_layout import layout_of
from launcher.train.text_model import TextModel
from recipes import InputError, build_dataset, build_model
from recipes.corpus.tokenizers import plain_bytes
from recipes.decoding import Sampling
from recipes.gpt import GPT
from recipes.gpt_options import DIMENSIONS

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from checkpoint_peer import Trainee

GPT_WORDS = (
    *(
        "model=gpt",
        "dataset=text",
        f"dataset.path={__file__}",
        "model.hidden_size=16",
        "model.num_layers=2",
    ),
    *("model.num_heads=2", "model.sequence_length=64", "train.global_batch_size=8"),
    *("optimizer.learning_rate=3e-2", "train.eval_every=0", "cluster=emulated"),
)
PLANS = {
    "one": ["parallel=data", "cluster.gpus=1"],
    "two_stages": ["parallel=manual", "parallel.num_stages=2", "cluster.gpus=2"],
    "zero3": ["parallel=zero3", "cluster.gpus=4"],
    "shard": ["parallel=shard", "cluster.gpus=2"],
    "three_d": ["parallel=three_d", "cluster.gpus=4"],
}
# How many devices the model then lies on, and at most which share of it on each.
SPREAD = {"one": (1, 1), "two_stages": (2, 0.55), "zero3": (4, 0.3), "shard": (2, 0.8)}
SPREAD |= {"three_d": (4, 0.3)}
FAST = "one", "two_stages", "zero3"
GREEDY = "generate.temperature=0", "generate.max_new_tokens=20"


class Runs(dict):
    """The parameters, in this process, of a run by each plan; made when they are asked for."""

    def __init__(self, folder):
        self._folder = folder

    def __missing__(self, name):
        words = PLANS[name]
        trainee = Trainee([*GPT_WORDS, *words], model=())
        home = self._folder / "outputs" / name
        (home / "checkpoints").mkdir(parents=True)
        trainee.create_and_save(str(home / "checkpoints"))
        settings = load([*GPT_WORDS, *words, f"run.id={name}"])
        (home / "config.yaml").write_text(yaml.safe_dump(to_dict(settings)))
        plan = trainee.worker._train.plan.to_dict()
        (home / "plan.json").write_text(json.dumps(plan))
        trainee.worker.restore(str(home / "checkpoints"), 2)
        self[name] = jax.tree.map(np.asarray, trainee.worker._state.params)
        trainee.worker.close()
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs, and their parameters; the run `one` is there."""
    folder = tmp_path_factory.mktemp("runs")
    params = Runs(folder)
    assert params["one"]
    return folder, params


def generated(capsys, *words):
    capsys.readouterr()
    assert generate_text(load(["task=generate", *words]), Console(quiet=True)) == 0
    return capsys.readouterr().out


def plain_loop(params, prompt, count):
    """The text that the whole model goes on with, one token after another, on one device."""
    options = load(GPT_WORDS).model
    names = (*DIMENSIONS, "mlp_ratio", "dropout", "tie_embeddings", "scan_layers")
    module = GPT(**{n: getattr(options, n) for n in names}, dtype=jnp.float32)
    forward = jax.jit(lambda p, tokens: module.apply({"params": p}, tokens, deterministic=True))
    text = list(prompt)
    for _ in range(count):
        padded = jnp.array([text + [0] * (64 - len(text))])  # what follows changes nothing
        text.append(int(jnp.argmax(forward(params, padded)[0, len(text) - 1])))
    return text


def spread(folder, name):
    """A run's model as its plan puts it on this process's devices, and its parameters there."""
    home = folder / "outputs" / name
    settings = load([*GPT_WORDS, *PLANS[name]])
    stored = checkpoint.FinishedModel(home / "checkpoints" / "2", settings.optimizer.lora)
    layout = layout_of(stored_plan(home), stored.shapes, 8)
    model = TextModel(settings, layout, Sampling(temperature=0), jax.devices())
    return model, model.load(stored), layout


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]
)
def test_greedy_tokens_are_those_of_a_plain_loop_under_every_plan(runs, name):
    folder, params = runs
    assert params[name]
    model, placed, layout = spread(folder, name)
    prompts = [list(b"def "), list(b"x")]
    made = np.array(list(model.generate(placed, prompts, 20))).T.tolist()
    assert [p + m for p, m in zip(prompts, made, strict=True)] == [
        plain_loop(params[name], prompt, 20) for prompt in prompts
    ]
    leaves = jax.tree.leaves(placed)
    first = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    count, share = SPREAD[name]
    assert layout.num_devices == count
    assert first <= share * sum(leaf.nbytes for leaf in leaves)


def test_parameters_of_a_training_are_placed_as_those_of_its_checkpoint(runs):
    folder, params = runs
    assert params["two_stages"]
    model, placed, _ = spread(folder, "two_stages")
    ours = model.place(jax.tree.map(jnp.asarray, params["two_stages"]))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(placed), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


def test_a_text_is_printed_under_the_runs_own_settings(runs, monkeypatch, capsys):
    folder, params = runs
    monkeypatch.chdir(folder)
    told = generated(capsys, "run.id=one", "prompt='def '", *GREEDY)
    assert told == bytes(plain_loop(params["one"], b"def ", 20)).decode("utf-8", "replace") + "\n"


@pytest.mark.slow
def test_workers_generate_together(runs, monkeypatch, capsys):
    folder, params = runs
    assert params["two_stages"]
    monkeypatch.chdir(folder)
    words = "run.id=two_stages", "cluster.hosts=2", "cluster.gpus=2", "prompt='def '"
    told = generated(capsys, *words, *GREEDY)
    text = bytes(plain_loop(params["two_stages"], b"def ", 20))
    assert told == text.decode("utf-8", "replace") + "\n"


def test_prompts_of_a_file_are_read_together(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs[0])
    Path("prompts.txt").write_text("def f\nimport os\n")
    words = "run.id=one", "generate.max_new_tokens=5", "generate.temperature=0"
    both = generated(capsys, *words, "generate.prompts=prompts.txt")
    alone = [generated(capsys, *words, f"prompt={p}") for p in ("def f", "import os")]
    assert both == "\n".join(alone) + "\n"
    assert generated(capsys, *words, "prompt=[def f,import os]") == both


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.id=none"], "run.id=none cannot be used: outputs/none does not exist"),
        (["run.id=one", "generate.best=true"], "run.id=one has no best checkpoint"),
        (["run.id=one", "generate.ema=true"], "it holds no averages"),
        (["run.id=one", "generate.prompts=no.txt"], "generate.prompts=no.txt is not a file"),
    ],
)
def test_what_cannot_be_generated_is_one_line(runs, words, said, monkeypatch):
    monkeypatch.chdir(runs[0])
    with pytest.raises(ConfigError, match=said):
        generate_text(load(["task=generate", *words]), Console(quiet=True))


def test_a_model_without_a_decoder_is_refused_before_any_process_is_started(runs, monkeypatch):
    folder, params = runs
    assert params["two_stages"]
    shutil.copytree(folder / "outputs" / "two_stages", folder / "outputs" / "mixture")
    settings = load(["model=moe", *GPT_WORDS[1:3], "run.id=mixture"])
    (folder / "outputs" / "mixture" / "config.yaml").write_text(yaml.safe_dump(to_dict(settings)))
    monkeypatch.chdir(folder)
    with pytest.raises(
        InputError, match=r"model\.name=moe cannot go on with a text: it has no dec"
    ):
        generate_text(load(["task=generate", "run.id=mixture"]), Console(quiet=True))


def test_a_space_between_a_prompt_and_what_follows_stays():
    def decode(tokens):  # as tokenizers of SentencePiece, which drop the first space
        return "".join(f" {token}" for token in tokens)[1:]

    tokenizer = plain_bytes()._replace(decode=decode)
    assert decoded_after("1 2", [1, 2], tokenizer, [3, 4]) == " 3 4"
    assert decoded_after("", [0], tokenizer, [3, 4]) == "3 4"


def test_a_task_without_a_run_and_settings_without_an_effect_are_refused():
    with pytest.raises(ConfigError, match="task=generate does not say which run"):
        load(["task=generate"])
    with pytest.raises(ConfigError, match=r"prompt has no effect: that is for task=gen"):
        load(["train.sample_every=0", "prompt=x"])
    with pytest.raises(ConfigError, match=r"generate.top_p has no effect: generate.temperature=0"):
        load(["task=generate", "run.id=x", "generate.temperature=0", "generate.top_p=0.5"])


def test_an_evaluation_is_the_mean_over_what_is_held_out(runs, monkeypatch, capsys):
    folder, params = runs
    assert params["two_stages"]
    monkeypatch.chdir(folder)
    words = "task=evaluate", "run.id=two_stages"
    assert evaluate(load(words), make_console()) == 0
    config = load(words)
    assert (config.model, config.dataset) == (load(GPT_WORDS).model, load(GPT_WORDS).dataset)
    dataset = build_dataset(config.dataset, config.model, 1000, 0)
    model = build_model(config.model, "fp32")
    loss, metrics = jax.jit(model.loss)(params["two_stages"], dataset.validation(0), None)
    loss = float(loss)
    told = json.loads((folder / "outputs/two_stages/evaluation-2.json").read_text())
    assert told["loss"] == pytest.approx(loss, rel=1e-5)
    assert told["accuracy"] == pytest.approx(float(metrics["accuracy"]), rel=1e-5)
    assert 0 < told["accuracy"] < 1
    assert told["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    assert told["bits_per_byte"] == pytest.approx(loss / np.log(2), rel=1e-5)
    assert told["rows"] == dataset.validation.num_rows
    assert f"{told['loss']:.6g}" in capsys.readouterr().out
    (folder / "other.txt").write_text("import os\n" * 2000)
    other = load([*words, "dataset.path=other.txt", "evaluate.path=other.json"])
    assert evaluate(other, make_console()) == 0
    assert json.loads(Path("other.json").read_text())["loss"] != told["loss"]
    with pytest.raises(ConfigError, match=r"the model are not those of run\.id=two_stages"):
        evaluate(load([*words, "model.num_heads=4"]), make_console())
