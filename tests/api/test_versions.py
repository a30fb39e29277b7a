"""Which JAX is taken, which is taken with a word, and which is refused before anything starts."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launcher.api import versions
from launcher.config.errors import ConfigError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("found", ["0.10.0", "0.10.2", "0.11.2", "0.12.0.1"])
def test_a_tested_one_is_taken_without_a_word(found, said):
    versions.check_jax(found)
    assert said == []


@pytest.mark.parametrize("found", ["0.13.0", "0.13.0.dev20270101", "1.0.0"])
def test_a_newer_one_that_traces_is_named_in_a_line(found, said):
    versions.check_jax(found)
    assert said == [f"JAX {found} is newer than those tested (0.10 to 0.12); continuing with it"]


def test_a_newer_one_that_cannot_trace_is_refused(monkeypatch):
    def changed(eqn):
        raise KeyError("num_consts")

    monkeypatch.setattr("launcher.trace.open_scans.scan_counts", changed)
    monkeypatch.setattr("launcher.trace.ir.jaxpr.scan_counts", changed)
    with pytest.raises(ConfigError) as caught:
        versions.check_jax("0.13.0")
    assert str(caught.value) == (
        "JAX 0.13.0 is too new: a step cannot be traced (KeyError: 'num_consts'). "
        "Install one of JAX 0.10 to 0.12: pip install 'jax>=0.10,<0.13'"
    )


def test_an_older_one_is_refused():
    with pytest.raises(ConfigError, match=r"^JAX 0\.9\.2 is too old\. Install one of JAX 0\.10 to"):
        versions.check_jax("0.9.2")


def test_the_bounds_are_those_of_the_project():
    (first, last) = (".".join(map(str, v)) for v in (versions.OLDEST, (0, versions.NEWEST[1] + 1)))
    extras = PROJECT["optional-dependencies"]
    names = [*PROJECT["dependencies"], *extras["cuda"], *extras["cuda13"]]
    bounds = [name.partition(">=")[2] for name in names if name.startswith(("jax>", "jax["))]
    assert bounds == [f"{first},<{last}"] * 3


@pytest.mark.devices
@pytest.mark.parametrize(
    "words",
    [["-m", "launcher", "task=check"], ["-c", "import launcher; launcher.parallelize"]],
    ids=["command", "import"],
)
def test_both_doors_refuse_before_anything_starts(words, tmp_path):
    """An older JAX is simulated by its metadata, first on the path."""
    (tmp_path / "jax-0.9.2.dist-info").mkdir()
    (tmp_path / "jax-0.9.2.dist-info" / "METADATA").write_text("Name: jax\nVersion: 0.9.2\n")
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, *words],
        env={"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "JAX 0.9.2 is too old" in done.stderr
    assert done.returncode == (2 if "task=check" in words else 1)
    assert not (tmp_path / "outputs").exists()
