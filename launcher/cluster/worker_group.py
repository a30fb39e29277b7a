"""Call a group of workers, one a host, and their parameter servers, with a watch on every wait.

Compiling or reading a checkpoint of terabytes takes seconds or an hour, so before the first step
the driver limits only the time without progress. For a call that computes or reads, progress is the
processor time that its process uses and the bytes that it reads. For one that waits for other
processes, only its answer is progress, since a collective that hangs keeps a processor busy.

The diagnosis of a worker is the state of its process and its Python stacks. Linux tells most about
a process; on other systems it says less.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from launcher.base import Advance, Clock, DamagedError, clock_of, open_regular
from launcher.cluster.errors import HungError, RayEndedError, WorkerError
from launcher.cluster.ray.session import BackgroundCall
from launcher.cluster.ray.worker import (
    LOOPBACK,
    WATCH_SECONDS,
    Future,
    WorkerHandle,
    address_among,
    cause_of,
    ended_server,
    gather,
    silent_servers,
)
from launcher.hardware import WorkerInfo

STILL_SECONDS = 120.0  # that a worker may take without progress
_SHARE = 0.05  # of a processor, which a process that only waits does not use
_BYTES = 1 << 20  # read between two looks
_LOOKS = 24  # within `STILL_SECONDS`
_NODE_SECONDS = 10.0  # for another machine to answer
_DIAGNOSIS_SECONDS = 30.0  # for another machine, which starts a process for the diagnosis
_DUMP_SECONDS = 3.0  # enough for a process that can still write its stacks
_MOST_FRAMES = 12  # of each thread, the newest
_ROOT = Path(__file__).parents[2]
_OURS = tuple(f'"{_ROOT / package}{os.sep}' for package in ("launcher", "recipes"))
_ASKED = 16  # machines at once
_KEY_BITS = 62  # of a transfer key's 64, so that there is room to count
_MOST = 10  # factor on the timeout: for what parameter servers send, and for all of a start's wait
_ROUNDS = 5  # to read a clock
_SERVER_SECONDS = 1.0  # for a server to answer, which it does whatever it waits for
_RAY_SECONDS = 4.0  # to notice Ray's end elsewhere, whose first sign may be the end of a worker
_RAY_HERE_SECONDS = 0.05  # the same on this machine, whose processes of Ray are watched


class Progresses(Enum):
    """The kinds of progress of a call; the time of a `STEP` is limited instead."""

    ALONE = "each worker computes or reads by itself"
    TOGETHER = "workers compute and meet: while one computes, others may wait for it"
    ANSWER = "workers wait for one another: only an answer is progress"
    STEP = "it may be queued after a step, and take as long as any"


class Wait(NamedTuple):
    """The purpose of a call of the workers before the first step.

    Attributes:
        words: the activity of a worker meanwhile.
        progresses: the kind of progress.
    """

    words: str
    progresses: Progresses


ALONE, TOGETHER, ANSWER, STEP = Progresses
WAITS = {  # calls before the first step that are limited by their time without progress
    "join": Wait("it starts and joins the other processes", TOGETHER),
    "connect": Wait("it connects to the other processes", ANSWER),
    "meet": Wait("it connects to the parameter servers", ANSWER),
    "process": Wait("it reports its process", ANSWER),
    "clock": Wait("it reports its clock", ANSWER),
    "measure_host": Wait("it measures its host", ALONE),
    "measure": Wait("it measures its devices and links", TOGETHER),
    "build": Wait("it reads the first data and traces the step", ALONE),
    "locality": Wait("it reports its place among the processes", ANSWER),
    "begin_setup": Wait("it partitions the step into programs", ALONE),
    "compiled": Wait("it compiles", TOGETHER),
    "compile": Wait("it compiles", TOGETHER),
    "setup": Wait("it opens its connections to other devices: the first collectives", ANSWER),
    "begin_trial": Wait("it compiles a candidate plan", TOGETHER),
    "begin": Wait("it reads the model and compiles", TOGETHER),
    "more": Wait("it generates", TOGETHER),
    "create": Wait("it creates the first state", TOGETHER),
    "snapshots": Wait("it looks for snapshots in memory", ALONE),
    "restore": Wait("it reads the checkpoint", ALONE),
    "lacks": Wait("it compares a snapshot with its plan", ALONE),
    "restore_snapshot": Wait("it reads a snapshot", ALONE),
    "lend": Wait("it reads a snapshot for another host", TOGETHER),
    "keep_snapshots": Wait("it takes memory for snapshots", ALONE),
    "exchange_copies": Wait("it looks for memory for a neighbour's snapshots", ALONE),
    "drop_snapshots": Wait("it gives the memory for snapshots back", ALONE),
    "chose_anew": Wait("it reports what was compiled", ANSWER),
    "pass_over": Wait("it skips batches", ALONE),
    "first_batch": Wait("it reads its first batch", ALONE),
}


def wait_of(method: str) -> Wait:
    """Return the wait for a call; one that is not listed may follow a step, and take as long."""
    return WAITS.get(method) or Wait(f"it runs `{method}`", STEP)


class Progress:
    """Resources that the workers of one wait have used, by name.

    Args:
        limit: the seconds that a worker may take without progress.
        progresses: the kind of progress.

    Attributes:
        bytes_read: the bytes that the processes are known to have read from files meanwhile.
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
        """Ask the machines of these workers; one that cannot be asked shows no progress."""

        def used(handle: WorkerHandle) -> Any:
            with suppress(TimeoutError, RayEndedError):
                return None if self._ended else handle.run_on_node(used_by, _NODE_SECONDS)

        with ThreadPoolExecutor(_ASKED) as pool:
            names = [handle.name for handle in elsewhere]
            self._answers = dict(zip(names, pool.map(used, elsewhere), strict=True))

    def _note(self, used: Mapping[str, tuple[float, int] | None], now: float) -> None:
        for name, (seconds, read) in ((k, amounts) for k, amounts in used.items() if amounts):
            then, seconds_then, read_then = self._used.get(name, (now, seconds, read))
            self._used[name] = now, seconds, read
            self.bytes_read += max(0, read - read_then)  # what a child has read ends with it
            if now > then and (
                seconds - seconds_then >= _SHARE * (now - then) or read - read_then >= _BYTES
            ):
                self._moved[name] = now


