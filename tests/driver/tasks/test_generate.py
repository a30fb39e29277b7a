"""`task=generate`: whatever plan has trained a model, the text is that of a plain loop."""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from whole_logits import whole_logits

from launcher import checkpoint
from launcher.config.compose import load, to_dict
from launcher.config.errors import ConfigError
from launcher.driver.tasks import generate
from launcher.driver.tasks.evaluate import EvaluateTask, means
from launcher.driver.tasks.generate import GenerateTask, decoded_after
from launcher.inference.model_workers import EvaluationWorker
from launcher.inference.placed_model import ModelPlaces, layout_of, text_generator
from launcher.inference.stored_model import stored_plan
from launcher.recipes import InputError, build_dataset, build_model
from launcher.recipes.data.corpus.tokenizers import plain_bytes
from launcher.report.console import make_console

sys.path.insert(0, str(Path(__file__).parents[2] / "train"))
from checkpoint_peer import Trainee

GPT_WORDS = (
    *("model=gpt", "dataset=text", f"dataset.path={__file__}", "model.hidden_size=16"),
    *("model.num_layers=2", "model.num_heads=2", "model.sequence_length=64", "cluster=emulated"),
    *("train.global_batch_size=8", "optimizer.learning_rate=3e-2", "train.eval_every=0"),
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
# The words of each run, by its name: GPT by every plan, mixtures of experts by some.
RUNS = {name: [*GPT_WORDS, *words] for name, words in PLANS.items()} | {
    f"{kind}-{name}": [
        *("model=moe", *GPT_WORDS[1:], "model.num_experts=4", "model.mlp_size=16"),
        *(f"model.capacity_factor={factor}", *PLANS[name]),
    ]
    for kind, factor in (("moe", 1), ("dropless", 0))
    for name in ("one", "two_stages", "zero3")
}
# One device: `test_a_text_is_printed_under_the_runs_own_settings`.
FAST = ("two_stages",)
SLOW = "three_d", "dropless-zero3"
GREEDY = "generate.temperature=0", "generate.max_new_tokens=20"


class Runs(dict):
    """The parameters, in this process, of a run by each plan; made when they are asked for."""

    def __init__(self, folder):
        self._folder = folder

    def __missing__(self, name):
        trainee = Trainee(RUNS[name], model=())
        home = self._folder / "outputs" / name
        (home / "checkpoints").mkdir(parents=True)
        trainee.create_and_save(str(home / "checkpoints"))
        settings = load([*RUNS[name], f"run.id={name}"])
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
    assert GenerateTask().run(load(["task=generate", *words]), Console(quiet=True)) == 0
    return capsys.readouterr().out


@functools.cache
def logits_of(*words):
    """The whole model on one device: from parameters and tokens to logits; experts drop none."""
    return jax.jit(functools.partial(whole_logits, load(words).model))


def plain_loop(params, prompt, count, words=GPT_WORDS):
    """The text that the whole model goes on with, one token after another, on one device."""
    forward = logits_of(*words)
    text = list(prompt)
    for _ in range(count):
        padded = np.array([text + [0] * (64 - len(text))])  # what follows changes nothing
        logits = np.asarray(forward(params, padded))
        text.append(int(logits[0, len(text) - 1].argmax()))
    return text


def spread(folder, name):
    """A run's model as its plan puts it on this process's devices, and its parameters there."""
    home = folder / "outputs" / name
    settings = load(RUNS[name])
    greedy = dataclasses.replace(settings.generate, temperature=0.0)
    settings = dataclasses.replace(settings, generate=greedy)
    stored = checkpoint.FinishedModel(home / "checkpoints" / "2", settings.optimizer.lora)
    layout = layout_of(stored_plan(home), stored.shapes, 8)
    places = ModelPlaces(layout, jax.devices())
    return text_generator(settings, places), places.load(stored)["params"], layout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in FAST else by_hand)
        for n in RUNS
        for by_hand in [pytest.mark.slow if n in SLOW else pytest.mark.stress]
    ],
)
def test_greedy_tokens_are_those_of_a_plain_loop_under_every_plan(runs, name):
    folder, params = runs
    assert params[name]
    model, placed, layout = spread(folder, name)
    prompts = [list(b"def "), list(b"x")]
    made = np.array(list(model(placed, prompts, 20))).T.tolist()
    assert [p + m for p, m in zip(prompts, made, strict=True)] == [
        plain_loop(params[name], prompt, 20, RUNS[name]) for prompt in prompts
    ]
    leaves = jax.tree.leaves(placed)
    first = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    count, share = SPREAD[name.split("-")[-1]]
    assert layout.num_devices == count
    assert first <= share * sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize(
    "words",
    [
        ("run.id=one",),
        ("run.id=two_stages", "cluster.gpus=1"),  # all stages on one device
        pytest.param(
            ("run.id=two_stages", "cluster.hosts=2", "cluster.gpus=2"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_text_is_printed_under_the_runs_own_settings(runs, words, monkeypatch, capsys):
    folder, params = runs
    text = bytes(plain_loop(params[words[0].partition("=")[2]], b"def ", 20))
    monkeypatch.chdir(folder)
    told = generated(capsys, *words, "prompt='def '", *GREEDY)
    assert told == text.decode("utf-8", "replace") + "\n"


def test_prompts_of_a_file_are_read_together(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs[0])
    Path("prompts.txt").write_text("def f\nimport os\n")
    words = "run.id=one", "generate.max_new_tokens=5", "generate.temperature=0"
    both = generated(capsys, *words, "generate.prompts=prompts.txt")
    alone = [generated(capsys, *words, f"prompt={p}") for p in ("def f", "import os")]
    assert both == "\n".join(alone) + "\n"
    assert generated(capsys, *words, "prompt=[def f,import os]") == both


def answering(monkeypatch, *columns):
    """Have the model of the run `one` go on with prompts by these bytes."""

    @contextlib.contextmanager
    def answers(*_):
        yield iter([list(row) for row in zip(*columns, strict=True)])

    monkeypatch.setattr(generate, "model_answers", answers)


def test_what_is_printed_holds_no_control_characters(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs[0])
    masked = "a\ufffd[2Jb\n\tc\ufffd"
    answering(monkeypatch, b"\x1b[2Jb\n\tc\x07")
    assert generated(capsys, "run.id=one", "prompt=a") == f"{masked}\n"
    answering(monkeypatch, *[b"\x1b[2Jb\n\tc\x07"] * 2)
    words = "run.id=one", "prompt=[a,a]", "generate.max_new_tokens=8"
    assert generated(capsys, *words) == f"{masked}\n\n" * 2


def test_several_texts_tell_how_far_they_are(runs, monkeypatch):
    monkeypatch.chdir(runs[0])
    answering(monkeypatch, b"bcd", b"fgh")
    told, done = [], []

    @contextlib.contextmanager
    def status(console, text):
        told.append(text)
        yield lambda *progress: done.append(progress)

    monkeypatch.setattr(generate, "status", status)
    words = "task=generate", "run.id=one", "generate.max_new_tokens=3", "prompt=[a,e]"
    assert GenerateTask().run(load(words), Console(quiet=True)) == 0
    assert (told, done) == (["compiling", "writing"], [(2, 3, "tokens"), (3, 3, "tokens")])


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
        GenerateTask().run(load(["task=generate", *words]), Console(quiet=True))


def test_a_model_without_a_decoder_is_refused_before_any_process_is_started(runs, monkeypatch):
    folder, params = runs
    assert params["two_stages"]
    shutil.copytree(folder / "outputs" / "two_stages", folder / "outputs" / "encoder")
    settings = load(["model=bert", *GPT_WORDS[1:3], "run.id=encoder"])
    (folder / "outputs" / "encoder" / "config.yaml").write_text(yaml.safe_dump(to_dict(settings)))
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=r"model\.name=bert cannot generate text: it has no dec"):
        GenerateTask().run(load(["task=generate", "run.id=encoder"]), Console(quiet=True))


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
    assert params["one"]
    monkeypatch.chdir(folder)
    words = "task=evaluate", "run.id=one"
    assert EvaluateTask().run(load(words), make_console()) == 0
    config = load(words)
    assert (config.model, config.dataset) == (load(GPT_WORDS).model, load(GPT_WORDS).dataset)
    dataset = build_dataset(config.dataset, config.model, 1000, 0)
    model = build_model(config.model, "fp32")
    loss, metrics = jax.jit(model.loss)(params["one"], dataset.validation(0), None)
    loss = float(loss)
    told = json.loads((folder / "outputs/one/evaluation-2.json").read_text())
    assert told["loss"] == pytest.approx(loss, rel=1e-5)
    assert told["accuracy"] == pytest.approx(float(metrics["accuracy"]), rel=1e-5)
    assert 0 < told["accuracy"] < 1
    assert told["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    assert told["bits_per_byte"] == pytest.approx(loss / np.log(2), rel=1e-5)
    assert told["rows"] == dataset.validation.num_rows
    assert f"{told['loss']:.6g}" in capsys.readouterr().out
    (folder / "other.txt").write_text("import os\n" * 2000)
    other = [*words, "dataset.path=other.txt"]
    assert EvaluateTask().run(load([*other, "evaluate.path=other.json"]), make_console()) == 0
    assert json.loads(Path("other.json").read_text())["loss"] != told["loss"]
    for _ in range(2):
        of_other = load([*other, "dataset.validation_fraction=0.3"])
        assert EvaluateTask().run(of_other, make_console()) == 0
    kept = {file.name for file in Path("outputs/one").glob("evaluation-2*")}
    assert len(kept) == 2  # one of each data
    assert all(re.fullmatch(r"evaluation-2(-text-[0-9a-f]{8})?\.json", name) for name in kept)
    assert json.loads(Path("outputs/one/evaluation-2.json").read_text()) == told
    (folder / "talks.jsonl").write_text('{"text": "one"}\n')
    unprepared = load([*words, "dataset=jsonl", "dataset.path=talks.jsonl"])
    with pytest.raises(InputError, match=r"has 257 tokens, more than model\.vocab_size=256"):
        EvaluateTask().run(unprepared, make_console())
    assert Path("talks.jsonl.tokens/meta.json").exists()
    with pytest.raises(ConfigError, match=r"model\.num_heads has no effect: .* uses the run's, 2"):
        load([*words, "model.num_heads=4"])
    with pytest.raises(ConfigError, match=r"evaluate\.path=no/a\.json cannot be made: no is no"):
        EvaluateTask().run(load([*words, "evaluate.path=no/a.json"]), make_console())


@pytest.mark.parametrize("name", ["two_stages", pytest.param("zero3", marks=pytest.mark.stress)])
def test_an_evaluation_is_the_same_where_no_device_holds_the_model(runs, name, monkeypatch):
    folder, params = runs
    assert params[name]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(checkpoint.FinishedModel, "whole", None)
    placed = []
    load_model = ModelPlaces.load
    monkeypatch.setattr(
        ModelPlaces, "load", lambda *given: placed.append(load_model(*given)) or placed[-1]
    )
    config = load(["task=evaluate", f"run.id={name}"])
    source = folder / "outputs" / name / "checkpoints" / "2"
    stored = checkpoint.FinishedModel(source, config.optimizer.lora)
    layout = layout_of(stored_plan(folder / "outputs" / name), stored.shapes, 8)
    worker = EvaluationWorker()
    worker.begin(to_dict(config), str(source), layout, 2, 3)
    found = means(iter(worker.more, None))
    dataset = build_dataset(config.dataset, config.model, 8, 0)
    held = [dataset.validation(k) for k in range(2)]
    rows = {key: np.concatenate([batch[key] for batch in held]) for key in held[0]}
    loss, _ = jax.jit(build_model(config.model, "fp32").loss)(params[name], rows, None)
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert found["rows"] == len(rows["tokens"]) == dataset.validation.num_rows
    leaves = jax.tree.leaves(placed)
    first = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert first <= SPREAD[name][1] * sum(leaf.nbytes for leaf in leaves)


@pytest.mark.slow
def test_workers_evaluate_together(runs, monkeypatch):
    folder, params = runs
    assert params["two_stages"]
    monkeypatch.chdir(folder)
    words = "task=evaluate", "run.id=two_stages", "evaluate.batches=2", "evaluate.path=it.json"
    assert (
        EvaluateTask().run(load([*words, "cluster.hosts=2", "cluster.gpus=2"]), make_console()) == 0
    )
    config = load(words)
    dataset = build_dataset(config.dataset, config.model, 16, 0)
    model = build_model(config.model, "fp32")
    loss, _ = jax.jit(model.loss)(params["two_stages"], dataset.validation(0), None)
    assert json.loads(Path("it.json").read_text())["loss"] == pytest.approx(float(loss), rel=1e-5)
