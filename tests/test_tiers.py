"""The pure tests start no process and compile nothing for devices: one that does, fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Without the plugins of other packages, which import half of what is installed.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "0"]
ALONE = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
COMPILED = """
import jax

def test_compiles():
    jax.jit(lambda x: x + 1).lower(1.0).compile()
"""
FILES = {
    "plan/test_pure.py": """
import multiprocessing
import subprocess
import pytest

@pytest.fixture(scope="module")
def made():
    return subprocess.check_output(["true"])

def test_with_a_process_in_a_fixture(made):
    assert made == b""

def test_spawns():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()

@pytest.mark.devices
def test_says_that_it_does():
    subprocess.check_call(["false"])

@pytest.mark.slow
def test_is_slow():
    assert False

def test_is_pure(made):
    assert made == b""
""",
    "plan/test_compiled.py": COMPILED,
    "elsewhere/test_compiled.py": COMPILED.replace("x + 1", "x.y"),
}


@pytest.mark.slow
def test_a_pure_test_that_is_none_fails(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    devices: d\n    slow: s\n")
    done = subprocess.run(
        [*PYTEST, "-m", "not devices", "-rA", "--import-mode=importlib"],
        env=ALONE,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    error = r"ERROR at teardown of (\w+) _+\nA test without the mark `devices` ([\w ]+)"
    told = re.findall(error, done.stdout)
    assert sorted(told) == [
        ("test_compiles", "compiles a program for devices"),
        ("test_spawns", "starts a process"),
        ("test_with_a_process_in_a_fixture", "starts a process"),
    ]
    assert re.search(r"^4 passed, 3 deselected, 3 errors", done.stdout, re.MULTILINE)


SAMPLED = """
import pytest

@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize("k", range(7))
def test_of_many(k):
    pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_of_some(k):
    pass

@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", range(4))
def test_of_slow(k):
    pass
"""


@pytest.mark.slow
def test_every_case_of_a_sampled_test_is_in_one_tier(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SAMPLED)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    marks = "".join(f"    {mark}: m\n" for mark in ("devices", "slow", "stress", "sampled"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{marks}")

    def cases(*asked: str) -> str:
        command = [*PYTEST, "--collect-only", *asked]
        done = subprocess.run(
            command, cwd=tmp_path, env=ALONE, capture_output=True, text=True, check=False
        ).stdout
        found = {
            name: re.findall(rf"{name}\[(\d)\]", done) for name in ("of_many", "of_some", "of_slow")
        }
        return " ".join("".join(numbers) for numbers in found.values())

    assert cases() == "036 03 "
    assert cases("-m", "slow") == "1245 2 02"
    assert cases("-m", "stress") == " 1 13"
    assert cases("test_it.py::test_of_many[1]") == "1  "
