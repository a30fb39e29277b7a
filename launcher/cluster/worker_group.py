"""All workers of a session as one group, and the watch over every wait for them.

Both doors hold one: the command line in the driver's `Workers`, Python in its `RayBackend`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from launcher.cluster.diagnose import diagnose
from launcher.cluster.errors import HungError, WorkerError
from launcher.cluster.process_group import init_process_group
from launcher.cluster.ray.worker import WATCH_SECONDS, Future, WorkerHandle, cause_of, gather, ready

STARTING = 10  # where they compile and connect, they may take so many times longer
_RAY_SECONDS = 4.0  # in which Ray's end is noticed, of which a worker's may be the first sign


class WorkerGroup:
    """One worker a host, in the order of the hosts.

    No wait of a group is without an end: workers that do not answer are diagnosis and given up,
    the end of Ray is noticed, and Ctrl-C is answered.

    Args:
        check: raises RayEndedError where the workers can never answer again.
        timeout: the seconds that a call may take; `STARTING` times that for one that is `starting`.
        setting: what the user knows `timeout` by.
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
        """Make the processes know one another; the first thing to do. `transport`: see `Peer`."""
        init_process_group(self.handles, self.watch(starting=True), transport)

    def submit(self, method: str, *arguments: Any) -> tuple[Future, ...]:
        """Queue a call in every worker and return without waiting."""
        return tuple(handle.submit(method, *arguments) for handle in self.handles)

    def gather(self, futures: Sequence[Future], *, starting: bool = False) -> list[Any]:
        """The results of calls, in their order, once all are there.

        Raises WorkerError for the first worker that fails, HungError where one does not answer for
        too long, and RayEndedError.
        """
        try:
            return gather(futures, self.watch(starting=starting))
        except WorkerError as error:
            self._blame_ray(error)
            raise

    def ready(self, futures: Sequence[Future], *, starting: bool = False) -> list[Future]:
        """Those of the calls that are over, however they ended, as soon as one is. Raises HungError
        and RayEndedError."""
        watch = self.watch(starting=starting)
        while not (done := ready(futures, timeout=WATCH_SECONDS)):
            watch([future.worker for future in futures])
        return done

    def cause_of(self, error: WorkerError) -> WorkerError:
        """The death of another worker that `error` may only follow from, or `error`. Raises
        RayEndedError where Ray ended, and they all with it."""
        error = cause_of(error, self.handles)
        self._blame_ray(error)
        return error

    def watch(self, *, starting: bool) -> Callable[[list[WorkerHandle]], None]:
        """What looks after one wait. It counts its own calls, not the clock: when this process was
        stopped for a while, so may have been the workers."""
        limit = self._timeout * (STARTING if starting else 1)
        calls = 0

        def watch(waiting: list[WorkerHandle]) -> None:
            nonlocal calls
            calls += 1
            self._check()
            for handle in self.handles:
                handle.process()  # to be known when it is needed
            if calls * WATCH_SECONDS >= limit:
                raise self._hung(waiting, limit)

        return watch

    def _hung(self, waiting: list[WorkerHandle], seconds: float) -> HungError:
        """All are diagnosis: one that answered may be stopped since, and the others wait for it."""
        names = ", ".join(handle.name for handle in waiting)
        told = f"no answer from {names} for {seconds:g} s ({self._setting})"
        found = []
        for handle in sorted(self.handles, key=lambda handle: handle not in waiting):
            since = "" if handle in waiting else ", which answered before"
            found.append(f"{handle.name}{since}: {diagnose(handle)}")
        where = {handle.host: handle.whereabouts for handle in self.handles}
        return HungError("\n".join([told, *found]), where)

    def _blame_ray(self, error: WorkerError) -> None:
        """Raise RayEndedError where Ray ends as well: then the workers only went with it."""
        if not (error.died or error.lost_connection):
            return
        deadline = time.monotonic() + _RAY_SECONDS
        while time.monotonic() < deadline:
            self._check()
            time.sleep(0.1)
