"""Files are data: nothing that a run reads is unpickled, evaluated or otherwise becomes code."""

import ast
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import yaml

from launcher import checkpoint
from launcher.__main__ import main
from launcher.base import measurements
from launcher.config.compose import load, load_frozen
from launcher.train.program import build_program

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    file.relative_to(ROOT).as_posix()
    for folder in ("launcher", "recipes")
    for file in (ROOT / folder).rglob("*.py")
)
MAKERS_OF_CODE = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}
READERS = {"yaml.load", "yaml.full_load", "yaml.unsafe_load"}
# Python's own import system reads compiled modules, and the tests keep copies of settings.
OTHERS = re.compile("importlib|conftest")
LOADERS = {"np.load", "numpy.load", "jnp.load"}  # of files that may hold pickled objects
# What the driver and its workers say to one another, through a Ray that asks for a secret, and a
# worker to the process that it started, through a pair of sockets.
BETWEEN_PROCESSES = {
    "launcher/cluster/ray/worker_actor.py",
    "launcher/api/messages.py",
    "launcher/api/step_worker.py",
    "launcher/api/ray_backend.py",
    "launcher/checkpoint/background.py",
}


def risky(tree: ast.AST) -> Iterator[str]:
    """Everything in a program that could turn what a file holds into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in MAKERS_OF_CODE | READERS or called.endswith(("pickle.load", "Unpickler")):
                yield called
            pickles = [word.value for word in node.keywords if word.arg == "allow_pickle"]
            if called in LOADERS and not pickles:
                yield called
            if not all(map(_is_off, pickles)):
                yield "allow_pickle"


def _is_off(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_no_source_makes_code_of_a_file() -> None:
    found = {
        source: set(risky(ast.parse((ROOT / source).read_text(encoding="utf-8"))))
        - ({"pickle"} if source in BETWEEN_PROCESSES else set())
        for source in SOURCES
    }
    assert {source: words for source, words in found.items() if words} == {}


def test_what_is_risky_is_recognised() -> None:
    program = "import pickle\npickle.load(f)\nnp.load(f, allow_pickle=True)\neval(s)\nyaml.load(s)"
    program += "\nnp.load(f)\nnp.load(f, allow_pickle=False)"
    assert set(risky(ast.parse(program))) == {
        *("pickle", "pickle.load", "np.load", "allow_pickle", "eval", "yaml.load")
    }


def test_nothing_is_unpickled_by_the_process_that_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, a plan that is replayed, cached measurements, a checkpoint: as the driver and the
    workers read them."""
    unpickled: list[object] = []

    def note(event: str, arguments: object) -> None:
        if event in ("pickle.find_class", "marshal.loads") and not OTHERS.search(_caller()):
            unpickled.append((event, arguments))

    sys.addaudithook(note)
    pickle.loads(pickle.dumps(Path("seen")))
    assert unpickled
    unpickled.clear()

    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "my_conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        "# @package _global_\ndefaults:\n  - override /model: mlp\n"
        "  - override /dataset: synthetic\n  - override /parallel: manual\n"
    )
    mine = ["--config-dir", "my_conf", "recipe=mine", "task=plan"]
    assert main([*mine, "run.id=first"]) == 0
    plan = "parallel.plan=outputs/first/plan.json"
    assert (
        main([*mine[:-2], "model=mlp", "dataset=synthetic", "task=plan", "parallel=replay", plan])
        == 0
    )
    config = load_frozen(Path("outputs/first/config.yaml"))
    assert yaml.safe_load(Path("outputs/first/config.yaml").read_text())["task"] == "plan"

    measurements.write(Path("times.json"), {"points": [1.0], "failure": ""})
    assert measurements.read_cached(Path("times.json"), dict) is not None

    program = build_program(config)
    state = jax.jit(program.init)(program.seed)
    folder = Path("outputs/first/checkpoints")
    checkpoint.save(folder, 1, checkpoint.copy_to_host(state), {"config": {}})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), program.state
    )
    checkpoint.restore(folder, checkpoint.newest(folder).step or 0, like)
    checkpoint.read_metadata(folder, 1)
    load(["recipe=smoke"])
    assert unpickled == []


def _caller() -> str:
    """Where the event came from."""
    return sys._getframe(2).f_code.co_filename
