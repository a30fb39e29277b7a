"""Settings that come from the environment: used by their value, written as what asks for it."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from launcher.__main__ import main
from launcher.config.compose import load, load_frozen, redacted, to_dict, to_written
from launcher.config.environment import unresolved
from launcher.config.errors import ConfigError
from launcher.submit.job import script_for

SECRET = 's3cret it\'s "x" $HOME'
RECIPE = """# @package _global_
defaults: [override /model: custom, override /dataset: text]
model: {module: m, options: {a: ["${oc.env:SECRET}", 1], b: "x-${model.options.a[0]}", c: 1}}
dataset: {path: "${oc.env:NOWHERE,/data}/${oc.env:SECRET}"}
train: {steps: "${oc.env:STEPS}", init_from: "${dataset.path}"}
optimizer: {learning_rate: "${oc.decode:${oc.env:RATE}}"}
"""
WORDS = ("recipe=mine", "allow_modules=[m]")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"SECRET": SECRET, "STEPS": "4711", "RATE": "0.0815"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "my_conf" / "recipe").mkdir(parents=True)
    (tmp_path / "my_conf" / "recipe" / "mine.yaml").write_text(RECIPE)
    return tmp_path


def test_values_are_used_and_not_written(here):
    config = load(WORDS, ["my_conf"])
    assert config.model.options == {"a": [SECRET, 1], "b": f"x-{SECRET}", "c": 1}
    assert config.dataset.path == config.train.init_from == f"/data/{SECRET}"
    assert (config.train.steps, config.optimizer.learning_rate) == (4711, 0.0815)
    for tree in (to_written(config), redacted(config)):
        text = json.dumps(tree)
        assert [value for value in (SECRET[:6], "4711", "0.0815") if value in text] == []
        assert tree["model"]["options"]["a"] == ["${oc.env:SECRET}", 1]
        assert tree["train"]["steps"] == "${oc.env:STEPS}"
    assert to_dict(config)["train"]["steps"] == 4711  # for the run's own processes


def test_a_job_resolves_them_where_it_reads_them(here, monkeypatch, capsys):
    assert main(["--config-dir", "my_conf", *WORDS, "--cfg", "job"]) == 0
    Path("config.yaml").write_text(capsys.readouterr().out)
    assert load_frozen(Path("config.yaml"), WORDS[1:]) == load(WORDS, ["my_conf"])
    monkeypatch.setenv("STEPS", "12")
    config = load_frozen(Path("config.yaml"), WORDS[1:])
    assert config.train.steps == 12
    assert to_written(config)["train"]["steps"] == "${oc.env:STEPS}"
    monkeypatch.delenv("STEPS")
    assert main(["--frozen", "config.yaml", WORDS[1]]) == 2
    err = capsys.readouterr().err
    assert err == (
        "launcher: train.steps asks for the environment variable STEPS, which is not set "
        "(in config.yaml). Set it, or say what stands in for it: ${oc.env:STEPS,VALUE}.\n"
    )


def test_a_frozen_file_may_hold_settings_that_have_been_deleted(here):
    tree = to_written(load([]))
    tree["sweep"] |= {"stop_early": "never", "resubmit": False}
    Path("config.yaml").write_text(yaml.safe_dump(tree))
    assert load_frozen(Path("config.yaml")) == load([])


@pytest.mark.parametrize(
    "text",
    ["${x}", r"\${x}", r"\\${x}", "a\\", r"a\b${y}c\d", "${", "x ${ y", "$x", "${oc.env:STEPS}"],
)
def test_other_text_is_read_as_it_was(text):
    tree = unresolved({"a": [text]}, {})
    assert OmegaConf.to_container(OmegaConf.create(tree), resolve=True) == {"a": [text]}


def test_what_was_decided_since_is_written(here):
    config = load([*WORDS, "task='${oc.env:NOWHERE,plan}'"], ["my_conf"])
    assert to_written(config)["task"] == "${oc.env:NOWHERE,plan}"
    assert to_written(replace(config, task="train"))["task"] == "train"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("run: {id: '${oc.env:STEPS}'}", "run.id is shown and sent to others"),
        ("wandb: {tags: [a, '${oc.env:SECRET}']}", "wandb.tags is shown and sent to others"),
        ("wandb: {name: 'x-${run.dir}'}\nrun: {dir: '${oc.env:SECRET}'}", "wandb.name is shown"),
        ("model: {sizes: {nano: {num_heads: '${oc.env:STEPS}'}}}", "model.sizes.nano.num_heads is"),
        ("train: '${oc.create:{steps: ${oc.env:STEPS}}}'", "train is a whole section"),
        ("cluster: {gpus: '${oc.env:STEPS}'}", "cluster.gpus is written into the job's script"),
        ("cluster: {slurm: {setup: ['a ${oc.env:SECRET}']}}", "cluster.slurm.setup is written"),
        (
            "cluster: {slurm: {env: {A: '${oc.decode:${oc.env:QUOTED}}'}}}",
            "cluster.slurm.env.A is more than a job's script can ask for",
        ),
    ],
)
def test_where_the_value_itself_would_be_given_away_it_is_refused(text, told, monkeypatch):
    monkeypatch.setenv("QUOTED", "'4711'")
    recipe = f"# @package _global_\ndefaults: [override /cluster: slurm]\n{text}\n"
    Path("my_conf/recipe/mine.yaml").write_text(recipe)
    with pytest.raises(ConfigError) as error:
        load([WORDS[0], "allow_commands=true"], ["my_conf"])
    assert str(error.value).startswith(told)
    assert "(in my_conf/recipe/mine.yaml:" in str(error.value)


@pytest.mark.devices
def test_a_jobs_script_asks_for_the_variable(here):
    word = "cluster.slurm.env={KEY: 'it-${oc.env:SECRET}s', PLAIN: x}"
    config = load(["cluster=slurm", "run.id=mine", word])
    script = script_for(config)
    assert SECRET[:6] not in script
    show = 'printf "%s" "$KEY"'
    head = script.partition("\n# One task on each node")[0] + show
    told = subprocess.run(["bash", "-c", head], capture_output=True, text=True, check=True)
    assert told.stdout == f"it-{SECRET}s"
    without = subprocess.run(
        ["bash", "-c", head], capture_output=True, text=True, check=False, env={}
    )
    assert without.returncode
    assert "SECRET: the run takes it from the environment" in without.stderr
    if shutil.which("shellcheck"):
        (here / "job.sbatch").write_text(script)
        subprocess.run(["shellcheck", "job.sbatch"], check=True)
    Path("config.yaml").write_text(yaml.safe_dump(to_written(config)))
    frozen = load_frozen(Path("config.yaml"), ["allow_commands=true"])
    assert frozen.cluster.slurm.env == {"KEY": f"it-{SECRET}s", "PLAIN": "x"}
