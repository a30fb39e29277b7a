"""A script that holds trainings on two worker processes against PyTorch's figures, in float64.

python on_workers.py
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from parity.step import check
from parity.test_torch import SPLITS

import launcher

jax.config.update("jax_enable_x64", True)


def main() -> None:
    launcher.init("ray", num_nodes=2, num_devices_per_node=2)
    for name in ("toy", "mlp"):
        for optimizer in ("sgd", "adam"):
            for split in ("4 devices", "8 microbatches", "2 stages x 2"):
                check(name, optimizer, method=SPLITS[split][1])
                print(name, optimizer, split, "equal", flush=True)
    launcher.shutdown()


main()
