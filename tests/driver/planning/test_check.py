"""`task=check` says what the run would say, as far as that can be said at once, and what not."""

import functools
import json
import os
from pathlib import Path

import jax.numpy as jnp
import pytest
import yaml

from launcher import checkpoint
from launcher.__main__ import main
from launcher.checkpoint.train_state import TrainState
from launcher.config.compose import load, to_dict
from launcher.config.errors import ConfigError
from launcher.driver.planning.check import check
from launcher.driver.run import reported
from launcher.recipes import InputError

SMOKE = ("recipe=smoke", "dataset=synthetic")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@functools.cache
def settings_of_first() -> str:
    config = load(
        [
            "recipe=mlp_synthetic",
            "model.num_layers=3",
            "train.global_batch_size=16",
            "parallel=manual",
            "cluster=emulated",
            "cluster.gpus=2",
        ]
    )
    return yaml.safe_dump(to_dict(config))


@pytest.fixture
def first(here: Path) -> Path:
    """A run's folder, as far as settings and plan go: a small MLP's, on two devices."""
    folder = here / "outputs" / "first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(settings_of_first())
    plan = {"cluster": {"hosts": 1, "devices_per_host": 2}, "stages": []}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def said(*words: str) -> tuple[int, str]:
    try:
        return 0, "; ".join(check(load(words), os.environ))
    except (ConfigError, InputError, OSError) as error:
        _, text, code = reported(error)
        return code, text


def test_what_was_not_looked_at_is_said(here: Path) -> None:
    (here / "my_pkg").mkdir()
    (here / "my_pkg" / "net.py").write_text("raise SystemExit('loaded')")
    custom = ("model=custom", "model.module=my_pkg.net", "allow_modules=[my_pkg]")
    custom += ("model.options={input_size: 2, output_size: 2}",)
    plan = "the plan and the memory that it needs (task=plan)"
    assert said(*SMOKE) == (0, f"2 emulated CPU devices, as asked; not checked: {plan}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(here)
        assert said(*custom, "dataset=synthetic")[1].endswith(
            f"not checked: the contents of my_pkg.net; {plan}"
        )
    assert said(*SMOKE, "cluster=h100_8")[1] == (
        f"not checked: the devices, as cluster=h100_8 is not here; {plan}"
    )
    patterns = ("optimizer.groups=[{pattern: nothing.*, learning_rate: 1}]",)
    patterns += ("optimizer.train_only=nothing",)
    assert said(*SMOKE, *patterns)[1].endswith(
        "; not checked: whether a parameter fits optimizer.groups and optimizer.train_only; " + plan
    )
    assert "a parameter fits optimizer.lora.pattern;" in said(*SMOKE, "optimizer.lora.rank=2")[1]
    assert f"not checked: the resources of Slurm; {plan}" in said(*SMOKE, "cluster=slurm")[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("parallel=data", "train.global_batch_size=6"), "shared evenly by cluster.gpus=4 devices"),
        (
            ("parallel=manual", "parallel.num_stages=5", "model.num_layers=6"),
            "num_stages=5 is more than cluster.gpus=4",
        ),
        (("cluster.gpus=1000",), "cluster.gpus=1000, but there is no GPU here"),
        (("train.init_from=nowhere",), "train.init_from=nowhere does not exist"),
        (("run.id=a", "run.resume=must"), "run.resume=must finds nothing"),
        (("model=custom", "model.module=no.where", "allow_modules=[no]"), "no.where is not found"),
        (("hooks=[json]", "allow_modules=[json]"), "such as json.MyCallback"),
        (("dataset=custom", "dataset.module=json.x", "allow_modules=[json]"), "x is not found"),
    ],
)
def test_what_is_wrong_here_is_said_at_once(words: tuple[str, ...], problem: str) -> None:
    code, text = said("dataset=synthetic", *words)
    assert (code, problem in text) == (2, True), text


def test_a_run_that_is_complete(here: Path) -> None:
    config = load([*SMOKE, "run.id=one"])
    folder = here / "outputs" / "one" / "checkpoints"
    state = TrainState(jnp.int32(3), {"w": jnp.ones(2)}, {}, jnp.zeros(2, jnp.uint32))
    held = {"data": {"next_batch": 3}, "metrics": {"next_step": 4}, "config": to_dict(config)}
    checkpoint.save(folder, 3, checkpoint.copy_to_host(state), held)
    assert said(*SMOKE, "run.id=one")[1].startswith("run one is complete, 3 of 3 steps; ")
    assert "not checked: the arrays of the checkpoint" in said(*SMOKE, "run.id=one")[1]
    code, text = said(*SMOKE, "run.id=one", "run.seed=1")
    assert (code, text.startswith("run.seed=1 does not fit run.id=one")) == (2, True)


