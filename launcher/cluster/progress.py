"""Progress of the workers before the first step, and the purpose of each wait.

What a worker does there takes seconds or an hour: it compiles, or reads a checkpoint of terabytes.
So the driver does not limit its time, but the time without progress: where a call computes or
reads, that is what its process uses of the processor and reads of files. Where it waits for other
processes, only its answer is progress, since a collective that hangs keeps a processor busy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

import psutil

from launcher.cluster.errors import RayEndedError
from launcher.cluster.ray.waiting import BackgroundCall
from launcher.cluster.ray.worker import WorkerHandle

STILL_SECONDS = 120.0  # that a worker may take without progress
_SHARE = 0.05  # of a processor, which a process that only waits does not use
_BYTES = 1 << 20  # read between two looks
_LOOKS = 24  # within `STILL_SECONDS`
_NODE_SECONDS = 10.0  # for another machine to answer
_ASKED = 16  # machines at once


class Progresses(Enum):
    """What counts as progress of a call, or that its time is limited instead."""

    ALONE = "each worker computes or reads by itself"
    TOGETHER = "workers compute and meet: while one computes, others may wait for it"
    ANSWER = "workers wait for one another: only an answer is progress"
    STEP = "it may stand behind a step, and may take as long as any"


class Wait(NamedTuple):
    """What a call of the workers does before the first step.

    Attributes:
        words: what a worker is doing meanwhile.
        progresses: what counts as progress.
    """

    words: str
    progresses: Progresses


ALONE, TOGETHER, ANSWER, STEP = Progresses
WAITS = {
    "coordinator": Wait("it starts and opens its port for the others", ALONE),
    "join": Wait("it starts and joins the other processes", TOGETHER),
    "connect": Wait("it connects to the other processes", ANSWER),
    "meet": Wait("it connects to the parameter servers", ANSWER),
    "process": Wait("it says which process it is", ANSWER),
    "clock": Wait("it tells its clock", ANSWER),
    "measure": Wait("it measures its devices and links", TOGETHER),
    "build": Wait("it reads the data's first part and traces the step", ALONE),
    "begin_setup": Wait("it cuts the step into programs", ALONE),
    "compiled": Wait("it compiles", ALONE),
    "compile": Wait("it compiles", TOGETHER),
    "setup": Wait("it opens its connections to other devices: the first collectives", ANSWER),
    "begin_trial": Wait("it compiles a plan that is tried", TOGETHER),
    "run_trial": Wait("it runs a plan that is tried", STEP),
    "begin": Wait("it reads the model and compiles", TOGETHER),
    "more": Wait("it generates", TOGETHER),
    "create": Wait("it creates the first state", TOGETHER),
    "restore": Wait("it reads the checkpoint", ALONE),
    "values": Wait("it sends its first values", STEP),
    "take_first": Wait("it takes the first process's values", STEP),
    "pass_over": Wait("it passes over batches", ALONE),
    "first_batch": Wait("it reads its first batch", ALONE),
    "dry_step": Wait("it runs a step on trial", STEP),
    "step": Wait("it runs the first step", STEP),
    "run": Wait("it runs the first step", STEP),
    "warm_up": Wait("it runs a step on trial", STEP),
    "ask": Wait("it tells of a compiled step", STEP),
    "digests": Wait("it compares its arrays", STEP),
    "fetch": Wait("it sends arrays", STEP),
    "foreach": Wait("it calls a function", STEP),
    "lend": Wait("it works on its arrays", STEP),
    "lend_own": Wait("it works on its arrays", STEP),
    "live_arrays": Wait("it counts its arrays", STEP),
    "placement": Wait("it tells where an array lies", STEP),
    "wait": Wait("it computes an array", STEP),
}


class Progress:
    """What the workers of one wait have used, by the name of each.

    Args:
        limit: the seconds that a worker may take without progress.
        progresses: what counts as progress.

    Attributes:
        bytes_read: what the processes have read from files meanwhile, as far as it is known.
    """

    def __init__(self, limit: float, progresses: Progresses) -> None:
        self._limit, self._progresses = limit, progresses
        self._looked = 0.0
        self.bytes_read = 0
        self._used: dict[str, tuple[float, float, int]] = {}
        self._moved: dict[str, float] = {}
        self._ended = False
        self._asking: BackgroundCall | None = None
        self._answers: Mapping[str, tuple[float, int] | None] = {}

    def end(self) -> None:
        """Wait until no machine is asked any more: Ray is about to be left."""
        self._ended = True
        if self._asking is not None:
            self._asking.ended(_NODE_SECONDS)

    def standing(self, waiting: Sequence[WorkerHandle], now: float) -> list[WorkerHandle]:
        """Return the workers that have made no progress for too long; it never blocks.

        Args:
            waiting: those that have not answered.
            now: the seconds since the wait began.
        """
        looks = self._progresses in (ALONE, TOGETHER)
        if looks and now - self._looked >= self._limit / _LOOKS:
            self._looked = now
            self._look(waiting, now)
        still = [h for h in waiting if now - self._moved.get(h.name, 0.0) >= self._limit]
        if self._progresses is TOGETHER and len(still) < len(waiting):
            return []
        return sorted(still, key=lambda handle: self._moved.get(handle.name, 0.0))

    def _look(self, waiting: Sequence[WorkerHandle], now: float) -> None:
        here = {h.name: process for h in waiting if (process := h.process()) is not None}
        self._note({name: used_by(process.pid, "") for name, process in here.items()}, now)
        elsewhere = [h for h in waiting if h.name not in here and h.elsewhere]
        if self._asking is None or self._asking.ended(0):
            answers, self._answers = self._answers, {}
            self._note(answers, now)
            if elsewhere:
                self._asking = BackgroundCall(functools.partial(self._ask, elsewhere))

    def _ask(self, elsewhere: Sequence[WorkerHandle]) -> None:
        with ThreadPoolExecutor(_ASKED) as pool:
            found = list(pool.map(self._used_elsewhere, elsewhere))
        self._answers = {h.name: used for h, used in zip(elsewhere, found, strict=True)}

    def _note(self, used: Mapping[str, tuple[float, int] | None], now: float) -> None:
        for name, found in used.items():
            if found is None:
                continue
            seconds, read = found
            then, seconds_then, read_then = self._used.get(name, (now, seconds, read))
            self._used[name] = now, seconds, read
            self.bytes_read += max(0, read - read_then)  # what a child has read ends with it
            if now > then and (
                seconds - seconds_then >= _SHARE * (now - then) or read - read_then >= _BYTES
            ):
                self._moved[name] = now

    def _used_elsewhere(self, handle: WorkerHandle) -> tuple[float, int] | None:
        """Return what a process on another machine has used so far; None if it is not told."""
        with suppress(TimeoutError, RayEndedError):
            if not self._ended:
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
            with suppress(psutil.AccessDenied, AttributeError):  # another user's, no such file
                counters = one.io_counters()
                # What is mapped counts in the latter only, what is cached in the former.
                read += max(counters.read_chars, counters.read_bytes)
    except psutil.Error:  # it is gone, or a child is
        return None
    return seconds, read
