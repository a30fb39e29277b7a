"""Call a group of workers, one a host, and their parameter servers, with a watch on every wait."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from launcher.base import Advance, Clock, clock_of
from launcher.cluster import progress
from launcher.cluster.errors import HungError, WorkerError
from launcher.cluster.progress import Progress, Progresses, diagnose, wait_of
from launcher.cluster.ray.worker import (
    WATCH_SECONDS,
    Future,
    WorkerHandle,
    cause_of,
    ended_server,
    gather,
    silent_servers,
)
from launcher.hardware import WorkerInfo

_KEY_BITS = 62  # of a transfer key's 64, so that there is room to count
_MOST = 10  # factor on the timeout: for what parameter servers send, and for all of a start's wait
_SERVER_SECONDS = 1.0  # for a server to answer, which it does whatever it waits for
_RAY_SECONDS = 4.0  # to notice Ray's end, whose first sign may be the end of a worker


class WorkerGroup:
    """One worker a host, in the order of the hosts.

    Every wait of a group ends: workers and servers that do not answer are diagnosed and given up,
    and the end of Ray and Ctrl-C are noticed.

    Args:
        handles: the workers.
        check: raises RayEndedError if the workers can never answer again.
        timeout: the seconds that a call may take. One that is `starting` may take as long as it
            makes progress; see `progress`.
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
        wait = functools.partial(self.gather, starting=True, advance=advance)
        count, first = len(self.handles), self.handles[0]
        spread = len({handle.address for handle in self.handles}) > 1
        (coordinator,) = wait([first.submit("coordinator", first.address if spread else None)])
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

    def clocks(self, rounds: int = 5) -> list[Clock]:
        """Return each worker's clock against this process's, by `rounds` round trips each.

        The workers have to be idle.
        """

        def asked(handle: WorkerHandle) -> tuple[int, int, int]:
            sent = time.time_ns()
            (there,) = self.gather([handle.submit("clock")])
            return sent, there, time.time_ns()

        return [clock_of([asked(handle) for _ in range(rounds)]) for handle in self.handles]

    def call(self, method: str, *arguments: Any) -> tuple[Future, ...]:
        """Queue a call in every worker and return without waiting."""
        return tuple(handle.submit(method, *arguments) for handle in self.handles)

    def gather(
        self,
        futures: Sequence[Future],
        *,
        starting: bool = False,
        advance: Advance | None = None,
    ) -> list[Any]:
        """Return the results of calls, in their order, once all are there.

        Args:
            futures: the calls.
            starting: whether this is before the first step.
            advance: called meanwhile with the MiB that the workers have read, or the number that
                answered.

        Raises:
            WorkerError: a worker failed; it is the first one that did.
            HungError: a worker did not answer for too long.
            RayEndedError: Ray ended.
        """
        try:
            method = futures[0].method if starting and futures else ""
            watch = self.watch(starting=starting, method=method, advance=advance)
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
        self, *, starting: bool, method: str = "", advance: Advance | None = None
    ) -> Callable[[list[WorkerHandle]], None]:
        """Return a function that watches one wait; it is called every `WATCH_SECONDS`.

        It counts its own calls and does not read the clock: while this process was stopped, the
        workers may have been stopped too.

        Args:
            starting: whether this is before the first step.
            method: the method that they were asked to run.
            advance: see `gather`.
        """
        self.check_open()
        wait = wait_of(method)
        by_time = not starting or wait.progresses is Progresses.STEP
        limit = self._timeout if by_time else progress.STILL_SECONDS
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
        deadline = time.monotonic() + _RAY_SECONDS
        while time.monotonic() < deadline:
            self._check()
            time.sleep(0.1)
