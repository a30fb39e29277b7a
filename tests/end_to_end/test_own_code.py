"""Custom models in a user's package, trained by naming them: those of the pages in recipes/."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest

from launcher.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PAGE, MODELS_PAGE = (
    (ROOT / "recipes" / name).read_text(encoding="utf-8")
    for name in ("README.md", "models/README.md")
)
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE + MODELS_PAGE, re.MULTILINE | re.DOTALL)
MODULES = {
    "net": next(block for block in BLOCKS if "def build" in block),
    "normed": next(block for block in BLOCKS if "has_state=True" in block),
    "nnx_net": next(block for block in BLOCKS if "launcher.nnx" in block),
    "empty": "",
}
COMMAND = next(line for line in PAGE.splitlines() if "model.module=my_pkg.net" in line)
SMALL = "train.steps=4 train.eval_every=0 cluster=emulated cluster.gpus=2 wandb.mode=disabled"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user stands: beside `my_pkg`, and with recipes of another kind."""
    (tmp_path / "my_pkg").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "my_pkg" / f"{name}.py").write_text(text)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise AssertionError('the wrong recipes')")
    return tmp_path


def launcher(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.stress  # tests/end_to_end/test_cost_sheet.py trains it, too
def test_the_readmes_model_trains_in_two_stages(folder: Path) -> None:
    words = shlex.split(COMMAND.partition("-m launcher")[2])
    result = launcher(folder, *words, *SMALL.split(), "parallel=manual", "run.id=own")
    assert result.returncode == 0, result.stdout + result.stderr
    home = folder / "outputs" / "own"
    lines = (home / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["train/loss"] for line in lines]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert len(json.loads((home / "plan.json").read_text())["stages"]) == 2


@pytest.mark.stress  # as tests/train/test_model_state.py does in this process
@pytest.mark.parametrize("module", ["normed", "nnx_net"])
def test_the_readmes_models_with_state_train_and_go_on(folder: Path, module: str) -> None:
    words = shlex.split(
        COMMAND.partition("-m launcher")[2].replace("my_pkg.net", f"my_pkg.{module}")
    )
    small = "train.eval_every=2 train.eval_batches=1 cluster=emulated cluster.gpus=4 run.id=own"
    words += [*small.split(), "wandb.mode=disabled", "parallel=manual", "parallel.num_stages=2"]
    for steps in (2, 4):
        result = launcher(folder, *words, f"train.steps={steps}")
        assert result.returncode == 0, result.stdout + result.stderr
    home = folder / "outputs" / "own"
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[3]["train/loss"] < lines[0]["train/loss"]
    assert lines[3]["eval/loss"] < lines[1]["eval/loss"]
    with ocp.CheckpointManager(home / "checkpoints") as manager:
        stored = {step: manager.restore(step)["model_state"] for step in (2, 4)}
    moved = jax.tree.map(lambda a, b: bool((a != b).all()), stored[2], stored[4])
    assert jax.tree.leaves(moved) == [True, True]


def test_a_module_without_the_function_is_refused(folder: Path) -> None:
    words = shlex.split(COMMAND.partition("-m launcher")[2].replace("my_pkg.net", "my_pkg.empty"))
    result = launcher(folder, *words, "task=plan")
    assert result.returncode == 2
    assert result.stderr == (
        "launcher: model.module=my_pkg.empty has no function build; "
        "write one as recipes/models/mlp/model.py does\n"
    )
    assert not (folder / "outputs").exists()


def test_data_without_validation_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_pkg" / "data.py").write_text(
        "import numpy as np\n"
        "from launcher.recipes import Dataset\n"
        "def check(options, model_options, validation): pass\n"
        "def build(options, model_options, batch_size, seed):\n"
        "    x, y = np.ones((batch_size, 16), np.float32), np.ones((batch_size, 4), np.float32)\n"
        "    return Dataset(lambda k: {'x': x, 'y': y}, None, 'ones')\n"
    )
    words = shlex.split(COMMAND.partition("-m launcher")[2].replace("dataset=synthetic", ""))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert main([*words, "dataset=custom", "dataset.module=my_pkg.data"]) == 2
    assert capsys.readouterr().err == (
        "launcher: train.eval_every=50 evaluates, and dataset.name=custom holds nothing out for "
        "that; have its build return validation batches, or set train.eval_every=0\n"
    )
    assert not (folder / "outputs").exists()
