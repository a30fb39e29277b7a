"""Each variable that a library reads has its effect here, too, or a line says that it has none.

`DECIDED_HERE` and `OF_RUNS` are the answers: a variable that the launcher drops, changes or decides
itself needs one there, unless it describes another's process (`OF_ANOTHER`). All others reach the
process that uses the library as they are.
"""

import ast
import importlib.util
import re
from pathlib import Path

import jax
import pytest

from launcher.base import OF_ANOTHER
from launcher.cli import outcome
from launcher.cluster.devices import DevicePool
from launcher.cluster.kinds import kind_of
from launcher.cluster.ray.session import worker_environment
from launcher.config.compose import load
from launcher.config.sections import Wandb
from launcher.report.trackers import mlflow_tracker, wandb_tracker
from launcher.report.trackers.tracker import TrackedRun
from launcher.stop import Stop

COUNT = DevicePool.count_flag
# What workers get otherwise than it was set, and why; "said": in a line.
DECIDED_HERE = {
    "JAX_PLATFORMS": "said",
    "JAX_NUM_CPU_DEVICES": "said",
    "XLA_FLAGS": "said",
    "RAY_ADDRESS": "said",
    "CUDA_VISIBLE_DEVICES": "counts where the devices are found",
}
SET = {"JAX_PLATFORMS": "tpu", "XLA_FLAGS": f"--a=b {COUNT}=7"}
# Read by code that no pattern below finds.
FURTHER = (
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL", "HF_HOME"),
    *("HF_TOKEN", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS"),
    *("RAY_ADDRESS", "LD_LIBRARY_PATH", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "TMPDIR"),
)
READ = re.compile(r"""(?:environ(?:\.get)?[\[(]|getenv\()\s*["']([A-Z]\w+)["']""")


def read_by(*libraries):
    """The variables that the sources of libraries name where they read one."""
    for library in libraries:
        [folder] = importlib.util.find_spec(library).submodule_search_locations
        for path in Path(folder).rglob("*.py"):
            if "test" not in path.name:
                yield from READ.findall(path.read_text(errors="ignore"))


def test_workers_get_each_variable_as_it_is_or_it_is_answered():
    flags = {name.upper() for name in jax.config.values if name.startswith("jax_")}
    names = {*flags, *FURTHER, *read_by("jax", "hydra", "orbax", "grain", "optax", "matplotlib")}
    assert {"JAX_ENABLE_X64", "JAX_COMPILATION_CACHE_DIR", "MPLBACKEND"} <= names
    pool, kind = DevicePool("cpu", 1, 2, "emulated CPU device", ""), kind_of(load([]).cluster)
    changed = {
        name
        for name in names
        if worker_environment({name: SET.get(name, "4")}, pool, 0).get(name) != SET.get(name, "4")
    }
    assert {name for name in changed if not OF_ANOTHER.match(name)} == set(DECIDED_HERE)
    for name, answer in DECIDED_HERE.items():
        lines = list(kind.ignored({name: SET.get(name, "4")}))
        said = COUNT if name == "XLA_FLAGS" else name
        assert [said in line and "has no effect" in line for line in lines] == (
            [True] if answer == "said" else []
        ), name
    assert "--a=b" in worker_environment(SET, pool, 0)["XLA_FLAGS"]


def test_what_a_setting_says_needs_no_line():
    environ = SET | {"JAX_PLATFORMS": "cuda,cpu", "JAX_NUM_CPU_DEVICES": "4", "RAY_ADDRESS": "x"}
    assert len(list(kind_of(load(["cluster.gpus=2"]).cluster).ignored(environ))) == 1
    assert list(kind_of(load(["cluster=ray", "cluster.gpus=2"]).cluster).ignored(environ)) == []


# Of wandb's settings those that a run decides; the others come from the section `wandb`, or from
# the variables where that says nothing.
OF_RUNS = {"id": "RUN_ID", "dir": "DIR", "resume": "RESUME", "reinit": "REINIT"}
OF_SECTION = ("mode", "project", "name", "entity", "group", "tags")


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Begins a recording by wandb, and returns what wandb is given of its settings."""
    given = {}

    class Begun:
        def define_metric(self, *_, **__):
            pass

    def init(settings, config, **named):
        given.update(named, settings=settings)
        return Begun()

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr("wandb.setup", lambda *_: None)

    def begin(**section):
        config = {"wandb": vars(Wandb(**{"mode": "offline", **section}))}
        wandb_tracker.open_wandb(TrackedRun("run-1", tmp_path, config))
        return given

    return begin


def test_each_variable_of_wandb_counts_or_is_named(begun, monkeypatch, said):
    given = begun()
    own = given.pop("settings").model_fields_set
    assert set(given) == {*OF_RUNS, *OF_SECTION}
    named = {*OF_RUNS.values(), *(name.upper() for name in own)}
    assert said == []
    for name in named:
        monkeypatch.setenv(f"WANDB_{name}", "x")
    begun()
    assert set(re.findall(r"WANDB_(\w+)", said[0])) == named
    assert len(said) == 1


def test_a_setting_beats_wandbs_variable_and_that_the_default(begun, monkeypatch):
    given = begun()
    assert (given["project"], given["name"]) == ("launcher", "run-1")
    nothing = [given[key] for key in ("entity", "group", "tags")]
    assert nothing == [None] * 3  # wandb itself looks for its variables
    for name in ("PROJECT", "NAME"):
        monkeypatch.setenv(f"WANDB_{name}", "theirs")
    given = begun()
    assert (given["project"], given["name"]) == ("theirs", "theirs")
    given = begun(project="p", name="n", entity="e", group="g", tags=["t"])
    assert [given[key] for key in OF_SECTION[1:]] == ["p", "n", "e", "g", ["t"]]


def test_each_variable_of_mlflows_start_of_a_run_counts_or_is_named():
    [folder] = importlib.util.find_spec("mlflow").submodule_search_locations
    tree = ast.parse((Path(folder) / "tracking" / "fluent.py").read_text())
    of_variables = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "mlflow.environment_variables"
    )
    read = {alias.name for node in of_variables for alias in node.names}
    of_runs = {name for name in read if re.match(r"MLFLOW_(RUN_|EXPERIMENT_|ENABLE_SYSTEM)", name)}
    known = Path(mlflow_tracker.__file__).read_text()
    assert "MLFLOW_EXPERIMENT_ID" in of_runs
    assert [name for name in of_runs if f'"{name}"' not in known] == []


def test_hydras_variable_shows_the_whole_error(monkeypatch, capsys):
    for value, is_whole in (("0", False), ("1", True)):
        monkeypatch.setenv("HYDRA_FULL_ERROR", value)
        assert outcome.run(["train.step=3"], Stop()) == 2
        assert ("Traceback" in capsys.readouterr().err) == is_whole
