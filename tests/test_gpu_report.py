"""`tests/gpu/run`, tried on CPU devices: a part tells what it found, and costs no other one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "gpu" / "run"


def run(*words):
    return subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True)


def test_the_parts_are_listed_without_jax():
    done = run("--list")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:3] == ["default", "sizes", "parity"]


@pytest.mark.slow
def test_a_part_stands_in_the_report_and_its_json(tmp_path):
    path = tmp_path / "report.txt"
    only = ("--only", "donation|transfers|life")
    done = run("--on", "cpu", *only, "--minutes", "1.5", "--report", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    text, told = path.read_text(), json.loads(path.with_suffix(".json").read_text())
    assert "3 parts in at most 1.5 minutes: transfers, donation, life" in text
    outcomes = {part["part"]: part["outcome"] for part in told["parts"]}
    assert outcomes == {"transfers": "passed", "donation": "passed", "life": "no time"}
    assert {figure["part"] for figure in told["figures"]} == {"transfers", "donation"}


ENDLESS = """
import os, subprocess
from types import SimpleNamespace

PARTS = [SimpleNamespace(name="endless", seconds={"cpu": 1})]
if __name__ == "__main__":
    os.environ["GPU_TESTS_PART"] = str(os.getpid())
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print('{"figure": "waits", "child": %d}' % child.pid, flush=True)
    child.wait()
"""


@pytest.mark.slow
def test_a_part_that_does_not_end_is_killed_with_all_that_it_started(tmp_path):
    (tmp_path / "run").write_text(RUN.read_text())
    (tmp_path / "parts.py").write_text(ENDLESS)
    words = ("--on", "cpu", "--minutes", "1", "--report", str(tmp_path / "report.txt"))
    done = subprocess.run([sys.executable, str(tmp_path / "run"), *words], capture_output=True)
    assert done.returncode == 1
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["parts"][0]["why"] == ["killed after 3 s"]
    state = Path(f"/proc/{told['figures'][0]['child']}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"  # nobody has asked for it yet
