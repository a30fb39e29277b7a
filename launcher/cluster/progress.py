"""Whether workers get on before the first step, how far, and what each wait for them is for.

What a worker does there takes seconds or an hour: it compiles, or reads a checkpoint of terabytes.
So the driver does not limit its time, but the time without progress: where a call computes or
reads, that is what its process uses of the processor and reads of files. Where it waits for other
processes, only its answer is progress, since a collective that hangs keeps a processor busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import psutil

from launcher.cluster.errors import RayEndedError
from launcher.cluster.ray.worker import WorkerHandle

STILL_SECONDS = 120.0  # that a worker may take without progress
_SHARE = 0.05  # of a processor, which a process that only waits does not use
_BYTES = 1 << 20  # read between two looks
_LOOKS = 24  # within `STILL_SECONDS`
_NODE_SECONDS = 10.0  # for another machine to answer
_ASKED = 16  # machines at once


class Wait(NamedTuple):
    """What a call of the workers does before the first step.

    Attributes:
        words: what a worker is doing meanwhile.
        works: whether it computes or reads, rather than wait for other processes.
    """

    words: str
    works: bool


WAITS = {
    "coordinator": Wait("it starts and opens its port for the others", True),
    "join": Wait("it starts and joins the other processes", True),
    "connect": Wait("it connects to the other processes", False),
    "meet": Wait("it connects to the parameter servers", False),
    "process": Wait("it says which process it is", False),
    "clock": Wait("it tells its clock", False),
    "measure": Wait("it measures its devices and links", True),
    "build": Wait("it reads the data's first part and traces the step", True),
    "begin_setup": Wait("it cuts the step into programs", True),
    "compiled": Wait("it compiles", True),
    "compile": Wait("it compiles", True),
    "setup": Wait("it opens its connections to other devices: the first collectives", False),
    "begin_trial": Wait("it compiles a plan that is tried", True),
    "run_trial": Wait("it runs a plan that is tried", False),
    "begin": Wait("it reads the model and compiles", True),
    "more": Wait("it generates", True),
    "create": Wait("it creates the first state", True),
    "restore": Wait("it reads the checkpoint", True),
    "values": Wait("it sends its first values", False),
    "take_first": Wait("it takes the first process's values", False),
    "pass_over": Wait("it passes over batches", True),
    "first_batch": Wait("it reads its first batch", True),
    "dry_step": Wait("it runs a step on trial", False),
    "step": Wait("it runs the first step", False),
    "run": Wait("it runs the first step", False),
    "warm_up": Wait("it runs a step on trial", False),
    "ask": Wait("it tells of a compiled step", False),
    "digests": Wait("it compares its arrays", False),
    "fetch": Wait("it sends arrays", False),
    "foreach": Wait("it calls a function", True),
    "lend": Wait("it works on its arrays", True),
    "lend_own": Wait("it works on its arrays", True),
    "live_arrays": Wait("it counts its arrays", False),
    "placement": Wait("it tells where an array lies", False),
    "wait": Wait("it computes an array", False),
}


class Progress:
    """What the workers of one wait have used, by the name of each.

    Args:
        limit: the seconds that a worker may take without progress.
        works: whether what its process uses is progress.
    """

    def __init__(self, limit: float, works: bool) -> None:
        self._limit, self._works = limit, works
        self._looked = 0.0
        self._first: dict[str, int] = {}
        self._used: dict[str, tuple[float, int]] = {}
        self._moved: dict[str, float] = {}

    @property
    def bytes_read(self) -> int:
        """What the processes have read from files, as far as it is known."""
        return sum(read - self._first[name] for name, (_, read) in self._used.items())

    def standing(self, waiting: Sequence[WorkerHandle], now: float) -> list[WorkerHandle]:
        """Return the workers that have made no progress for too long.

        Args:
            waiting: those that have not answered.
            now: the seconds since the wait began.
        """
        since = now - self._looked
        if self._works and since >= self._limit / _LOOKS:
            self._looked = now
            with ThreadPoolExecutor(_ASKED) as pool:
                found = list(pool.map(_used, waiting))
            for handle, used in zip(waiting, found, strict=True):
                before = self._used.get(handle.name)
                if used and before and _gets_on(before, used, since):
                    self._moved[handle.name] = now
                if used:
                    self._first.setdefault(handle.name, used[1])
                    self._used[handle.name] = used
        return [h for h in waiting if now - self._moved.get(h.name, 0.0) >= self._limit]


def _gets_on(before: tuple[float, int], used: tuple[float, int], seconds: float) -> bool:
    return used[0] - before[0] >= _SHARE * seconds or used[1] - before[1] >= _BYTES


def _used(handle: WorkerHandle) -> tuple[float, int] | None:
    """Return what a worker's process has used so far; None if that is not known."""
    process = handle.process()
    if process is not None:
        return used_by(process.pid, "")
    if not handle.elsewhere:
        return None
    with suppress(TimeoutError, RayEndedError):
        found: tuple[float, int] | None = handle.run_on_node(used_by, _NODE_SECONDS)
        return found
    return None


def used_by(pid: int, log: str) -> tuple[float, int] | None:
    """Return the processor seconds of a process here and its children, and the bytes read."""
    del log
    seconds, read = 0.0, 0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            times = one.cpu_times()
            seconds += times.user + times.system
            read += one.io_counters().read_chars
    except psutil.Error:  # it is gone, or a child is
        return None
    return seconds, read
