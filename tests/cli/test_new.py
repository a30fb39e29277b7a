"""`launcher new`: what is written is a project that works, and what cannot be one is refused."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launcher.__main__ import main
from launcher.cli.new import project_files, training_command, write_project
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.recipes import build_dataset, build_model
from launcher.recipes.models.decoding import Generator, Sampling, build_decoder

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("model.options.num_layers=2", "model.options.width=16", "model.options.sequence_length=16")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A new project, in which the command stands."""
    write_project(tmp_path / "sums")
    monkeypatch.chdir(tmp_path / "sums")
    monkeypatch.syspath_prepend(str(tmp_path / "sums"))
    yield tmp_path / "sums"
    for name in [name for name in sys.modules if name.partition(".")[0] == "sums"]:
        del sys.modules[name]


def words_of(line, name="sums"):
    return shlex.split(line.partition("-m launcher")[2])


def test_it_says_what_it_wrote_and_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "sums"]) == 0
    said = capsys.readouterr().out
    there = sorted(str(p.relative_to("sums")) for p in Path("sums").rglob("*") if p.is_file())
    assert there == sorted(project_files("sums"))
    assert all(f"  {path}\n" in said for path in there)
    assert said.endswith(f"  cd sums\n  {training_command('sums')}\n")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my-project", "is not a name that Python can import"),
        ("2fast", "is not a name that Python can import"),
        ("class", "is not a name that Python can import"),
        ("größe", "is not a name that Python can import"),
        ("_self_", "does not begin with a letter"),
        ("numpy", "is the name of an installed package"),
        ("recipes", "is the name of an installed package"),
        ("json", "is the name of an installed package"),
        ("null", "is a value in YAML, and no text"),
        ("nan", "is a value in YAML, and no text"),
    ],
)
def test_names_that_would_find_something_else_are_refused(
    tmp_path, monkeypatch, capsys, name, problem
):
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"launcher: launcher new: {name!r} {problem}. Choose another name")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_written_over(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "plain").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"full is not empty\. Name a folder that is not there"):
        write_project(tmp_path / "full")
    with pytest.raises(ConfigError, match="plain is a file"):
        write_project(tmp_path / "plain")
    with pytest.raises(ConfigError, match="plain/sums cannot be written: Not a directory"):
        write_project(tmp_path / "plain" / "sums")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["notes"]
    assert write_project(tmp_path / "empty")


def test_a_project_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    write_text = Path.write_text

    def on_a_full_disk(path, text, **given):
        if path.name == "data.py":
            write_text(path, text[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, text, encoding="utf-8")

    monkeypatch.setattr(Path, "write_text", on_a_full_disk)
    for name in ("sums", "empty"):
        with pytest.raises(ConfigError, match=f"{name} cannot be written: No space left on device"):
            write_project(tmp_path / name)
    assert [*tmp_path.iterdir()] == [tmp_path / "empty"]
    assert not any((tmp_path / "empty").iterdir())


def test_a_command_line_without_a_folder_teaches(capsys):
    assert main(["new"]) == 2
    assert main(["new", "a", "b"]) == 2
    assert capsys.readouterr().err.count("Write launcher new my_project.") == 2
    assert main(["new", "--help"]) == 0
    assert "launcher new my_project" in capsys.readouterr().out


def test_every_template_is_used():
    used = {path.rpartition("/")[2] for path in project_files("x")} | {"recipe.yaml", "package.py"}
    templates = (ROOT / "launcher" / "project").glob("*.jinja")
    assert {path.name.removesuffix(".jinja") for path in templates} <= used
    assert not any("{{" in content for content in project_files("x").values())


@pytest.mark.devices  # starts a process
def test_ruff_finds_nothing(project):
    ruff = shutil.which("ruff", path=os.path.dirname(sys.executable)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    for words in (["check"], ["format", "--check"]):
        found = subprocess.run([ruff, *words, "."], cwd=project, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_every_command_of_its_page_is_accepted(project, capsys):
    """`task=check` reads all settings; what a row says of the task is said before it."""
    page = (project / "README.md").read_text()
    (line,) = re.findall(r"^python -m launcher .*$", page, re.MULTILINE)
    shared = words_of(line)[:-1]
    assert shared == words_of(training_command("sums"))
    rows = re.findall(r"^\| `([\w.]+=[^`]*)` \|", page, re.MULTILINE)
    assert len(rows) == 7
    for row in rows:
        words = [word for word in shlex.split(row) if not word.startswith(("task=", "run.id="))]
        task = next((w for w in shlex.split(row) if w.startswith("task=")), "task=check")
        load([*shared[2:], *words, task, "run.id=first"], ["conf"])
    assert main([*shared, "task=check"]) == 0
    assert "not checked: the contents of sums.model and sums.data" in capsys.readouterr().out


@pytest.mark.devices
def test_its_model_reads_and_writes(project):
    config = load(
        [*words_of(training_command("sums"))[2:], *SMALL, "train.global_batch_size=8"], ["conf"]
    )
    batch = build_dataset(config.dataset, config.model, 8, 0).train(0)
    assert bytes(batch["tokens"][0]).count(b"+") >= 2
    model = build_model(config.model, "fp32")
    params = jax.jit(model.init)(jax.random.key(0))
    loss, metrics = jax.jit(model.loss)(params, batch, None)
    assert 4 < loss < 7  # ln 256 = 5.5
    assert 0 <= metrics["accuracy"] <= 1

    from sums.model import Network

    network = Network(**config.model.options, dtype=jnp.float32)
    decoder = build_decoder(config.model, "fp32")
    made = list(Generator(decoder, Sampling(0.0))(params, [list(b"3+4="), list(b"1")], 3))
    forward = jax.jit(lambda text: network.apply({"params": params}, text)[0])
    for prompt, row in zip((b"3+4=", b"1"), np.array(made).T, strict=True):
        text = [*prompt, *row]
        logits = forward(np.array([text + [0] * (8 - len(text))]))  # what follows changes nothing
        greedy = np.argmax(logits[len(prompt) - 1 : len(text) - 1], axis=-1)
        assert list(row) == greedy.tolist()


@pytest.mark.slow
@pytest.mark.devices
def test_it_trains_evaluates_and_writes_in_a_process(project):
    """By the command of its page, from an empty environment but for the installation."""

    def launched(*words):
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        ran = [sys.executable, "-m", "launcher", *words_of(training_command("sums")), *words]
        done = subprocess.run(
            ran, cwd=project, env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    few = ("train.steps=2", "cluster=emulated", "cluster.gpus=2", "wandb.mode=disabled")
    assert "plan: auto" in launched(*SMALL, *few, "run.id=first")
    summary = json.loads((project / "outputs" / "first" / "summary.json").read_text())
    assert (summary["steps"], summary["exit_reason"]) == (2, "done")
    assert (project / "outputs" / "first" / "samples" / "2.txt").read_text().startswith("3+4=")
    said = launched("task=generate", "run.id=first", "prompt='8+8='")
    assert "8+8=" in said
    assert "accuracy" in launched("task=evaluate", "run.id=first", *SMALL)
