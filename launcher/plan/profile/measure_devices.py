"""A separate program that measures the rates of this machine's devices, with all at work.

It runs as `python measure_devices.py REQUEST.json`, reads `{"platform", "devices"}` and writes the
fields of `calibration.Calibration` to standard output. It imports JAX and none of our modules.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LONGEST = 3.0  # seconds that one figure may take, beside its first calls


def main(path: str) -> None:
    """Measure the devices of a request; see the module."""
    request = json.loads(Path(path).read_text())
    os.environ["JAX_PLATFORMS"] = request["platform"]
    import jax

    count, on_cpu = request["devices"], request["platform"] == "cpu"
    if on_cpu:
        jax.config.update("jax_num_cpu_devices", count)
    sizes = (128, 256, 512) if on_cpu else (1024, 2048, 4096, 8192)
    rates = {
        dtype: {str(n): product_rate(n, dtype, count) for n in sizes}
        for dtype in ("bfloat16", "float32")
    }
    reduced = [1 << 12, 1 << 22] if on_cpu else [1 << 16, 1 << 28]
    found = {
        "product_flops": rates,
        "memory_bandwidth": copy_rate(1 << 23 if on_cpu else 1 << 28, count),
        "effective_parallelism": effective_parallelism(count) if on_cpu else None,
        "dispatch_overhead": dispatch_overhead(
            count, *((64, 32, 512) if on_cpu else (1024, 512, 8192))
        ),
        "all_reduce_seconds": {str(n): reduce_seconds(n, count) for n in reduced if count > 1},
        "memory_bytes": (jax.devices()[0].memory_stats() or {}).get("bytes_limit"),
    }
    print(json.dumps(found))


def product_rate(size: int, dtype: str, count: int) -> float:
    """Return the FLOP/s of each device in products of square matrices."""
    import jax.numpy as jnp

    x = spread((count, size, size), dtype, count)
    seconds = timed(lambda a: jnp.einsum("nij,njk->nik", a, a), x)
    return 2.0 * size**3 / seconds


def copy_rate(size: int, count: int) -> float:
    """Return the bytes/s that each device reads and writes in one pass over `size` bytes."""
    x = spread((count, size // 4), "float32", count)
    return 2.0 * size / timed(lambda a: a + 1, x)


def reduce_seconds(size: int, count: int) -> float:
    """Return the seconds of an all-reduce of `size` bytes over all devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    x = spread((count, size // 4), "float32", count)
    whole = NamedSharding(x.sharding.mesh, PartitionSpec())
    return timed(lambda a: jax.lax.with_sharding_constraint(a.sum(0), whole), x)


def effective_parallelism(count: int) -> float:
    """Return `ClusterShape.effective_parallelism` of these devices, from 1 to `count`.

    It is their number times the share of a task's time with all at work that the task takes alone.
    It is measured with a network, since a product alone may use all cores and element-wise
    operations do not.
    """
    one, every = (network_seconds(64, 512, n) for n in (1, count))
    return min(max(1.0, count * one / every), count)


def dispatch_overhead(count: int, width: int, few: int, many: int) -> float:
    """Return the dispatch overhead of a program on all devices.

    That is what it takes beside its work: its start, and the wait for its last device. It is where
    the line through a network's passes over few rows and over many reaches no rows.
    """
    less, more = (network_seconds(width, rows, count) for rows in (few, many))
    return max(0.0, less - few * (more - less) / (many - few))


def network_seconds(width: int, rows: int, count: int) -> float:
    """Return the seconds of both passes of a small network on each of `count` devices."""
    import jax

    layers = 4
    shapes = (width, 4 * width), (1, 4 * width), (4 * width, width), (1, width)
    weights = [[spread((count, *of), "float32", count) for of in shapes] for _ in range(layers)]
    x = spread((count, rows, width), "float32", count)
    return timed(jax.value_and_grad(passes), (weights, x), fewest=30)


def passes(given: Any) -> Any:
    """Return a number from the output of a network, to be differentiated."""
    import jax
    import jax.numpy as jnp

    weights, x = given
    for wide, bias, back, other in weights:
        scaled = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        inner = jax.nn.gelu(jnp.einsum("nij,njk->nik", scaled, wide) + bias)
        x = x + jnp.einsum("nij,njk->nik", inner, back) + other
    return (x * x).mean()


def spread(shape: tuple[int, ...], dtype: str, count: int) -> Any:
    """Return an array whose first axis is sharded over the devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:count]), ("device",))
    return jax.device_put(jnp.full(shape, 0.5, dtype), NamedSharding(mesh, PartitionSpec("device")))


def timed(fun: Callable[[Any], Any], x: Any, fewest: int = 5) -> float:
    """Return the seconds of the fastest call, so that other work on the machine does not count."""
    import jax

    compiled = jax.jit(fun).lower(x).compile()
    for _ in range(2):
        jax.block_until_ready(compiled(x))
    durations: list[float] = []
    while len(durations) < fewest or (sum(durations) < _LONGEST and len(durations) < 30):
        began = time.perf_counter()
        jax.block_until_ready(compiled(x))
        durations.append(time.perf_counter() - began)
    return min(durations)


if __name__ == "__main__":
    main(sys.argv[1])