def used_by(pid: int, log: str) -> tuple[float, int] | None:
    """Return the processor seconds of a process here and its children, and the bytes read."""
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


# -- The group ------------------------------------------------------------------------------------


class WorkerGroup:
    """One worker a host, in the order of the hosts.

    Every wait of a group ends: workers and servers that do not answer are diagnosed and given up,
    and the end of Ray and Ctrl-C are noticed. Workers that have joined end with their group: it has
    JAX's coordination service.

    Args:
        handles: the workers.
        check: raises RayEndedError if the workers can never answer again.
        timeout: the seconds that a call may take. One that is `starting` may take as long as it
            makes progress.
        setting: the name by which the user knows `timeout`.
    """

    def __init__(
        self,
        handles: Sequence[WorkerHandle],
        check: Callable[[], None],
        timeout: float,
        setting: str,
    ) -> None:
        self.handles = tuple(handles)
        self._servers: tuple[WorkerHandle, ...] = ()
        self._check_ray = check
        self._timeout, self._setting = timeout, setting
        self._closed: Exception | None = None
        self._progress: Progress | None = None  # of the newest wait

    def close(self, why: Exception) -> None:
        """End every wait, in any thread, and refuse further ones with the error `why`."""
        self._closed = why
        self._end_looks()

    def _end_looks(self) -> None:
        if self._progress is not None:
            self._progress.end()

    def check_open(self) -> None:
        """Raise the error that `close` was called with, if it was."""
        if self._closed is not None:
            raise self._closed

    def _check(self) -> None:
        self.check_open()
        self._check_ray()

    def join(self, transport: str = "auto", advance: Advance | None = None) -> None:
        """Connect the processes; this comes before any other call.

        Args:
            transport: see `Peer.join`.
            advance: see `gather`.
        """
        if len(self.handles) == 1:
            return
        from launcher.cluster.process_group import coordination  # which imports JAX

        wait = functools.partial(self.gather, starting=True, advance=advance)
        count = len(self.handles)
        address = address_among([handle.address for handle in self.handles])
        with coordination(count, address) as (coordinator, self._service):
            addresses = wait(
                [
                    handle.submit("join", coordinator, count, rank, handle.address, transport)
                    for rank, handle in enumerate(self.handles)
                ]
            )
            wait(self.call("connect", addresses, secrets.randbits(_KEY_BITS)))

    def use_servers(self, servers: Sequence[WorkerHandle]) -> None:
        """Connect the workers to parameter servers, in place of `join`."""
        self._servers = tuple(servers)
        listed = [(server.actor, server.name) for server in servers]
        seconds = _MOST * self._timeout  # the driver gives up first, and names the process to blame
        count = len(self.handles)
        self.gather(
            [h.submit("meet", count, rank, listed, seconds) for rank, h in enumerate(self.handles)],
            starting=True,
        )

    def infos(self, processes: Sequence[int], devices: int) -> list[WorkerInfo]:
        """Return the public description of each worker.

        Args:
            processes: the answers to `Peer.process`.
            devices: the number of devices of each.
        """
        return [
            WorkerInfo(
                handle.host, handle.address, process, tuple(range(i * devices, (i + 1) * devices))
            )
            for i, (handle, process) in enumerate(zip(self.handles, processes, strict=True))
        ]

    def clocks(self) -> list[Clock]:
        """Return each worker's clock against this process's, by a few round trips each.

        The workers have to be idle.
        """

        def asked(handle: WorkerHandle) -> tuple[int, int, int]:
            sent = time.time_ns()
            (there,) = self.gather([handle.submit("clock")])
            return sent, there, time.time_ns()

        return [clock_of([asked(handle) for _ in range(_ROUNDS)]) for handle in self.handles]

    def call(self, method: str, *arguments: Any) -> tuple[Future, ...]:
        """Queue a call in every worker and return without waiting."""
        return tuple(handle.submit(method, *arguments) for handle in self.handles)

    def gather(
        self,
        futures: Sequence[Future],
        *,
        starting: bool = False,
        advance: Advance | None = None,
        limit: float | None = None,
    ) -> list[Any]:
        """Return the results of calls, in their order, once all are there.

        Args:
            futures: the calls.
            starting: whether this is before the first step.
            advance: called meanwhile with the MiB that the workers have read, or the number that
                answered.
            limit: the seconds that they may take, in place of the group's.

        Raises:
            WorkerError: a worker failed; it is the first one that did.
            HungError: a worker did not answer for too long.
            RayEndedError: Ray ended.
        """
        try:
            method = futures[0].method if starting and futures else ""
            watch = self.watch(starting=starting, method=method, advance=advance, limit=limit)
            return gather(futures, watch, self._servers)
        except BaseException as error:
            self._end_looks()  # what follows may be Ray's end
            if isinstance(error, WorkerError):
                self._blame_ray(error)
            raise

    def cause_of(self, error: WorkerError) -> WorkerError:
        """Return the death of another worker that `error` follows from, or else `error`.

        Raises:
            RayEndedError: Ray ended, and all workers with it.
        """
        error = cause_of(error, [*self._servers, *self.handles])
        self._blame_ray(error)
        return error

    def watch(
        self,
        *,
        starting: bool,
        method: str = "",
        advance: Advance | None = None,
        limit: float | None = None,
    ) -> Callable[[list[WorkerHandle]], None]:
        """Return a function that watches one wait; it is called every `WATCH_SECONDS`.

        It counts its own calls and does not read the clock: while this process was stopped, the
        workers may have been stopped too.

        Args:
            starting: whether this is before the first step.
            method: the method that they were asked to run.
            advance: see `gather`.
            limit: see `gather`.
        """
        self.check_open()
        wait = wait_of(method)
        by_time = not starting or wait.progresses is Progresses.STEP
        limit = (limit or self._timeout) if by_time else STILL_SECONDS
        seen, calls, most = Progress(limit, Progresses.STEP if by_time else wait.progresses), 0, 0
        self._progress = seen

        def watch(waiting: list[WorkerHandle]) -> None:
            nonlocal calls, most
            calls, most = calls + 1, max(most, len(waiting))
            self._check()
            if (error := ended_server(self._servers)) is not None:
                raise error
            for handle in (*self.handles, *self._servers):
                handle.process()  # looked up now, so that it is known when it is needed
            seconds = calls * WATCH_SECONDS
            if standing := seen.standing(waiting, seconds):
                setting = f" ({self._setting})" if by_time else ""
                doing = f", while {wait.words}" if starting else ""
                raise self._hung(standing, f"for {limit:g} s{setting}{doing}")
            if starting and seconds >= _MOST * self._timeout:  # busy, and to no end
                raise self._hung(waiting, f"for {seconds:g} s, while {wait.words}")
            if advance is not None:
                if mib := seen.bytes_read >> 20:
                    advance(mib, None, "MiB read")
                elif most > 1:  # of those that were asked
                    advance(most - len(waiting), most, "processes")

        return watch

    def _hung(self, waiting: list[WorkerHandle], said: str) -> HungError:
        """Return the error for a wait that is over, with a diagnosis of every worker.

        A worker that has answered may have been stopped since, so that the others wait for it. A
        server that hangs is named first: the workers wait for it.
        """
        hung = silent_servers(self._servers, _SERVER_SECONDS)
        names = ", ".join(handle.name for handle in hung or waiting)
        lines = [f"no answer from {names} {said}"]
        lines += [f"{handle.name}: {diagnose(handle)}" for handle in hung]
        for handle in sorted(self.handles, key=lambda handle: handle not in waiting):
            since = "" if handle in waiting else ", which answered before"
            lines.append(f"{handle.name}{since}: {diagnose(handle)}")
        where = {handle.host: handle.whereabouts for handle in self.handles}
        return HungError("\n".join(lines), where)

    def _blame_ray(self, error: WorkerError) -> None:
        """Raise RayEndedError if Ray ends as well: then the workers only ended with it."""
        if not (error.died or error.lost_connection):
            return
        here = all(handle.address == LOOPBACK for handle in self.handles)
        deadline = time.monotonic() + (_RAY_HERE_SECONDS if here else _RAY_SECONDS)
        while time.monotonic() < deadline:
            self._check()
            time.sleep(0.05)


