"""Whole scripts on real workers, as users start them: what they define, and how they end."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import launcher

SCRIPT = Path(__file__).with_name("a_script.py")


@pytest.fixture
def folder():
    """For temporary files; short, for Ray."""
    path = tempfile.mkdtemp(dir="/tmp")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(folder):
    scripts = []

    def run(how):
        root = str(Path(launcher.__file__).parents[1])
        script = subprocess.Popen(
            [sys.executable, SCRIPT, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root, "TMPDIR": folder, "HOME": folder},
        )
        scripts.append(script)
        line = script.stdout.readline()
        below = psutil.Process(script.pid).children(recursive=True) if line else []
        return script, line, below

    yield run
    for script in scripts:
        script.kill()
        script.communicate()


def assert_nothing_is_left(processes, folder):
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not list(Path(folder).glob("launcher-*"))


@pytest.mark.slow
def test_a_script_with_classes_of_its_own_trains_as_on_one_device_and_fails_alone(start, folder):
    """With keys that both stages use, a module that sets devices, and Ray imported before."""
    script, line, below = start("own")
    _, told = script.communicate(timeout=120)
    assert line == "as on one device\n", told
    assert script.returncode == 1
    assert told.rstrip().endswith("ValueError: on purpose")
    assert "raylet" not in told
    assert below
    assert_nothing_is_left(below, folder)


@pytest.mark.slow
def test_a_script_runs_on_the_ray_that_it_has_started(start):
    script, line, _ = start("joined")
    _, told = script.communicate(timeout=120)
    assert line == "as on one device\n", told
    assert script.returncode == 3
    assert "Traceback" not in told
    assert "A worker died" not in told
