"""A separate program that times exported programs on this machine's devices, with all at work.

It runs as `python measure_programs.py REQUEST.json`, reads `{"platform", "devices", "model",
"programs": [[file, accumulators], …], "seconds"}` and writes `{"seconds": [of each program],
"dispatch_overhead": of one of them, in seconds}` to standard output. It imports JAX and none of our
modules, so that it starts fast. `profile.measure_layers` starts one for each candidate, and a crash
costs that candidate only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_BURST = 4  # calls that are sent before the first has ended, as a step sends its tasks
_LONG = 0.05  # seconds of a call above which the overhead of its start is below the noise


def main(path: str) -> None:
    """Time the programs of a request; see the module."""
    request = json.loads(Path(path).read_text())
    os.environ["JAX_PLATFORMS"] = request["platform"]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if request["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", request["devices"])
    programs = [loaded(Path(name), sums, request["model"]) for name, sums in request["programs"]]
    seconds = [min(durations(*program, request["seconds"])) for program in programs]
    single = min(durations(*programs[0], request["seconds"], burst=1))
    found = {"seconds": seconds, "dispatch_overhead": max(0.0, single - seconds[0])}
    print(json.dumps(found))


def loaded(path: Path, sums: int, model: int) -> tuple[Any, list[Any], int]:
    """Return the compiled program, its inputs on the devices, and its number of accumulators.

    As many of its outputs take the places of its last inputs.
    """
    import jax
    import numpy as np
    from jax import export
    from jax.sharding import Mesh

    exported = export.deserialize(bytearray(path.read_bytes()))
    arrays = [made(aval) for aval in exported.in_avals]
    how: dict[str, Any] = {}
    if exported.nr_devices > 1:
        devices = np.array(jax.devices()[: exported.nr_devices]).reshape(-1, model)
        mesh = Mesh(devices, ("copies", "model"))
        how["in_shardings"] = exported.in_shardings_jax(mesh)
        how["out_shardings"] = exported.out_shardings_jax(mesh)
    arrays = jax.device_put(arrays, list(how["in_shardings"]) if how else None)
    donated = tuple(range(len(arrays) - sums, len(arrays)))
    call = jax.jit(exported.call, donate_argnums=donated, **how)
    return call.lower(*arrays).compile(), arrays, sums


def durations(
    program: Callable[..., Any],
    arrays: list[Any],
    sums: int,
    seconds: float,
    burst: int = _BURST,
) -> list[float]:
    """Return the seconds of a call in each burst of calls.

    There are at least five bursts, or up to thirty while they take no more than `seconds` together.
    Two before them do not count. A call by itself (`burst=1`) also takes its start and the wait for
    its last device, which in a burst the others hide.
    """
    import jax

    found: list[float] = []
    while len(found) < 7 or (burst * sum(found[2:]) < seconds and len(found) < 32):
        began = time.perf_counter()
        for _ in range(burst):
            results = program(*arrays)
            if sums:
                arrays[-sums:] = results[:sums]
        jax.block_until_ready(results)
        found.append((time.perf_counter() - began) / burst)
        if found[-1] > _LONG:
            burst = 1
    return found[2:]


def made(aval: Any) -> Any:
    """Return an input: numbers around one half, or integer zeros, which can index anything."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key = jax.random.key(0, impl=jax.random.key_impl(jnp.zeros((), aval.dtype)))
        return jnp.broadcast_to(key, aval.shape)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return np.zeros(aval.shape, aval.dtype)
    values = np.random.default_rng(0).random(aval.shape, np.float32)
    return (0.25 + 0.5 * values).astype(aval.dtype)


if __name__ == "__main__":
    main(sys.argv[1])
