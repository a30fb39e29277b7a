"""Limit the programs over several CPU devices of this process that are in flight.

JAX's CPU client lets a device have 32 computations in flight and makes whoever starts one more
wait. For a program over several devices it starts each part on its own worker threads, of which it
has as many as devices. Once all of them wait there, none is left to do the work that they wait for,
and the process hangs. (`jax.jit` alone does: 40 calls in a row on two devices are enough.) A
program on one device is started by the caller's thread, which may wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

_MOST = 8  # leaves room for other executables and for the caller's own programs


class Throttle:
    """Waits, after every `_MOST` starts of programs over several devices, for the last of them.

    The client runs them one after the other, so when the last one ends, all have ended. What is
    waited for comes before everything that is not yet started in the one order that all processes
    follow, so the wait ends.
    """

    def __init__(self) -> None:
        self._started = 0

    def wrap(self, program: Any, devices: Sequence[jax.Device]) -> Any:
        """Wrap `program`, which runs on these devices of this process, so that it is throttled."""
        if len(devices) == 1 or devices[0].platform != "cpu":
            return program

        def throttled(*arrays: Any) -> Any:
            results = program(*arrays)
            self._started += 1
            if self._started == _MOST:
                jax.block_until_ready(results)
                self._started = 0
            return results

        return throttled
