"""What a script defines works in another process as in its own, sent by value."""

import pickle
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher.api.remote_array import pickled

SCRIPT = Path(__file__).with_name("a_script.py")
ELSEWHERE = """
import pickle, sys

sent = sys.stdin.buffer.read()
for _ in range(2):  # a step and its state come one after the other
    cases = pickle.loads(sent)
told = {}
for name, case in cases.items():
    try:
        told[name] = case()
    except Exception as error:
        told[name] = repr(error)
sys.stdout.buffer.write(pickle.dumps(told))
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told():
    """What each of the script's functions says here, and what it says in another process."""
    cases = runpy.run_path(str(SCRIPT), run_name="__main__")["CASES"]
    sent = pickled(cases, lambda: None)
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], input=sent, capture_output=True, check=True
    )
    there = pickle.loads(run.stdout)
    return {name: (case(), there[name]) for name, case in cases.items()}


def test_what_a_script_defines_is_elsewhere_what_it_is_here(told):
    for here, there in told.values():
        assert there == here
    assert len(told) > 25


def test_what_cannot_travel_is_named():
    lock = threading.Lock()

    def holds_a_lock():
        return lock

    with pytest.raises(TypeError, match=r"holds_a_lock cannot be sent to the workers.*lock"):
        pickled(holds_a_lock, holds_a_lock)
