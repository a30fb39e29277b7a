"""A separate program that measures the rates of this machine's devices, with all at work.

It runs as `python measure_devices.py REQUEST.json`, reads `{"platform", "devices", "quick"}` and
writes to standard output the fields of `calibration.Calibration`, some of them as the seconds of a
program that `calibration` counts: `Deduced`. `quick` takes some seconds. It imports JAX and none of
our modules.
"""

from __future__ import annotations

import functools
import itertools
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
_AT_WORK = 0.94  # of the cores' time, what devices use that share all of it with nothing else
_COPIED = 1 << 23  # bytes
_NETWORK = 64, 1, 512  # its width, few rows, many rows
_TOGETHER = 8  # calls that a GPU is sent before the first has ended, as a step sends its programs
# A transformer's block on a device: its input, and its weights.
BLOCK = (4, 128, 128), ((128, 384), (128, 128), (128, 512), (512, 128))
_HEADS = 4
# On a GPU: elements of what is done element by element; queries, keys and values of fused
# attention; width and rows of a network that is too small to keep it at work, and its layers.
ELEMENTS = 4, 2048, 4096
ATTENDED = 4, 2048, 16, 128
_LAUNCHED, _LAYERS = (128, 128), (4, 20)

Call = tuple[float, float]  # its seconds, and the processor time of all threads
Timed = tuple[
    str, int, int, int, float
]  # a kind of `COLLECTIVES`, see `calibration.TimedCollective`
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter"


def main(path: str) -> None:
    """Measure the devices of a request; see the module."""
    request = json.loads(Path(path).read_text())
    platform, count = request["platform"], request["devices"]
    os.environ["JAX_PLATFORMS"] = platform
    import jax

    on_cpu, quick = platform == "cpu", request.get("quick", False)
    if on_cpu:
        jax.config.update("jax_num_cpu_devices", count)
    how: dict[str, Any] = {"longest": 0.15, "most": 10} if quick else {}
    meter = Meter(count, together=1 if on_cpu else _TOGETHER, **how)
    # Of products, the rates are those of the largest.
    sizes = _SIZES[platform][-1:] if quick else _SIZES[platform]
    own = of_cpus(meter, sizes[-1]) if on_cpu else of_gpus(meter)
    hidden = on_cpu and own["effective_parallelism"] is None  # then these figures are left out
    found = {
        "product_flops": {
            dtype: {str(n): meter.product_rate(n, dtype) for n in sizes}
            for dtype in ("bfloat16", "float32")
        },
        "collectives": [] if hidden else meter.collectives(_REDUCED[platform], quick),
        "memory_bytes": (jax.devices()[0].memory_stats() or {}).get("bytes_limit"),
    }
    print(json.dumps(own | found))


def of_cpus(meter: Meter, size: int) -> dict[str, Any]:
    """Measure CPU devices, which share cores.

    Args:
        meter: the meter.
        size: of the square matrices whose products show how.
    """
    width, few, many = _NETWORK
    count, cores = meter.count, len(os.sched_getaffinity(0))
    runs = [meter.network(width, rows, of) for rows, of in ((few, count), (many, count), (many, 1))]
    runs += [meter.product(size, "float32", of) for of in (count, 1)]
    less, more, network, products, product = meter.timed_in_turn(runs)
    alone = in_products = None
    overhead = 0.0
    if is_undisturbed(count, cores, more):
        _, overhead = line({few: min(less)[0], many: min(more)[0]})
        alone = effective_parallelism(count, cores, network, more)
        in_products = min(alone, effective_parallelism(count, cores, product, products))
    return {
        "memory_bandwidth": meter.copy_rate(_COPIED),
        "block_seconds": meter.block_seconds(),
        "effective_parallelism": alone,
        "product_parallelism": in_products,
        "dispatch_overhead": overhead,
    }


def of_gpus(
    meter: Meter,
    elements: tuple[int, ...] = ELEMENTS,
    attended: tuple[int, ...] = ATTENDED,
    attention: str = "cudnn",
) -> dict[str, Any]:
    """Measure GPUs, whose parts are priced apart.

    Args:
        meter: the meter.
        elements: the shape of what is done element by element.
        attended: the shape of the queries of fused attention.
        attention: its implementation, as JAX names it.
    """
    width, rows = _LAUNCHED
    runs = [meter.network(width, rows, meter.count, layers) for layers in _LAYERS]
    calls = [min(each)[0] for each in meter.timed_in_turn(runs)]
    of_layer, overhead = line(dict(zip(_LAYERS, calls, strict=True)))
    return {
        "element_seconds": meter.element_seconds(elements),
        "attention_seconds": meter.attention_seconds(attended, attention),
        "layer_seconds": of_layer,
        "dispatch_overhead": overhead,
        "effective_parallelism": None,
        "product_parallelism": None,
    }


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


