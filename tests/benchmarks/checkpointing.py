"""What computing activations again costs: seconds and memory of a step of 24 transformer blocks.

    python tests/benchmarks/checkpointing.py

Steps are interleaved in one process; times are medians of processor seconds, set against those of
`none` in the same round. The memory is that of the compiled passes, with what is left between them.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import launcher

BLOCKS, ROWS, LENGTH, WIDTH, HEADS, ROUNDS = 24, 4, 128, 256, 4, 7
REMATS = "none", "selective", "full", "full/2", "full:12"
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}


def normed(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def block(of: Any, x: Any) -> Any:
    q, k, v = (
        part.reshape(*x.shape[:2], HEADS, -1)
        for part in jnp.split(normed(x) @ of["qkv"], 3, axis=-1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(x.shape)
    x = x + read @ of["out"]
    return x + jax.nn.gelu(normed(x) @ of["up"]) @ of["down"]


def loss(params: Any, x: Any) -> Any:
    for i, of in enumerate(params):
        if i:
            launcher.mark_pipeline_boundary()
        x = block(of, x)
    return (x**2).mean()


def step(params: Any, x: Any) -> Any:
    value, grads = launcher.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def main() -> None:
    rng = np.random.default_rng(0)
    params = [
        {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in SHAPES.items()}
        for _ in range(BLOCKS)
    ]
    batch = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    runs, memory = {}, {}
    for remat in REMATS:
        method = launcher.DataParallel(remat=remat)
        runs[remat] = launcher.parallelize(
            step, method=method, devices=jax.devices()[:1], donate_argnums=()
        )
        compiled = runs[remat].executable(params, batch)._compiled
        said = [one.memory_analysis() for name, one in compiled.items() if name.startswith("stage")]
        left = sum(one.output_size_in_bytes for one in said[:-1])  # the last makes the gradients
        memory[remat] = left + max(one.temp_size_in_bytes for one in said)
        jax.block_until_ready(runs[remat](params, batch))
    spent: dict[str, list[float]] = {remat: [] for remat in REMATS}
    for _ in range(ROUNDS):
        for remat, run in runs.items():
            before = time.process_time()
            jax.block_until_ready(run(params, batch))
            spent[remat].append(time.process_time() - before)
    print(f"{'remat':>10}  {'CPU s':>6}  {'of none':>7}  {'MiB':>6}")
    for remat in REMATS:
        ratios = [a / b for a, b in zip(spent[remat], spent["none"], strict=True)]
        print(
            f"{remat:>10}  {statistics.median(spent[remat]):6.2f}  {statistics.median(ratios):7.2f}"
            f"  {memory[remat] / 2**20:6.1f}"
        )


if __name__ == "__main__":
    main()
