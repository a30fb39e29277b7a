"""A separate program that measures the rates of this machine's devices, with all at work.

It runs as `python measure_devices.py REQUEST.json`, reads `{"platform", "devices", "quick"}` and
writes the fields of `calibration.Calibration` to standard output. `quick` takes some seconds. It
imports JAX and none of our modules.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = {"cpu": (128, 256, 512), "cuda": (1024, 2048, 4096, 8192)}  # of square matrices
_REDUCED = {"cpu": (1 << 12, 1 << 22), "cuda": (1 << 16, 1 << 28)}  # bytes
_COPIED = {"cpu": 1 << 23, "cuda": 1 << 28}  # bytes
_NETWORK = {"cpu": (64, 32, 512), "cuda": (1024, 512, 8192)}  # its width, few rows, many rows


def main(path: str) -> None:
    """Measure the devices of a request; see the module."""
    request = json.loads(Path(path).read_text())
    platform, count = request["platform"], request["devices"]
    os.environ["JAX_PLATFORMS"] = platform
    import jax

    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", count)
    quick = request.get("quick", False)
    meter = Meter(count, longest=0.15, most=10) if quick else Meter(count)
    width, few, many = _NETWORK[platform]
    network = {rows: meter.network_seconds(width, rows, count) for rows in (few, many)}
    alone = meter.network_seconds(width, many, 1) if platform == "cpu" else None
    # The rates are those of the largest products.
    sizes = _SIZES[platform][-1:] if quick else _SIZES[platform]
    found = {
        "product_flops": {
            dtype: {str(n): meter.product_rate(n, dtype) for n in sizes}
            for dtype in ("bfloat16", "float32")
        },
        "memory_bandwidth": meter.copy_rate(_COPIED[platform]),
        "effective_parallelism": alone and effective_parallelism(count, alone, network[many]),
        "dispatch_overhead": dispatch_overhead(network),
        "all_reduce_seconds": {
            str(n): meter.reduce_seconds(n) for n in _REDUCED[platform] if count > 1
        },
        "memory_bytes": (jax.devices()[0].memory_stats() or {}).get("bytes_limit"),
    }
    print(json.dumps(found))


def effective_parallelism(count: int, one: float, every: float) -> float:
    """Return `ClusterShape.effective_parallelism` of these devices, from 1 to `count`.

    It is their number times the share of a task's time with all at work that the task takes alone.
    It is measured with a network, since a product alone may use all cores and element-wise
    operations do not.

    Args:
        count: number of devices.
        one: seconds of the task on one device.
        every: seconds of the task on each of all devices at once.
    """
    return min(max(1.0, count * one / every), count)


def dispatch_overhead(seconds: dict[int, float]) -> float:
    """Return the dispatch overhead of a program on all devices.

    That is what it takes beside its work: its start, and the wait for its last device. It is where
    the line through a network's passes over few rows and over many reaches no rows.

    Args:
        seconds: the passes', by the number of rows.
    """
    (few, less), (many, more) = sorted(seconds.items())
    return max(0.0, less - few * (more - less) / (many - few))


@dataclass(frozen=True)
class Meter:
    """Times programs on devices that are all at work.

    Attributes:
        count: number of devices.
        longest: seconds that one figure may take, beside its first calls.
        fewest: number of calls that are timed, however long they take.
        most: number of calls that are timed at most, and of a network's passes, which are short.
    """

    count: int
    longest: float = 3.0
    fewest: int = 5
    most: int = 30

    def product_rate(self, size: int, dtype: str) -> float:
        """Return the FLOP/s of each device in products of square matrices."""
        import jax.numpy as jnp

        x = spread((self.count, size, size), dtype, self.count)
        seconds = self.timed(lambda a: jnp.einsum("nij,njk->nik", a, a), x)
        return 2.0 * size**3 / seconds

    def copy_rate(self, size: int) -> float:
        """Return the bytes/s that each device reads and writes in one pass over `size` bytes."""
        x = spread((self.count, size // 4), "float32", self.count)
        return 2.0 * size / self.timed(lambda a: a + 1, x)

    def reduce_seconds(self, size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes over all devices."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        x = spread((self.count, size // 4), "float32", self.count)
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())
        return self.timed(lambda a: jax.lax.with_sharding_constraint(a.sum(0), whole), x)

    def network_seconds(self, width: int, rows: int, count: int) -> float:
        """Return the seconds of both passes of a small network on each of `count` devices."""
        import jax

        layers = 4
        shapes = (width, 4 * width), (1, 4 * width), (4 * width, width), (1, width)
        weights = [[spread((count, *of), "float32", count) for of in shapes] for _ in range(layers)]
        x = spread((count, rows, width), "float32", count)
        return self.timed(jax.value_and_grad(passes), (weights, x), self.most)

    def timed(self, fun: Callable[[Any], Any], x: Any, fewest: int = 0) -> float:
        """Return the seconds of the fastest call, so that other work on the machine counts little.

        Args:
            fun: what to compile and call.
            x: its argument.
            fewest: number of calls, if it is more than `self.fewest`.
        """
        import jax

        compiled = jax.jit(fun).lower(x).compile()
        for _ in range(2):
            jax.block_until_ready(compiled(x))
        durations: list[float] = []
        fewest = max(fewest, self.fewest)
        while len(durations) < fewest or (
            sum(durations) < self.longest and len(durations) < self.most
        ):
            began = time.perf_counter()
            jax.block_until_ready(compiled(x))
            durations.append(time.perf_counter() - began)
        return min(durations)


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
    values = np.full(shape, 0.5, jnp.dtype(dtype))  # NumPy's: nothing to compile
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec("device")))


if __name__ == "__main__":
    main(sys.argv[1])
