"""What it takes to add a model, a dataset or a cluster: a few lines, and no edit anywhere else.

They are those of recipes/README.md and conf/cluster/README.md, added to a copy of the project.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, read_page

from launcher.__main__ import main

NET, DATA, NET_OPTIONS, DATA_OPTIONS = (
    block.text for block in read_page("recipes/README.md").of("python")
)
NET_YAML, DATA_YAML = (block.text for block in read_page("recipes/README.md").of("yaml"))
(CLUSTER_YAML,) = (block.text for block in read_page("conf/cluster/README.md").of("yaml"))
MODEL = {"recipes/models/net/model.py": NET, "recipes/models/net/__init__.py": NET_OPTIONS}
MODEL |= {"conf/model/net.yaml": NET_YAML}
DATASET = {
    "recipes/datasets/data/dataset.py": DATA,
    "recipes/datasets/data/__init__.py": DATA_OPTIONS,
}
DATASET |= {"conf/dataset/data.yaml": DATA_YAML}
NEW = "model=net", "dataset=data", "train.eval_every=0", "wandb.mode=disabled"
IN_STAGES = "parallel=manual", "parallel.num_stages=2", "cluster=emulated", "cluster.gpus=2"


def num_lines(files: dict[str, str]) -> int:
    return sum(len(text.splitlines()) for text in files.values())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, to which the new files are added and of which none is edited."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("launcher", "recipes", "conf"):
        unbuilt = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unbuilt)
    for name, text in (MODEL | DATASET).items():
        assert not (copy / name).exists()
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
    return copy


def launcher(checkout: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_model_and_a_dataset_are_at_most_sixty_lines_each() -> None:
    assert num_lines(MODEL) <= 60
    assert num_lines(DATASET) <= 60


def test_their_settings_are_checked(checkout: Path, tmp_path: Path) -> None:
    result = launcher(checkout, tmp_path, "task=check", *NEW, *IN_STAGES)
    assert result.returncode == 0, result.stderr
    assert "model=net (2 layers), dataset=data" in result.stdout
    result = launcher(checkout, tmp_path, "task=check", *NEW, "model.widht=8")
    assert result.returncode == 2
    assert result.stderr == (
        "launcher: model.widht is not a setting of model=net (on the command line). "
        "Did you mean model.width?\n"
    )
    result = launcher(checkout, tmp_path, "--help")
    assert " | net | " in result.stdout


@pytest.mark.slow
def test_they_are_planned_for_and_trained(checkout: Path, tmp_path: Path) -> None:
    words = *NEW, *IN_STAGES, "train.steps=3"
    result = launcher(checkout, tmp_path, *words, "run.id=trained")
    assert result.returncode == 0, result.stdout + result.stderr
    trained = tmp_path / "outputs" / "trained"
    assert len(json.loads((trained / "plan.json").read_text())["stages"]) == 2
    assert len((trained / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_cluster_is_at_most_twelve_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_lines({"conf/cluster/mine.yaml": CLUSTER_YAML}) <= 12
    (tmp_path / "my_conf" / "cluster").mkdir(parents=True)
    (tmp_path / "my_conf" / "cluster" / "mine.yaml").write_text(CLUSTER_YAML)
    words = "model=mlp", "dataset=synthetic", "parallel=manual", "run.id=mine"
    mine = "--config-dir", "my_conf", "cluster=mine"
    monkeypatch.chdir(tmp_path)
    assert main(["task=plan", *mine, *words]) == 0
    plan = json.loads((tmp_path / "outputs" / "mine" / "plan.json").read_text())
    assert (plan["cluster"]["hosts"], plan["cluster"]["devices_per_host"]) == (2, 8)
    assert len(plan["stages"]) > 1
