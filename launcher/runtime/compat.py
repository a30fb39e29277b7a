"""What the runtime takes from JAX that is private: all of it stands here, each name with its reason
and with what is done instead where this JAX has it no more. Used by `runtime.transfer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
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