def line(seconds: dict[int, float]) -> tuple[float, float]:
    """Return the slope of the line through two durations, and where it reaches 0; at least 0 both.

    Of a network's passes over few rows and over many, the latter is what a program takes beside its
    work, its start and the wait for its last device; of few layers and many, too, where the work is
    too little to be noticed.

    Args:
        seconds: the durations, by the number of rows or of layers.
    """
    (few, less), (many, more) = sorted(seconds.items())
    slope = max(0.0, (more - less) / (many - few))
    return slope, max(0.0, less - few * slope)


@dataclass(frozen=True)
class Meter:
    """Times programs on devices that are all at work.

    Attributes:
        count: number of devices.
        longest: seconds that one figure may take, beside its first calls.
        fewest: number of calls that are timed, however long they take.
        most: number of calls that are timed at most.
        together: number of runs in a call, of which all but the first wait for no host.
    """

    count: int
    longest: float = 3.0
    fewest: int = 5
    most: int = 30
    together: int = 1

    def product_rate(self, size: int, dtype: str) -> float:
        """Return the FLOP/s of each device in products of square matrices."""
        x = spread((self.count, size, size), dtype, self.count)
        return 2.0 * size**3 / self.timed(squared, x)

    def product(self, size: int, dtype: str, count: int) -> Callable[[], Any]:
        """Return what runs a product of square matrices on each of `count` devices, compiled."""
        return runner(squared, spread((count, size, size), dtype, count))

    def copy_rate(self, size: int) -> float:
        """Return the bytes/s that each device reads and writes in one pass over `size` bytes."""
        x = spread((self.count, size // 4), "float32", self.count)
        return 2.0 * size / self.timed(lambda a: a + 1, x)

    def collectives(self, sizes: Sequence[int], quick: bool) -> list[Timed]:
        """Return the durations of collectives, in pairs of devices and of all, all at work.

        They are those in the median: how long devices wait for one another differs, and a step has
        many such waits.

        Args:
            sizes: bytes of the array on a device where it is whole.
            quick: whether to measure few of them.
        """
        import jax
        import numpy as np

        count = self.count
        rings = {count} if quick or count % 2 else {2, count}
        kinds = COLLECTIVES[:2] if quick else COLLECTIVES
        ways = list(itertools.product(kinds, sorted(rings - {1}), sizes))
        devices = np.array(jax.devices()[:count])
        runs = [collective(devices.reshape(-1, ring), kind, size) for kind, ring, size in ways]
        every = [statistics.median(s for s, _ in of) for of in self.timed_in_turn(runs)]
        return [(kind, n, 1, size, of) for (kind, n, size), of in zip(ways, every, strict=True)]

    def network(self, width: int, rows: int, count: int, layers: int = 4) -> Callable[[], Any]:
        """Return what runs both passes of a small network on each of `count` devices, compiled."""
        import jax

        shapes = (width, 4 * width), (1, 4 * width), (4 * width, width), (1, width)
        weights = [[spread((count, *of), "float32", count) for of in shapes] for _ in range(layers)]
        x = spread((count, rows, width), "float32", count)
        return runner(jax.value_and_grad(passes), (weights, x))

    def block_seconds(self) -> float:
        """Return the seconds of both passes of a transformer's block on each device."""
        import jax

        given, weights = BLOCK
        x = spread((self.count, *given), "float32", self.count)
        of = [spread((self.count, *shape), "float32", self.count) for shape in weights]
        return self.timed(lambda of: jax.value_and_grad(block)(of, x), of)

    def element_seconds(self, shape: tuple[int, ...]) -> float:
        """Return the seconds of both passes of `elements` on each device.

        What stands between products in a block is fused with nothing beyond them.
        """
        import jax

        x = spread((self.count, *shape), "bfloat16", self.count)
        ones = (1 for _ in shape[:-1])
        weights = spread((self.count, 2, *ones, shape[-1]), "float32", self.count)
        apart = jax.lax.optimization_barrier
        return self.timed(lambda of: jax.value_and_grad(elements)(of, x, apart), weights)

    def attention_seconds(self, shape: tuple[int, ...], implementation: str) -> float | None:
        """Return the seconds of `attention`; None where there is none of this kind.

        Args:
            shape: of the queries, the keys and the values of a device.
            implementation: as JAX names it.
        """
        x = spread((self.count * shape[0], *shape[1:]), "bfloat16", self.count)
        try:
            return self.timed(functools.partial(attention, implementation=implementation), x)
        except (NotImplementedError, RuntimeError, ValueError):  # an older GPU, or no cuDNN
            return None

    def timed_in_turn(self, runs: Sequence[Callable[[], Any]]) -> list[list[Call]]:
        """Return the calls of each, called in turn: what else the machine does falls on all."""
        for run in (*runs, *runs):
            self.call(run)
        rounds = [list(map(self.call, runs)) for _ in range(max(self.most, self.fewest))]
        return [list(of) for of in zip(*rounds, strict=True)]

    def timed(self, fun: Callable[[Any], Any], x: Any) -> float:
        """Return the seconds of the fastest call, so that other work on the machine counts little.

        A GPU is slower after a while: of its calls it is the median. On CPUs with a core or less
        for each device these are at work nearly all the time, and a call takes at most its
        processor time on all cores: that is what other work changes least.

        Args:
            fun: what to compile and call.
            x: its argument.
        """
        import jax

        run = runner(fun, x)
        cores = len(os.sched_getaffinity(0)) if jax.default_backend() == "cpu" else 0
        for _ in range(2):
            self.call(run)
        durations: list[float] = []
        spent = 0.0
        while len(durations) < self.fewest or (spent < self.longest and len(durations) < self.most):
            seconds, busy = self.call(run)
            spent += seconds * self.together
            if 0 < cores <= self.count and busy:
                seconds = min(seconds, busy / cores / _AT_WORK)
            durations.append(seconds)
        return min(durations) if cores else statistics.median(durations)

    def call(self, run: Callable[[], Any]) -> Call:
        """Return what a run takes, in the mean of those together."""
        import jax

        began, before = time.perf_counter(), time.process_time()
        for _ in range(self.together):
            made = run()
        jax.block_until_ready(made)
        spent = time.perf_counter() - began, time.process_time() - before
        return spent[0] / self.together, spent[1] / self.together


def runner(fun: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    """Return what runs a function on its argument, compiled."""
    import jax

    program = jax.jit(fun).lower(x).compile()
    return lambda: program(x)


def collective(devices: Any, kind: str, size: int) -> Callable[[], Any]:
    """Return what runs a collective, compiled.

    Args:
        devices: an array of them; those of a row are a ring.
        kind: of `COLLECTIVES`.
        size: bytes of the array on a device where it is whole.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh, each = Mesh(devices, ("ring", "device")), PartitionSpec(("ring", "device"))
    part = max(1, size // 4 // devices.shape[1])
    given = part if kind == "all-gather" else part * devices.shape[1]
    run = {
        "all-reduce": lambda x: jax.lax.psum(x, "device"),
        "all-gather": lambda x: jax.lax.all_gather(x, "device", tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "device", tiled=True),
    }[kind]
    x = jax.jit(lambda: jnp.ones(devices.size * given), out_shardings=NamedSharding(mesh, each))()
    return runner(jax.shard_map(run, mesh=mesh, in_specs=each, out_specs=each), x)


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
        inner = jax.nn.gelu(jnp.einsum("nij,njk->nik", normed(x), wide) + bias)
        x = x + jnp.einsum("nij,njk->nik", inner, back) + other
    return (x * x).mean()


def normed(x: Any) -> Any:
    """Return a layer norm's values."""
    import jax

    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def block(weights: Any, x: Any) -> Any:
    """Return a number from the output of a transformer's block, as models here are written.

    Args:
        weights: as in `BLOCK`, with the devices first.
        x: the same.
    """
    import jax
    import jax.numpy as jnp

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


def elements(weights: Any, x: Any, apart: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return a number from what blocks do element by element, in 16 bits and their norms in 32.

    Args:
        weights: a scale and a bias, with the devices first.
        x: the same.
        apart: what stands in the place of a product.
    """
    import jax
    import jax.numpy as jnp

    scale, bias = weights[:, 0], weights[:, 1]
    for _ in range(2):
        inner = apart((normed(x.astype(jnp.float32)) * scale).astype(x.dtype))
        x = x + apart(jax.nn.gelu(inner + bias.astype(x.dtype)))
    return (apart(x).astype(jnp.float32) ** 2).mean()


def attention(x: Any, implementation: str) -> Any:
    """Return the gradient of fused attention, each position to those before it.

    Args:
        x: the queries, the keys and the values.
        implementation: as JAX names it.
    """
    import jax

    how: dict[str, Any] = {"is_causal": True, "implementation": implementation}
    out, back = jax.vjp(lambda x: jax.nn.dot_product_attention(x, x, x, **how), x)
    return back(out)


def spread(shape: tuple[int, ...], dtype: str, count: int) -> Any:
    """Return an array whose first axis is sharded over the devices.

    Its numbers differ: a GPU computes faster with equal ones, which take less power.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:count]), ("device",))
    part = (shape[0] // count, *shape[1:])
    values = 0.1 * np.random.default_rng(0).standard_normal(part, np.float32)  # nothing to compile
    whole = np.tile(values.astype(jnp.dtype(dtype)), (count, *(1 for _ in shape[1:])))
    return jax.device_put(whole, NamedSharding(mesh, PartitionSpec("device")))


if __name__ == "__main__":
    main(sys.argv[1])
