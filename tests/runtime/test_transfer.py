"""What crosses between processes: as many bytes as planned, each once, and nothing stays behind."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launch import together
from tiny import BATCHES, init, step


@pytest.fixture(scope="module")
def peers():
    """What two processes of two devices each report of themselves."""
    return [json.loads(told) for told in together("transfer_peer.py", 2, 2)]


def test_bytes_that_cross_are_those_of_the_routes(peers):
    for peer in peers:
        sent, expected = zip(*peer["moves"], strict=True)
        assert sent == expected
        assert any(sent)


def test_arrays_that_go_together_are_one_message(peers):
    assert [peer["messages"] for peer in peers] == [1, 0]


def test_bytes_of_a_step_are_those_of_the_plan(peers):
    for peer in peers:
        assert peer["sent"] == peer["planned"]
        assert all(peer["sent"])


def test_two_executables_take_turns_on_one_state(peers):
    state, losses = jax.jit(init)(jax.random.key(0)), []
    for batch in BATCHES:
        state, loss = jax.jit(step)(state, batch)
        losses.append(float(loss))
    for found in [peer["losses"] for peer in peers if peer["losses"]]:
        np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_repeated_calls_leave_nothing_behind(peers):
    """As many arrays after each turn, and every key offered is pulled, once."""
    for peer in peers:
        assert len(set(peer["alive"][2::2])) == 1
        assert len(set(peer["alive"][3::2])) == 1
    for one, other in (peers, peers[::-1]):
        assert one["offered"] == other["pulled"]
        assert len(set(one["offered"])) == len(one["offered"])
