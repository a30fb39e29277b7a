"""Settings of `jax.config`: under which a step compiles, which travel with it, and which stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from launcher.trace import TraceError

# Those that affect how a function is traced.
_TRACE_SETTINGS = (
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


def trace_settings() -> dict[str, Any]:
    """Return the settings that affect how a function is traced, by name."""
    return {name: getattr(jax.config, name) for name in _TRACE_SETTINGS}


def check_context(name: str) -> None:
    """Refuse what of JAX's context a step cannot be compiled in."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise TraceError(
            f"{name} is called under jax.disable_jit(), and a parallelized step runs compiled; "
            "debug the step without launcher.parallelize"
        )
    if not jax.sharding.get_abstract_mesh().empty:
        raise TraceError(
            f"{name} is called under jax.set_mesh(), and its plan has meshes of its own; call it "
            "outside of it"
        )


@contextmanager
def devices_stay() -> Iterator[None]:
    """Ignore settings of the devices that modules of the user's make when they are imported.

    They are meant for a process with devices of its own. Here JAX would refuse them, because it has
    its devices by now.
    """
    update: Callable[[str, Any], None] = jax.config.update

    def without_devices(name: str, value: Any) -> None:
        if name not in _DEVICE_SETTINGS:
            update(name, value)

    jax.config.update = without_devices  # type: ignore[method-assign]
    try:
        yield
    finally:
        jax.config.update = update  # type: ignore[method-assign]
