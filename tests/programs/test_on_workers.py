"""The table on two workers of a script that has a class of its own for state."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs.table import PROGRAMS

import launcher

BY = "stages", "data", "shard", "zero3"


def pairs():
    """Every program, by one method after the other; those that are refused by it, by data."""
    for i, (name, program) in enumerate(PROGRAMS.items()):
        method = BY[i % len(BY)] if BY[i % len(BY)] not in program.refused else "data"
        if method not in program.refused:
            yield name, method


def test_the_table_is_long_enough():
    assert len(list(pairs())) >= 100


@pytest.mark.stress
def test_programs_on_workers_equal_one_device():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("on_workers.py")],
        input=json.dumps(list(pairs())),
        env=os.environ | {"PYTHONPATH": str(Path(launcher.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = json.loads(done.stdout.splitlines()[-1])
    found = {pair: text for pair, text in zip(pairs(), wrong, strict=True) if text}
    assert not found, "\n".join(f"{pair}: {text}" for pair, text in found.items())
