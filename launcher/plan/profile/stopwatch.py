"""A program of its own: time exported programs on this machine's devices, all of them at work.

    python stopwatch.py REQUEST.json

Reads `{"platform", "devices", "model", "programs": [file, …], "seconds"}` and writes
`{"seconds": [of each program]}` to standard output. It imports JAX and nothing of ours, so that it
starts fast; `profile.run` starts one for each candidate, and what befalls it befalls that one only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """See the module."""
    request = json.loads(Path(path).read_text())
    os.environ["JAX_PLATFORMS"] = request["platform"]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if request["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", request["devices"])
    seconds = [timed(Path(name), request) for name in request["programs"]]
    print(json.dumps({"seconds": seconds}))


def timed(path: Path, request: dict[str, Any]) -> float:
    """The seconds of the fastest call, after two that do not count: what other work on the machine
    adds is not the program's."""
    import jax
    import numpy as np
    from jax import export
    from jax.sharding import Mesh

    exported = export.deserialize(bytearray(path.read_bytes()))
    count = exported.nr_devices
    shape = count // request["model"], request["model"]
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(shape), ("copies", "model"))
    shardings = exported.in_shardings_jax(mesh) if count > 1 else None
    call: Any = (
        jax.jit(exported.call, in_shardings=shardings) if shardings else jax.jit(exported.call)
    )
    arrays = [made(aval) for aval in exported.in_avals]
    if shardings:
        arrays = [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
    compiled = call.lower(*arrays).compile()
    for _ in range(2):
        jax.block_until_ready(compiled(*arrays))
    durations: list[float] = []
    while len(durations) < 5 or (sum(durations) < request["seconds"] and len(durations) < 30):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        durations.append(time.perf_counter() - began)
    return min(durations)


def made(aval: Any) -> Any:
    """An input: numbers around one half, or zeros where they are whole, which index anything."""
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
