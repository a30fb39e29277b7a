"""A worker that has a state under a plan of several processes, and goes on with texts by it:

    python text_peer.py INDEX COUNT COORDINATOR DEVICES

reads `words` (settings), `model` (more of them) and `prompts` as JSON from standard input and
prints the tokens, and the share of the parameters that a device of it holds.
"""

import json
import os
import sys

if __name__ == "__main__":
    DEVICES = int(sys.argv[4])
    os.environ["NPROC"] = str(DEVICES + 2)  # threads, see launcher.cluster.ray.environment
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"

import jax
from checkpoint_peer import Trainee, joined

from launcher.train.names import flat_name
from launcher.train.text_layout import layout_of
from launcher.train.text_model import TextModel
from recipes.decoding import Sampling

if __name__ == "__main__":
    given = json.load(sys.stdin)
    worker = Trainee(given["words"], joined(), model=given["model"]).worker
    worker.create()
    params = worker._state.params
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = {f"params.{flat_name(path)}": leaf.shape for path, leaf in leaves}
    layout = layout_of(worker._train.plan, shapes, jax.device_count())
    model = TextModel(worker._config, layout, Sampling(temperature=0), jax.devices())
    placed = model.place(params)
    tokens = [row.tolist() for row in model.generate(placed, given["prompts"], 8)]
    leaves = jax.tree.leaves(placed)
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    print(json.dumps([tokens, own / sum(leaf.nbytes for leaf in leaves)]), flush=True)
    worker.close()
