"""What the runtime takes from JAX that is private: all of it stands here, each name with its reason
and with what is done where this JAX has it no more. Used by `transfer` and `programs`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxlib import xla_client

Copy = Callable[..., list[jax.Array]]


def batched_copy(to: Sequence[Sharding]) -> Copy | None:
    """A function of arrays, one for each sharding of `to`: copies of them there, or None where this
    JAX cannot make it. Every array must be cut as its sharding cuts it, over as many devices of
    this process and in the same order, which is not checked.

    `jax.device_put` ends in this very call. What it finds out before (abstract values, trees, how
    both sides are cut) is known here when the step is compiled, and costs three times the call.
    """
    return _bound(to) if _works() else None


def _bound(to: Sequence[Sharding]) -> Copy:
    copy = xla_client.batched_copy_array_to_devices_with_sharding
    shardings: list[Any] = list(to)
    devices = [sharding._internal_device_list for sharding in shardings]
    semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(shardings)

    def bound(*arrays: jax.Array) -> list[jax.Array]:
        return copy(list(arrays), devices, shardings, semantics)

    return bound


@functools.cache
def _works() -> bool:
    """Whether a first copy arrives as it should."""
    here, there = jax.local_devices()[0], jax.local_devices()[-1]
    try:
        (copied,) = _bound([jax.sharding.SingleDeviceSharding(there)])(jax.device_put(7, here))
        return copied.devices() == {there} and int(copied) == 7
    except Exception:  # a private name may fail in any way
        return False


def loaded_for(
    compiled: Any, arguments: Sequence[Sharding], results: Sequence[Sharding]
) -> jax.stages.Compiled | None:
    """A compiled program for other devices of this process, without compiling it again, or None
    where this JAX or this platform cannot do that.

    It is written out as JAX's compilation cache does it, and read for the devices of `arguments`
    and `results`: as many, of the same kind, cut in the same way. What is public,
    `jax.experimental.serialize_executable`, reads it for the devices it was compiled for only.
    """
    try:
        program = compiled._executable._unloaded_executable
        if program.host_callbacks or compiled._params.const_args:
            return None
        devices = [*arguments, *results][0]._internal_device_list
        executable = program.backend.deserialize_executable(
            program.xla_executable.serialize(), devices, _compile_options(devices)
        )
        if list(executable.local_devices()) != list(devices):
            return None
        moved = dataclasses.replace(
            program,
            xla_executable=executable,
            device_list=devices,
            input_shardings=tuple(arguments),
            output_shardings=tuple(results),
        )
        return jax.stages.Compiled(
            moved.load(), [], compiled.args_info, compiled.out_tree, compiled._no_kwargs
        )
    except Exception:  # private names may fail in any way
        return None


def _compile_options(devices: Sequence[jax.Device]) -> Any:
    """One program over these devices, as `jax.jit` compiles it."""
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id for device in devices]])
    )
    options.executable_build_options.use_spmd_partitioning = True
    return options
