"""Settings of `jax.config` on the workers: which travel there with a step, and which stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

# Those that affect how a function is traced.
TRACE_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
# Those of the devices, which a worker has from `launcher.init`.
_DEVICE_SETTINGS = {
    "jax_cuda_visible_devices",
    "jax_default_device",
    "jax_num_cpu_devices",
    "jax_platform_name",
    "jax_platforms",
}


@contextmanager
def devices_stay() -> Iterator[None]:
    """Ignore settings of the devices that modules of the user's make when they are imported.

    They are meant for a process with devices of its own. Here JAX would refuse them, because it has
    its devices by now.
    """
    update = jax.config.update

    def without_devices(name: str, value: Any) -> None:
        if name not in _DEVICE_SETTINGS:
            update(name, value)

    jax.config.update = without_devices  # type: ignore[method-assign]
    try:
        yield
    finally:
        jax.config.update = update  # type: ignore[method-assign]
