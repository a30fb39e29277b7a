"""A separate program that measures the rates of this machine's devices, with all at work.

It runs as `python measure_devices.py REQUEST.json`, reads `{"platform", "devices", "quick"}` and
writes the fields of `calibration.Calibration` to standard output, but for `overrun`, of which it
writes the `block_seconds`. `quick` takes some seconds. It imports JAX and none of our modules.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = {"cpu": (128, 256, 512), "cuda": (1024, 2048, 4096, 8192)}  # of square matrices
_REDUCED = {"cpu": (1 << 12, 1 << 22), "cuda": (1 << 16, 1 << 28)}  # bytes
_LEFT = 0.8  # of the cores' time, what a call has that other work does not disturb
_COPIED = {"cpu": 1 << 23, "cuda": 1 << 28}  # bytes
_NETWORK = {"cpu": (64, 1, 512), "cuda": (1024, 512, 8192)}  # its width, few rows, many rows
# A transformer's block on a device: its input, and its weights.
BLOCK = (4, 128, 128), ((128, 384), (128, 128), (128, 512), (512, 128))
_HEADS = 4

Call = tuple[float, float]  # its seconds, and the processor time of all threads


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
    # Of products, the rates are those of the largest.
    sizes = _SIZES[platform][-1:] if quick else _SIZES[platform]
    runs = [meter.network(width, rows, count) for rows in (few, many)]
    if platform == "cpu":  # what a device takes while the others are idle
        runs += [meter.network(width, many, 1)]
        runs += [meter.product(sizes[-1], "float32", of) for of in (count, 1)]
    less, more, *rest = meter.timed_in_turn(runs)
    cores = len(os.sched_getaffinity(0)) if platform == "cpu" else 0
    hidden = not is_undisturbed(count, cores, more)  # then these figures are left out
    overhead = 0.0 if hidden else dispatch_overhead({few: min(less)[0], many: min(more)[0]})
    alone = in_products = None
    if rest and not hidden:
        network, products, product = rest
        alone = effective_parallelism(count, cores, network, more)
        in_products = min(alone, effective_parallelism(count, cores, product, products))
    found = {
        "product_flops": {
            dtype: {str(n): meter.product_rate(n, dtype) for n in sizes}
            for dtype in ("bfloat16", "float32")
        },
        "memory_bandwidth": meter.copy_rate(_COPIED[platform]),
        "block_seconds": meter.block_seconds() if platform == "cpu" else None,
        "effective_parallelism": alone,
        "product_parallelism": in_products,
        "dispatch_overhead": overhead,
        "all_reduce_seconds": {
            str(n): meter.reduce_seconds(n) for n in _REDUCED[platform] if count > 1 and not hidden
        },
        "memory_bytes": (jax.devices()[0].memory_stats() or {}).get("bytes_limit"),
    }
    print(json.dumps(found))


def is_undisturbed(count: int, cores: int, every: Sequence[Call]) -> bool:
    """Return whether other work left the cores to all devices for a call, as far as is known.

    Args:
        count: number of devices.
        cores: number of cores that they share; 0 if they have none.
        every: calls of a task on each of all devices at once.
    """
    if not 0 < cores <= count:
        return True
    return max(busy / seconds for seconds, busy in every) >= _LEFT * cores


def effective_parallelism(
    count: int, cores: int, one: Sequence[Call], every: Sequence[Call]
) -> float:
    """Return `ClusterShape.effective_parallelism` of these devices, from 1 to `count`.

    It is their number times the share of a task's time with all at work that the task takes alone.
    A product alone may use all cores, and element-wise operations do not: the task is a network,
    and a product for `product_parallelism`. With shared cores, the least disturbed call shows how
    many of them one device uses.

    Args:
        count: number of devices.
        cores: number of cores.
        one: calls of the task on one device.
        every: calls of the task on each of all devices at once.
    """
    alone = min(one)[0] / min(every)[0]
    if count >= cores:
        alone = cores / max(busy / seconds for seconds, busy in one) / count
    return min(max(1.0, count * alone), count)


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
        most: number of calls that are timed at most.
    """

    count: int
    longest: float = 3.0
    fewest: int = 5
    most: int = 30

    def product_rate(self, size: int, dtype: str) -> float:
        """Return the FLOP/s of each device in products of square matrices."""
        x = spread((self.count, size, size), dtype, self.count)
        return 2.0 * size**3 / self.timed(squared, x)

    def product(self, size: int, dtype: str, count: int) -> Callable[[], Any]:
        """Return what runs a product of square matrices on each of `count` devices, compiled."""
        import jax

        x = spread((count, size, size), dtype, count)
        compiled = jax.jit(squared).lower(x).compile()
        return lambda: jax.block_until_ready(compiled(x))

    def copy_rate(self, size: int) -> float:
        """Return the bytes/s that each device reads and writes in one pass over `size` bytes."""
        x = spread((self.count, size // 4), "float32", self.count)
        return 2.0 * size / self.timed(lambda a: a + 1, x)

    def reduce_seconds(self, size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes over all devices.

        They are those in the median: how long devices wait for one another differs, and a step has
        many such waits.
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        x = spread((self.count, size // 4), "float32", self.count)
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())
        compiled = jax.jit(lambda a: jax.lax.with_sharding_constraint(a.sum(0), whole))
        (calls,) = self.timed_in_turn([lambda: jax.block_until_ready(compiled(x))])
        return statistics.median(seconds for seconds, _ in calls)

    def network(self, width: int, rows: int, count: int) -> Callable[[], Any]:
        """Return what runs both passes of a small network on each of `count` devices, compiled."""
        import jax

        layers = 4
        shapes = (width, 4 * width), (1, 4 * width), (4 * width, width), (1, width)
        weights = [[spread((count, *of), "float32", count) for of in shapes] for _ in range(layers)]
        x = spread((count, rows, width), "float32", count)
        compiled = jax.jit(jax.value_and_grad(passes)).lower((weights, x)).compile()
        return lambda: jax.block_until_ready(compiled((weights, x)))

    def block_seconds(self) -> float:
        """Return the seconds of both passes of a transformer's block on each device."""
        import jax

        given, weights = BLOCK
        x = spread((self.count, *given), "float32", self.count)
        of = [spread((self.count, *shape), "float32", self.count) for shape in weights]
        return self.timed(lambda of: jax.value_and_grad(block)(of, x), of)

    def timed_in_turn(self, runs: Sequence[Callable[[], Any]]) -> list[list[Call]]:
        """Return the calls of each, called in turn: what else the machine does falls on all."""
        for run in (*runs, *runs):
            run()
        rounds = [list(map(timed_call, runs)) for _ in range(max(self.most, self.fewest))]
        return [list(of) for of in zip(*rounds, strict=True)]

    def timed(self, fun: Callable[[Any], Any], x: Any) -> float:
        """Return the seconds of the fastest call, so that other work on the machine counts little.

        On CPUs with a core or less for each device these are all at work all the time, and a call
        takes at most its processor time on all cores: that is what other work changes least.

        Args:
            fun: what to compile and call.
            x: its argument.
        """
        import jax

        compiled = jax.jit(fun).lower(x).compile()
        cores = len(os.sched_getaffinity(0)) if jax.default_backend() == "cpu" else 0
        for _ in range(2):
            jax.block_until_ready(compiled(x))
        durations: list[float] = []
        spent = 0.0
        while len(durations) < self.fewest or (spent < self.longest and len(durations) < self.most):
            seconds, busy = timed_call(lambda: jax.block_until_ready(compiled(x)))
            spent += seconds
            shared = 0 < cores <= self.count
            durations.append(min(seconds, busy / cores) if shared and busy else seconds)
        return min(durations)


def timed_call(run: Callable[[], Any]) -> Call:
    """Call a function and return its times."""
    began, before = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - before


def squared(x: Any) -> Any:
    """Return the squares of matrices."""
    import jax.numpy as jnp

    return jnp.einsum("nij,njk->nik", x, x)


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


def block(weights: Any, x: Any) -> Any:
    """Return a number from the output of a transformer's block, as models here are written.

    Args:
        weights: as in `BLOCK`, with the devices first.
        x: the same.
    """
    import jax
    import jax.numpy as jnp

    def normed(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def product(x: Any, weight: Any) -> Any:
        return jnp.einsum("nbsi,nij->nbsj", x, weight)

    of_heads, back, wide, narrow = weights
    q, k, v = jnp.split(
        product(normed(x), of_heads).reshape(*x.shape[:3], 3 * _HEADS, -1), 3, axis=3
    )
    shares = jax.nn.softmax(jnp.einsum("nbqhd,nbkhd->nbhqk", q, k))
    x = x + product(jnp.einsum("nbhqk,nbkhd->nbqhd", shares, v).reshape(x.shape), back)
    x = x + product(jax.nn.gelu(product(normed(x), wide)), narrow)
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
