"""A step that is only to warm up: it runs as the next one would, and changes nothing."""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_peer import Trainee

WORDS = "parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=2", "cluster.gpus=2"


def bytes_of(state):
    plain = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), state)
    return jax.tree.leaves(plain)


def test_a_dry_step_changes_no_state_key_batch_or_loss():
    trainee = Trainee([*WORDS, "model.hidden_size=8"])
    worker = trainee.worker
    worker.create()
    straight = trainee._losses(1, 3), bytes_of(worker._state)
    worker.create()
    before = bytes_of(worker._state)
    worker.dry_step(1)
    worker.dry_step(1)
    assert bytes_of(worker._state) == before
    losses = trainee._losses(1, 2)
    worker.dry_step(3)  # as where a run resumes
    assert (losses + trainee._losses(3, 3), bytes_of(worker._state)) == straight
    worker.close()
