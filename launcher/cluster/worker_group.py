"""A group of workers, one a host, whose every wait is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from launcher.cluster.diagnose import diagnose
from launcher.cluster.errors import HungError, WorkerError
from launcher.cluster.process_group import init_process_group
from launcher.cluster.ray.worker import WATCH_SECONDS, Future, WorkerHandle, cause_of, gather, ready
from launcher.worker_info import WorkerInfo

STARTING = 10  # factor on the timeout while workers compile or connect
_RAY_SECONDS = 4.0  # to notice Ray's end, whose first sign may be the end of a worker


class WorkerGroup:
    """One worker a host, in the order of the hosts.

    Every wait of a group ends: workers that do not answer are diagnosed and given up, the end of
    Ray is noticed, and Ctrl-C is answered.

    Args:
        handles: the workers.
        check: raises RayEndedError if the workers can never answer again.
        timeout: the seconds that a call may take; a call that is `starting` may take `STARTING`
            times as long.
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
        self._check = check
        self._timeout, self._setting = timeout, setting

    def join(self, transport: str = "auto") -> None:
        """Connect the processes; this comes before any other call.

        Args:
            transport: see `Peer.join`.
        """
        init_process_group(self.handles, self.watch(starting=True), transport)

    def infos(self, about: Sequence[tuple[int, Sequence[int]]]) -> list[WorkerInfo]:
        """Return what is known of each worker, given the answers to `Peer.about`."""
        return [
            WorkerInfo(handle.host, handle.address, process, tuple(devices))
            for handle, (process, devices) in zip(self.handles, about, strict=True)
        ]

    def submit(self, method: str, *arguments: Any) -> tuple[Future, ...]:
        """Queue a call in every worker and return without waiting."""
        return tuple(handle.submit(method, *arguments) for handle in self.handles)

    def gather(self, futures: Sequence[Future], *, starting: bool = False) -> list[Any]:
        """Return the results of calls, in their order, once all are there.

        Args:
            futures: the calls.
            starting: whether the workers compile or connect, which takes longer.

        Raises:
            WorkerError: a worker failed; it is the first one that did.
            HungError: a worker did not answer for too long.
            RayEndedError: Ray ended.
        """
        try:
            return gather(futures, self.watch(starting=starting))
        except WorkerError as error:
            self._blame_ray(error)
            raise

    def ready(self, futures: Sequence[Future], *, starting: bool = False) -> list[Future]:
        """Wait until any of the calls is over and return all that are, however they ended.

        Args:
            futures: the calls.
            starting: whether the workers compile or connect, which takes longer.

        Raises:
            HungError: no worker answered for too long.
            RayEndedError: Ray ended.
        """
        watch = self.watch(starting=starting)
        while not (done := ready(futures, timeout=WATCH_SECONDS)):
            watch([future.worker for future in futures])
        return done

    def cause_of(self, error: WorkerError) -> WorkerError:
        """Return the death of another worker that `error` follows from, or else `error`.

        Raises:
            RayEndedError: Ray ended, and all workers with it.
        """
        error = cause_of(error, self.handles)
        self._blame_ray(error)
        return error

    def watch(self, *, starting: bool) -> Callable[[list[WorkerHandle]], None]:
        """Return a function that watches one wait; it is called every `WATCH_SECONDS`.

        It counts its own calls and does not read the clock: while this process was stopped, the
        workers may have been stopped too.
        """
        limit = self._timeout * (STARTING if starting else 1)
        calls = 0

        def watch(waiting: list[WorkerHandle]) -> None:
            nonlocal calls
            calls += 1
            self._check()
            for handle in self.handles:
                handle.process()  # looked up now, so that it is known when it is needed
            if calls * WATCH_SECONDS >= limit:
                raise self._hung(waiting, limit)

        return watch

    def _hung(self, waiting: list[WorkerHandle], seconds: float) -> HungError:
        """Return the error for a wait of so many seconds, with a diagnosis of every worker.

        A worker that has answered may have been stopped since, so that the others wait for it.
        """
        names = ", ".join(handle.name for handle in waiting)
        lines = [f"no answer from {names} for {seconds:g} s ({self._setting})"]
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
