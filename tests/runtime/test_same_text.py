"""Every process of a stage lowers the same programs: their collectives meet one by one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PEER = Path(__file__).with_name("lowered_peer.py")


@pytest.mark.slow
def test_programs_do_not_follow_the_order_of_a_set():
    peers = [
        subprocess.Popen(
            [sys.executable, PEER, seed],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    one, other = (json.loads(peer.communicate(timeout=300)[0]) for peer in peers)
    assert one == other
    tied = [name for name, text in one.items() if "optimization_barrier" in str(text)]
    assert len(tied) >= 3
