"""The README tells the truth: its commands are accepted, its Python runs, what it names exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from launcher.__main__ import main
from launcher.config.compose import load
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
    """Where the README's reader stands: with the YAML of the README, and a run behind him."""
    folder = tmp_path_factory.mktemp("reader")
    recipe, cluster = blocks("yaml")
    for group, text in (("recipe", recipe), ("cluster", cluster)):
        (folder / "my_conf" / group).mkdir(parents=True)
        (folder / "my_conf" / group / "mine.yaml").write_text(text)
    program = build_program(load(["recipe=smoke"]))
    state = jax.jit(program.init)(program.seed)
    checkpoint.save(folder / "outputs" / "first" / "checkpoints", 3, checkpoint.copied(state), {})
    return folder


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_accepted(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    arguments = shlex.split(command, comments=True)
    assert main([*arguments, "task=check"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("snippet", blocks("python"))
def test_the_python_runs(snippet: str, folder: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
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