# -- Diagnosis ------------------------------------------------------------------------------------


def diagnose(worker: WorkerHandle) -> str:
    """Return the state of a worker that does not answer, in a few lines.

    The state is that of its process (running, waiting or stopped), with the stacks of its main
    thread and of the threads that run code of the launcher. The process writes the stacks of all
    threads to its log. For that, a stopped process is continued, so it should be ended afterwards.
    A worker on another machine is diagnosed there.
    """
    process = worker.process()
    if process is not None:
        return diagnose_process(process.pid, str(worker.log))
    if not worker.elsewhere:
        return "its process is not up yet"
    try:
        return str(worker.run_on_node(diagnose_process, _DIAGNOSIS_SECONDS))
    except (TimeoutError, RayEndedError) as error:
        return f"its process is on another machine, whose state is unknown: {error}"


def diagnose_process(pid: int, log: str) -> str:
    """Return what `diagnose` does, for a process of this machine."""
    path = Path(log)
    try:
        process = psutil.Process(pid)
        state = _state(process)
        written = _size(path)
        # A stopped process handles it as soon as it is continued, before anything else.
        process.send_signal(signal.SIGQUIT)
        process.send_signal(signal.SIGCONT)
    except psutil.Error as error:
        return f"its process cannot be diagnosed: {error}"
    stacks = relevant_stacks(_new_text(path, written))
    if not stacks:
        return f"{state}; it wrote no stacks on request"
    heading = f"{state}; its stacks (all threads: {path}):"
    return "\n".join([heading, *(f"  {line}" for line in stacks)])


