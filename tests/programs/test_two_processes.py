"""Half of the table by two processes of two devices each: what each process holds of every result
is that of one device."""

import json
import sys
from pathlib import Path

import pytest
from programs.table import PROGRAMS

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from launch import together

BY = "stages", "data", "zero3"


def half():
    """Every other program, by one method after the other; those that are refused by it, by data."""
    for i, (name, program) in enumerate(list(PROGRAMS.items())[::2]):
        method = BY[i % len(BY)] if BY[i % len(BY)] not in program.refused else "data"
        if method not in program.refused:
            yield name, method


def test_the_table_is_long_enough():
    assert len(PROGRAMS) >= 60


@pytest.mark.stress
def test_two_processes_equal_one_device():
    pairs = list(half())
    assert len(pairs) >= len(PROGRAMS) // 3
    script = Path(__file__).parent / "peer.py"
    told = together(script, 2, 2, given=json.dumps(pairs), timeout=500)
    for pair, *found in zip(pairs, *map(json.loads, told), strict=True):
        counts, errors = zip(*found, strict=True)
        assert not any(errors), f"{pair}: {errors}"
        assert sum(counts) > 0, pair
