"""A process ends with the one that started it, also where it is stopped."""

import signal
import subprocess
import sys

import psutil
import pytest

from launcher.base import process_setup

PROGRAM = "import sys, time; print(sys.argv[1], flush=True); time.sleep(600)"
STARTS_A_PROGRAM = """
import subprocess, sys
print(subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=2).pid, flush=True)
sys.stdin.read()
"""
STARTS_A_RUN = """
import sys
from launcher.submit.sweep import start
run = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
start([sys.executable, "-c", run], {}).wait()
"""


@pytest.mark.parametrize("parent", [STARTS_A_PROGRAM, STARTS_A_RUN])
def test_a_stopped_process_ends_with_the_one_that_started_it(parent, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, "-c", parent, process_setup.__file__, str(program), "given"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child = psutil.Process(int(process.stdout.readline()))
    if parent is STARTS_A_PROGRAM:
        assert process.stderr.readline() == "given\n"
    child.suspend()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not [left for left in alive if left.status() != psutil.STATUS_ZOMBIE]