def relevant_stacks(dump: str) -> list[str]:
    """Return the lines of the relevant threads of a stack dump of faulthandler.

    These are the threads that run code of the launcher, then the main thread, which the dump has
    last. Each is cut to its newest frames.
    """
    *others, main = [block.splitlines() for block in dump.strip().split("\n\n")]
    lines = []
    for block in (*others, main):
        if block is main or any(folder in line for line in block for folder in _OURS):
            lines += block[: _MOST_FRAMES + 1]
    return lines


def _state(process: psutil.Process) -> str:
    status = process.status()
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "its process was stopped (SIGSTOP, or a debugger)"
    text = {
        psutil.STATUS_DISK_SLEEP: "its process waits for a disk or network file system",
        psutil.STATUS_RUNNING: "its process is computing",
        psutil.STATUS_ZOMBIE: "its process has ended",
    }.get(status, "its process waits")
    with suppress(OSError):  # the system may hide where in the kernel
        if (channel := Path(f"/proc/{process.pid}/wchan").read_text().strip()) not in ("", "0"):
            text += f" in the kernel ({channel})"
    return text


def _size(log: Path) -> int:
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _new_text(log: Path, start: int) -> str:
    """Return what was added to `log` after byte `start`, once it stops growing."""
    deadline, size = time.monotonic() + _DUMP_SECONDS, start
    while time.monotonic() < deadline:
        time.sleep(0.2)
        before, size = size, _size(log)
        if size > start and size == before:
            break
    if size <= start:
        return ""
    try:
        descriptor = open_regular(log, os.O_RDONLY | os.O_NOFOLLOW)
    except (OSError, DamagedError):  # something else stands in its place
        return ""
    with open(descriptor, "rb") as file:
        file.seek(start)
        return file.read(size - start).decode(errors="replace")