def test_a_sweep_is_checked_run_by_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "task=check", *SMOKE, "train.init_from=null,nowhere"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("launcher: train.init_from=nowhere: train.init_from=nowhere does not")
    words = ("model.num_layers=2,0", "train.init_from=null,nowhere")
    assert main(["-m", "task=check", *SMOKE, *words]) == 2
    told = [line.split(": ", 2) for line in capsys.readouterr().err.splitlines()]
    assert [(label, what.split(" ")[0]) for _, label, what in told] == [
        ("model.num_layers=0 train.init_from=null", "model.num_layers"),
        ("model.num_layers=0 train.init_from=nowhere", "model.num_layers"),
        ("model.num_layers=2 train.init_from=nowhere", "train.init_from=nowhere"),
    ]
    assert main(["-m", "train.steps=1,0", "train.log_every=3"]) == 2
    assert capsys.readouterr().err.startswith("launcher: train.steps=0: train.steps ")
    assert main(["-m", "task=check", *SMOKE, "run.id=a,b"]) == 2
    assert "run.id and run.dir cannot be swept" in capsys.readouterr().err


def test_a_plan_takes_what_is_not_said_from_its_run(first: Path) -> None:
    replay = ("parallel=replay", f"parallel.plan={first}/plan.json")
    config = load(replay)
    theirs = yaml.safe_load((first / "config.yaml").read_text())
    ours = to_dict(config)
    for section in ("model", "dataset", "optimizer"):
        assert ours[section] == theirs[section]
    assert (config.train.steps, config.train.global_batch_size) == (100, 16)
    assert (config.train.eval_every, config.cluster.gpus) == (50, 2)
    code, text = said(*replay)
    assert (code, text.endswith("whether the plan fits the model's program")) == (0, True)
    common = "train.global_batch_size=16, train.precision=fp32, train.non_finite=stop"
    common += ", train.spikes=off; "
    common = f"model, dataset, optimizer, cluster, train.steps=100, {common}"
    assert f"as in {first}/config.yaml, beside the plan: {common}" in text


def test_a_word_on_a_key_leaves_its_section_the_runs(first: Path, here: Path) -> None:
    (here / "mine" / "recipe").mkdir(parents=True)
    recipe = "# @package _global_\noptimizer: {clip_norm: 0.5}\ntrain: {non_finite: rollback}\n"
    (here / "mine" / "recipe" / "mine.yaml").write_text(recipe)
    replay = ["parallel=replay", f"parallel.plan={first}/plan.json", "recipe=mine"]
    theirs = to_dict(load(replay[:2]))
    ours = to_dict(load([*replay, "cluster.step_timeout=900", "model.num_layers=4"], ["mine"]))
    for section, key, value in (
        ("cluster", "step_timeout", 900.0),
        ("model", "num_layers", 4),
        ("optimizer", "clip_norm", 0.5),
        ("train", "non_finite", "rollback"),
    ):
        assert ours[section] == {**theirs[section], key: value} != theirs[section]
    dropped = {**theirs, "model": to_dict(load(["model.dropout=0.5"]))["model"]}
    (first / "config.yaml").write_text(yaml.safe_dump(dropped))
    sized = to_dict(load([*replay[:2], "model.size=micro"]))["model"]  # and its dimensions
    assert (sized["dropout"], sized["num_layers"]) == (0.5, 6)


@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize(
    ("words", "differing"),
    [
        (("model=gpt", "dataset=synthetic"), "model=mlp and not gpt"),
        (("recipe=mlp_synthetic", "model.num_layers=5"), "model.num_layers=3 and not 5"),
        (
            ("train.steps=7", "train.precision=bf16"),
            "train.precision=fp32 and not bf16, train.steps=100 and not 7",
        ),
        (("recipe=mlp_synthetic",), "train.global_batch_size=16 and not 64"),
        (("optimizer=sgd",), "optimizer=adamw and not sgd"),
        (("train.non_finite=skip",), "train.non_finite=stop and not skip"),
    ],
)
def test_a_plan_of_another_program_names_what_differs(
    words: tuple[str, ...], differing: str, first: Path
) -> None:
    code, text = said("parallel=replay", f"parallel.plan={first}/plan.json", *words)
    assert (code, "was made for another program: with " in text) == (2, True)
    assert differing in text


def test_a_plan_for_other_devices(first: Path) -> None:
    code, text = said("parallel=replay", f"parallel.plan={first}/plan.json", "cluster.gpus=3")
    assert (code, "is for 1 hosts × 2 devices; here are 1 × 3" in text) == (2, True)


@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize("text", ["", "[", "a: b", "model: 3", "[]", "\x00"])
def test_a_config_that_is_none_is_not_taken(text: str, first: Path) -> None:
    (first / "config.yaml").write_text(text)
    assert load(["parallel=replay", f"parallel.plan={first}/plan.json"]).model.name == "gpt"


@pytest.mark.slow
def test_a_plan_is_replayed_by_its_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("recipe=mlp_synthetic", "parallel=manual", "cluster=emulated", "cluster.gpus=2")
    assert main(["task=plan", "run.id=one", "optimizer.warmup_steps=3", *words]) == 0
    replay = ("parallel=replay", "parallel.plan=outputs/one/plan.json")
    assert main(["task=plan", "run.id=two", *replay]) == 0
    capsys.readouterr()
    assert main(["task=plan", "run.id=two", *replay, "train.global_batch_size=32"]) == 2
    told = "was made for another program: with train.global_batch_size=64 and not 32. Set that as"
    assert told in capsys.readouterr().err
