"""What feeding tokens costs a process: the processor time of a batch, and of a step beside it.

    python tests/benchmarks/feeding.py

A corpus of random tokens is written to a temporary folder. The step is that of a GPT on one device,
by processor time, as wall time says little on a machine that others use.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from launcher.config.compose import load
from launcher.recipes import build_model
from launcher.train.optimizer import build_optimizer
from launcher.train.program import build_program
from launcher.train.step import make_train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=10**8)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        rng = np.random.default_rng(0)
        rng.integers(256, size=args.tokens, dtype=np.uint16).tofile(path)
        for packing in ("stream", "documents"):
            end = ["dataset.end_token=0"] if packing == "documents" else []
            words = ["dataset=tokens", f"dataset.path={path}", f"dataset.packing={packing}", *end]
            config = load([*words, "train.eval_every=0"])
            program = build_program(config)
            batches = program.dataset.train
            batches(0)
            began = time.process_time()
            for k in range(args.batches):
                batch = batches(k)
            fed = (time.process_time() - began) / args.batches
            model = build_model(config.model, config.train.precision)
            optimizer, schedule = build_optimizer(config.optimizer, config.train.steps)
            step = jax.jit(make_train_step(model, optimizer, schedule, False))
            state = jax.jit(program.init)(program.seed)
            jax.block_until_ready(step(state, batch))
            began = time.process_time()
            for _ in range(args.steps):
                jax.block_until_ready(step(state, batch))
            took = (time.process_time() - began) / args.steps
            rows, length = batch["tokens"].shape
            print(
                f"packing={packing}: {fed * 1e3:.2f} ms a batch of {rows} x {length} tokens, "
                f"{fed / took:.2%} of a step of {took * 1e3:.0f} ms"
            )


if __name__ == "__main__":
    main()
