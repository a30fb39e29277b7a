"""A worker that has a state under a plan of several processes, and goes on with texts by it:

    python text_peer.py INDEX COUNT COORDINATOR DEVICES

reads `words` (settings), `model` (more of them) and `prompts` as JSON from standard input and
prints the tokens, and the share of the parameters that a device of it holds.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    DEVICES = int(sys.argv[4])
    os.environ["NPROC"] = str(DEVICES + 2)  # threads, see launcher.cluster.ray.session
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"

sys.path.insert(0, str(Path(__file__).parents[1]))  # what several folders of tests share

import jax
from checkpoint_peer import Trainee, joined

from launcher.train.sampling import Sampler

if __name__ == "__main__":
    given = json.load(sys.stdin)
    worker = Trainee(given["words"], joined(), model=given["model"]).worker
    worker.create()
    greedy = dataclasses.replace(worker._config.generate, temperature=0.0)
    config = dataclasses.replace(worker._config, generate=greedy)
    sampler = Sampler(config, worker._train.plan)
    placed = sampler.placed(worker._state.params)
    tokens = sampler(worker._state.params, given["prompts"], 8)
    tokens = [list(row) for row in zip(*tokens, strict=True)]
    leaves = jax.tree.leaves(placed)
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    print(json.dumps([tokens, own / sum(leaf.nbytes for leaf in leaves)]), flush=True)
    worker.close()
