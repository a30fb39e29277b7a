"""What it takes to add a part: a few lines, and no edit anywhere else.

A model, a dataset and a cluster are those of recipes/README.md and conf/cluster/README.md, added to
a copy of the project; all else is one module in a folder of the user's.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launched import Launcher, lines, train
from pages import ROOT, read_page

from launcher.__main__ import main

NET, DATA, NET_OPTIONS, DATA_OPTIONS = (
    block.text for block in read_page("recipes/README.md").of("python")
)
NET_YAML, DATA_YAML = (block.text for block in read_page("recipes/README.md").of("yaml"))
(CLUSTER_YAML,) = (block.text for block in read_page("conf/cluster/README.md").of("yaml"))
MODEL = {"recipes/models/net/model.py": NET, "recipes/models/net/__init__.py": NET_OPTIONS}
MODEL |= {"conf/model/net.yaml": NET_YAML}
DATASET = {"recipes/datasets/data/dataset.py": DATA, "conf/dataset/data.yaml": DATA_YAML}
DATASET |= {"recipes/datasets/data/__init__.py": DATA_OPTIONS}
NEW = "model=net", "dataset=data", "train.eval_every=0"
IN_STAGES = "parallel=manual", "parallel.num_stages=2", "cluster=emulated", "cluster.gpus=2"
# The settings know the schedules and transports that there are when they are imported.
PARTS = """
from launcher.base import TRANSPORTS
from launcher.schedule import Kind, Schedule, Task, register

TRANSPORTS["wire"] = "parts:Wire"

@register
class Fifo(Schedule):
    name = "fifo"

    def order(self, mesh, num_meshes, num_micro_batches, stages_per_mesh):
        kinds = Kind.FORWARD, Kind.BACKWARD
        return [Task(mesh, m, kind) for kind in kinds for m in range(num_micro_batches)]

from pathlib import Path
from launcher.cluster import kinds
from launcher.cluster.devices import DevicePool
from launcher.driver import Callback
from launcher.driver.tasks import task
from launcher.report import Tracker
from launcher.runtime import PullTransport

class Wire(PullTransport):
    pass

@kinds.register
class Rented(kinds.ClusterKind):
    name = "rented"

    def pool(self, *, planning=False):
        return DevicePool("cpu", self.cluster.hosts, 2, "rented device", "")

@task.register
class Count(task.TaskKind):
    name = "count"

    def run(self, config, console):
        print(config.model.layers, "layers")
        return 0

class Noted(Callback):
    def on_end(self, step, reason):
        Path("noted").write_text(f"{step} {reason}")

class Steps(Tracker):
    def __init__(self, run):
        self.id = run.id

    def log(self, step, metrics):
        with Path("steps").open("a") as file:
            print(step, file=file)
"""
USED = """
import parts
from dataclasses import replace
from launcher.__main__ import main
from launcher.config.compose import load
from launcher.driver.run import run
from launcher.runtime.transport.transport import make_transport
from launcher.stop import Stop

model = ["model=mlp", "dataset=synthetic", "run.id=one"]
stages = ["parallel=manual", "parallel.num_stages=2", "parallel.schedule=fifo"]
cluster = ["--config-dir", "my_conf", "cluster=rented", "cluster.transport=wire"]
assert main(["task=plan", *cluster, *stages, *model]) == 0
assert run(replace(load(model), task="count"), Stop()) == 0
print(type(make_transport("wire", "127.0.0.1")).__name__)
"""


def num_lines(files: dict[str, str]) -> int:
    return sum(len(text.splitlines()) for text in files.values())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the new files, and no edit of an existing one."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("launcher", "recipes", "conf"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True)
    for name, text in (MODEL | DATASET).items():
        assert not (copy / name).exists()
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
    return copy


def test_the_settings_of_a_new_model_and_dataset_are_checked(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_lines(MODEL) <= 60
    assert num_lines(DATASET) <= 60
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    out = train(tmp_path, "task=check", *NEW, *IN_STAGES)
    assert "model=net (2 layers), dataset=data" in out
    code, _, err = Launcher(tmp_path, "task=check", *NEW, "model.widht=8").end()
    assert (code, err) == (
        2,
        "launcher: model.widht is not a setting of model=net (on the command line). "
        "Did you mean model.width?\n",
    )


@pytest.mark.slow
def test_they_train_before_a_callback_and_a_tracker_of_the_users(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    own = "hooks=[parts.Noted]", "report.trackers=[parts.Steps]", "allow_modules=[parts]"
    train(tmp_path, *NEW, *IN_STAGES, *own, "train.steps=3", "run.id=trained")
    trained = tmp_path / "outputs" / "trained"
    assert len(json.loads((trained / "plan.json").read_text())["stages"]) == 2
    assert [line["step"] for line in lines(trained)] == [1, 2, 3]
    assert (tmp_path / "steps").read_text().split() == ["1", "2", "3"]
    assert (tmp_path / "noted").read_text() == "3 done"


def test_a_schedule_a_transport_a_cluster_and_a_task_are_a_class_each(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "my_conf" / "cluster").mkdir(parents=True)
    (tmp_path / "my_conf" / "cluster" / "rented.yaml").write_text("kind: rented\nhosts: 2\n")
    done = subprocess.run(
        [sys.executable, "-c", USED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "outputs" / "one" / "plan.json").read_text())
    assert (plan["schedule"], plan["cluster"]["hosts"]) == ("fifo", 2)
    assert done.stdout.splitlines()[-2:] == ["4 layers", "Wire"]


def test_a_cluster_is_at_most_twelve_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_lines({"conf/cluster/mine.yaml": CLUSTER_YAML}) <= 12
    (tmp_path / "my_conf" / "cluster").mkdir(parents=True)
    (tmp_path / "my_conf" / "cluster" / "mine.yaml").write_text(CLUSTER_YAML)
    words = "model=mlp", "dataset=synthetic", "parallel=manual", "run.id=mine"
    monkeypatch.chdir(tmp_path)
    assert main(["task=plan", "--config-dir", "my_conf", "cluster=mine", *words]) == 0
    plan = json.loads((tmp_path / "outputs" / "mine" / "plan.json").read_text())
    assert (plan["cluster"]["hosts"], plan["cluster"]["devices_per_host"]) == (2, 8)
    assert len(plan["stages"]) > 1
