"""What the runtime takes from JAX that is private: all of it stands here, each name with its reason
and with what is done where this JAX has it no more.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxlib import _jax, xla_client

_A_DAY = 24 * 3600 * 1000  # milliseconds; whoever started the processes looks after them
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


def agree(name: str, value: str) -> bool:
    """Wait until every process has come here; whether all came with one value. Each `name` once.

    By the store that `jax.distributed` has for its own use. What is public,
    `multihost_utils.sync_global_devices`, is a program over all devices of all processes, which on
    GPUs takes memory of each for a group that nothing else needs.
    """
    if jax.process_count() == 1:
        return True
    try:
        from jax._src import distributed

        store: Any = distributed.global_state.client
        tell, wait, told = store.key_value_set, store.wait_at_barrier, store.key_value_dir_get
    except (AttributeError, ImportError):
        return _agree_by_devices(name, value)
    tell(f"{name}/{jax.process_index()}", value)
    wait(name, _A_DAY)
    return len({each for _, each in told(f"{name}/")}) == 1


def _agree_by_devices(name: str, value: str) -> bool:
    try:
        multihost_utils.sync_global_devices(f"{name}: {value}")
    except AssertionError:
        return False
    return True


class _Read(threading.local):
    """What this thread's newest compilation took from JAX's compilation cache."""

    is_hit = False
    program: bytes | None = None


_READ = _Read()
_HIT = "/jax/compilation_cache/cache_hits"


def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bytes | None]:
    """A program compiled, or read from JAX's compilation cache; and in that case as it is kept
    there, empty where this JAX does not say. XLA:CPU writes out nothing that can run of a program
    that it has read itself.
    """
    _note_reads()
    _READ.is_hit, _READ.program = False, None
    made = lowered.compile()
    return made, (_READ.program or b"") if _READ.is_hit else None


@functools.cache
def _note_reads() -> None:
    def on_event(event: str, **_: Any) -> None:
        if event == _HIT:
            _READ.is_hit = True

    jax.monitoring.register_event_listener(on_event)
    try:
        from jax._src import compilation_cache

        decompress, extract = (
            compilation_cache.decompress_executable,
            compilation_cache.extract_executable_and_time,
        )

        def noted(executable: bytes) -> bytes:
            found = decompress(executable)
            _READ.program = extract(found)[0]
            return found

        compilation_cache.decompress_executable = noted
    except (AttributeError, ImportError):
        pass


def on_unreadable(told: Callable[[str], None]) -> None:
    """Have `told` called with the key of each entry of JAX's compilation cache that cannot be read.
    JAX itself compiles the program again, but never replaces the entry."""
    try:
        from jax._src import compilation_cache

        cache: Any = compilation_cache
        read = cache.get_executable_and_time
    except (AttributeError, ImportError):
        return

    def noted(key: str, *rest: Any, **named: Any) -> Any:
        try:
            return read(key, *rest, **named)
        except OSError:  # of the disk, not of the entry
            raise
        except Exception:
            told(key)
            raise

    cache.get_executable_and_time = noted


def loaded_for(
    compiled: Any,
    arguments: Sequence[Sharding],
    results: Sequence[Sharding],
    kept: bytes | None = None,
) -> jax.stages.Compiled | None:
    """A compiled program for other devices of this process, without compiling it again, or None
    where this JAX or this platform cannot do that.

    It is written out as JAX's compilation cache does it, and read for the devices of `arguments`
    and `results`: as many, of the same kind, cut in the same way. What is public,
    `jax.experimental.serialize_executable`, reads it for the devices it was compiled for only.

    Args:
        kept: the second of what `compiled` returned.
    """
    try:
        program = compiled._executable._unloaded_executable
        if program.host_callbacks or compiled._params.const_args or kept == b"":
            return None
        devices = [*arguments, *results][0]._internal_device_list
        written = kept or program.xla_executable.serialize()
        executable = program.backend.deserialize_executable(
            written, devices, _compile_options(devices)
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


def bind_collectives(address: str) -> None:
    """Have collectives between CPU processes meet at this machine's `address`; before the first
    device is asked for. Where this JAX makes them in another way, that is left as it is.

    JAX itself names no address, and they listen at the one that the machine's name stands for:
    open to the network, or, for a name that cannot be resolved, none at all.
    """
    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    if make is not None:
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=address)
