"""Hydra's flags: what is shown, where it was said, and what a shell offers to complete."""

import subprocess
import sys

import pytest
import yaml

from launcher.__main__ import main
from launcher.config.compose import load, to_written
from launcher.config.folders import CONF


@pytest.fixture(autouse=True)
def _as_it_is_called(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launcher"])


def shown(capfd, *words):
    assert main(words) == 0
    return capfd.readouterr().out


@pytest.mark.parametrize(
    ("info", "line"),
    [
        ("searchpath", f"| main     | file://{CONF}"),
        ("defaults", "| recipe/smoke "),
        ("defaults-tree", "    recipe: smoke"),
        ("plugins", "\t\tBasicSweeper"),
        ("config", "  num_micro_batches: 2"),
        ("all", "Hydra 1."),
    ],
)
def test_info(info, line, capfd):
    words = ["recipe=smoke", "parallel.num_micro_batches=2"]
    assert f"\n{line}" in "\n" + shown(capfd, "--info", info, *words)


def test_the_folder_of_the_user_is_searched_first(tmp_path, capfd):
    out = shown(capfd, "--info", "searchpath", "--config-dir", str(tmp_path))
    assert out.index(str(tmp_path)) < out.index(str(CONF))


def test_hydras_settings_beside_ours(capsys, monkeypatch):
    out = shown(capsys, "--cfg", "hydra", "-p", "hydra.sweeper", "hydra/sweeper=optuna")
    assert yaml.safe_load(out)["n_trials"] == 20
    both = yaml.safe_load(shown(capsys, "--cfg", "all", "recipe=smoke"))
    assert both.pop("hydra")["job"]["name"] == "launcher"
    assert both == to_written(load(["recipe=smoke"]))
    monkeypatch.setenv("BOOKS", "/data/books")
    words = ("--cfg", "job", "-p", "dataset", "dataset=text", "dataset.path=${oc.env:BOOKS}")
    assert yaml.safe_load(shown(capsys, *words))["path"] == "${oc.env:BOOKS}"
    assert yaml.safe_load(shown(capsys, *words, "--resolve"))["path"] == "/data/books"


@pytest.mark.devices  # a process, as Hydra sets up logging for its help, and so closes handlers
def test_hydra_help_names_its_flags_and_groups():
    command = [sys.executable, "-m", "launcher", "--hydra-help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 'eval "$(launcher -sc install=bash)"' in out
    assert "hydra/sweeper: basic, optuna" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--info", "all", "train.stepz=3"), "train.stepz is not a setting"),
        (("--cfg", "hydra", "train.steps=0"), "train.steps must be at least 1"),
        (("--cfg", "hydra", "-p", "hydra.nothing"), "--package hydra.nothing is not a section"),
        (("--resolve",), "--resolve is for --cfg"),
        (("--info", "all", "-m"), "--info, --hydra-help and -sc stand alone"),
        (("-sc", "install=tcsh"), "-sc install=tcsh: no such shell. Use bash, zsh, fish."),
        (("-sc", "install"), "-sc takes one of install=SHELL, uninstall=SHELL"),
        (("-sc", "query=bash"), "-sc query is for a shell, which sets COMP_LINE"),
    ],
)
def test_what_is_wrong_ends_with_two(words, error, capfd):
    assert main(words) == 2
    assert f"launcher: {error}" in capfd.readouterr().err


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("launcher paral", {"parallel=", "parallel."}),
        ("launcher model=mlp optimizer=ada", {f"optimizer={name}" for name in ("adam", "adamw")}),
        ("launcher -m train.st", {"train.steps="}),
        ("launcher cluster=slurm cluster.slurm.par", {"cluster.slurm.partition="}),
        ("launcher recipe=smoke --config-dir {mine} recipe=mi", {"recipe=mine"}),
        ("launcher train.steps=nonsense=1 trai", set()),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_is_offered(shell, line, offered, tmp_path, monkeypatch, capfd):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\ntrain: {steps: 3}\n")
    monkeypatch.setenv("COMP_LINE", line.format(mine=tmp_path))
    found = set(shown(capfd, "-sc", f"query={shell}").split())
    assert found >= offered
    assert offered or not found
    assert capfd.readouterr().err == ""
