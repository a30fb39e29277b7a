"""The README tells the truth: its commands are accepted, its Python runs, what it names exists."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

from launcher.__main__ import main
from launcher.config.compose import load, to_dict
from launcher.config.folders import CONF, find_groups
from launcher.train import checkpoint
from launcher.train.program import build_program

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


SHELL = [line for block in blocks("sh") for line in block.splitlines()]
COMMANDS = [line.partition("python -m launcher")[2] for line in SHELL if "-m launcher" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's reader stands: with what it tells him to write, and with the runs behind
    him that it has him make; of one no more than what settings are held against."""
    folder = tmp_path_factory.mktemp("reader")
    recipe, cluster = blocks("yaml")
    for group, text in (("recipe", recipe), ("cluster", cluster)):
        (folder / "my_conf" / group).mkdir(parents=True)
        (folder / "my_conf" / group / "mine.yaml").write_text(text)
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("Call me Ishmael. " * 1000)
    (folder / "README.md").write_text(README)
    (folder / "my_pkg").mkdir()
    (folder / "my_pkg" / "net.py").write_text(next(b for b in blocks("python") if "def build" in b))

    program = build_program(load(["recipe=smoke"]))
    state = checkpoint.copy_to_host(jax.jit(program.init)(program.seed))
    first, mine = folder / "outputs" / "first", folder / "outputs" / "mine"
    smoke, default = to_dict(load(["recipe=smoke"])), to_dict(load([]))
    for home, settings in ((first, smoke), (mine, default)):
        settings["run"]["id"] = home.name
        held = {"data": {"next_batch": 3}, "metrics": {"next_step": 4}, "config": settings}
        checkpoint.save(home / "checkpoints", 3, state, held)
    plan = {"cluster": {"hosts": 1, "devices_per_host": 2}}
    (first / "plan.json").write_text(json.dumps(plan))
    (first / "config.yaml").write_text(yaml.safe_dump(smoke))
    return folder


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_accepted(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # as `python -m` does
    arguments = shlex.split(command, comments=True)
    if "task=sweep_status" in arguments:  # whose settings have no meaning for another task
        assert load(arguments).task == "sweep_status"
        return
    assert main([*arguments, "task=check"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("snippet", blocks("python"))
def test_the_python_runs(snippet: str, folder: Path) -> None:
    flags = os.environ["XLA_FLAGS"].split()
    own = [flag for flag in flags if "device_count" not in flag]  # a user has set no devices
    environ = {**os.environ, "XLA_FLAGS": " ".join(own)}
    command = [sys.executable, "-c", snippet]
    result = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_every_option_is_named() -> None:
    for group, options in find_groups([CONF]).items():
        (row,) = re.findall(rf"^\| `{group}` \| (.*?) \|", README, re.MULTILINE)
        assert sorted(re.findall(r"`(\w+)`", row)) == options


def test_every_file_that_it_names_exists() -> None:
    named = re.findall(r"\b((?:conf|launcher|recipes|tests)/[\w/.]*\w/?)", README)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []
