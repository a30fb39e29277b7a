"""The report of `tests/gpu/run`, a line a part, written when it is over; what all parts share."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "end_to_end"), str(Path(__file__).parent)]
from launched import Launcher, losses, summary  # noqa: E402

REPORT, ON = os.environ.get("GPU_REPORT"), os.environ.get("GPU_TESTS_ON", "gpu")
MOST_LINES = 200
REASON_LINES = 3
MOST_SECONDS = 900  # for a program or a run
RUNS_NEED = "ray", "hydra", "grain", "wandb"
STARTED = time.monotonic()


def pytest_sessionstart():
    if REPORT:
        Path(REPORT).write_text(f"{machine()}\n\n{'part':<34}{'outcome':<9}{'s':>6}  figure\n")


def machine():
    """What the report is about, in two lines."""
    packages = []
    for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "ray", "flax"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    gpus = "CPU devices in the place of GPUs: figures mean nothing"
    if ON == "gpu":
        asked = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader",
        ]
        gpus = "; ".join(subprocess.check_output(asked, text=True).splitlines())
    return f"{gpus}\n{', '.join(packages)}, Python {sys.version.split()[0]}"


def visible_gpus():
    """How many GPUs there are, of which the user may have hidden some."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(asked_of_the_driver("index")) if visible is None else len(visible.split(","))


def asked_of_the_driver(what):
    """A line a GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).splitlines()


def pytest_runtest_logreport(report):
    decided = report.when == "call" or report.outcome != "passed"
    if not (REPORT and decided) or (report.when == "teardown" and report.outcome == "passed"):
        return
    name = report.nodeid.rpartition("::")[2].removeprefix("test_")
    figures = "; ".join(text for kind, text in report.user_properties if kind == "figure")
    lines = [f"{name:<34}{report.outcome:<9}{report.duration:>6.0f}  {figures}".rstrip()]
    if report.outcome == "skipped":
        lines = [f"{lines[0]}  {report.longrepr[2].removeprefix('Skipped: ')}"]
    if report.outcome == "failed":
        told = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        lines += [f"    {line[1:].strip()[:160]}" for line in told[:REASON_LINES]]
    with open(REPORT, "a") as file:
        before = len(Path(REPORT).read_text().splitlines())
        file.writelines(f"{line}\n" for line in lines[: max(0, MOST_LINES - before)])


@pytest.fixture(autouse=True)
def _as_a_user_would(monkeypatch):
    """With the GPUs, which the other tests hide, and while there is time left."""
    minutes = os.environ.get("GPU_MINUTES")
    if minutes and time.monotonic() - STARTED > 60 * float(minutes):
        pytest.skip("no time left")
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.delenv(name)
    if ON == "cpu":
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def figure(record_property):
    """A function of a text: what stands on this part's line of the report."""
    return lambda text: record_property("figure", text)


@pytest.fixture
def on_gpu():
    """Whether this is no trial on CPU devices."""
    return ON == "gpu"


@pytest.fixture
def devices(on_gpu):
    """How many GPUs there are; on CPUs, two."""
    return visible_gpus() if on_gpu else 2


class Runs:
    """`python -m launcher` in one folder."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, *words):
        where = ["cluster=emulated"] if ON == "cpu" else ["cluster=local"]
        if not any(word.startswith("cluster.gpus=") for word in words):
            where.append("cluster.gpus=1")
        words = "wandb.mode=disabled", *where, *words
        return Launcher(self.folder, *words, deadline=MOST_SECONDS)

    def home(self, name):
        return self.folder / "outputs" / name

    def train(self, name, *words):
        """Run to the end; its summary and its losses."""
        code, out, err = self.start(f"run.id={name}", *words).end()
        assert code == 0, f"{err[-1500:]}\n{out[-500:]}"
        return summary(self.home(name)), losses(self.home(name))


@pytest.fixture
def runs(tmp_path):
    if absent := [name for name in RUNS_NEED if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    return Runs(tmp_path)


@pytest.fixture
def program():
    """A function of a part of `parts.py` and its arguments: what it printed, read as JSON."""

    def call(part, *arguments, **environ):
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("parts.py")), part, *arguments],
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            env=os.environ | environ,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return call
