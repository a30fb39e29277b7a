"""How the driver talks to a worker: calls that return at once, results that are asked for later.

`session` makes the handles; `launcher.train` uses them.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from launcher.cluster.errors import RayEndedError, WorkerError
from launcher.cluster.ray.worker_actor import machine

LOOPBACK = "127.0.0.1"
WATCH_SECONDS = 0.5
_KILL_SECONDS = 10
_DEATH_SECONDS = 5  # in which Ray learns that a worker is gone


class Future:
    """The result of one call, now or later."""

    def __init__(self, reference: Any, worker: WorkerHandle, method: str) -> None:
        self._reference = reference
        self.worker = worker
        self._method = method

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call and return what it returned. May be asked for more than once.

        Args:
            timeout: seconds to wait; None waits for as long as the worker lives.

        Raises:
            WorkerError: the method raised, or the worker died.
            RayEndedError: Ray itself ended.
            TimeoutError: the call is still running; ask again.
        """
        import ray

        try:
            done, value = ray.get(self._reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"{self.worker.name}: {self._method} is still running after {timeout:g} s"
            ) from None
        except ray.exceptions.RayTaskError as error:
            # Outside the method itself: its arguments or its result could not be pickled.
            raise self.worker.failure(
                type(error.cause).__name__, str(error.cause), str(error)
            ) from None
        except ray.exceptions.ActorDiedError as error:
            raise self.worker.death(str(error)) from None
        except ray.exceptions.ActorUnavailableError:  # and we do not try again
            raise self.worker.death("unreachable") from None
        except ray.exceptions.RayError as error:
            output = self.worker.log.with_name("ray.log")
            raise RayEndedError(f"Ray lost {self.worker.name}; see {output}: {error}") from error
        if not done:
            raise self.worker.failure(*value)
        return value


def gather(
    futures: Sequence[Future], watch: Callable[[list[WorkerHandle]], None] | None = None
) -> list[Any]:
    """The results of all calls, in their order. Raises like `Future.result`, as soon as any call
    fails, though others may wait for the one that failed.

    Args:
        watch: called every `WATCH_SECONDS` with the workers that have not answered; what it raises
            ends the wait.
    """
    waiting = list(futures)
    while waiting:
        done = ready(waiting, timeout=WATCH_SECONDS)
        if watch and not done:
            watch([future.worker for future in waiting])
        for future in done:
            waiting.remove(future)
            try:
                future.result()
            except WorkerError as error:
                raise cause_of(error, [future.worker for future in futures]) from None
    return [future.result() for future in futures]


def ready(futures: Sequence[Future], *, timeout: float) -> list[Future]:
    """Those calls that are over, however they ended: at once if any is, else as soon as one is or
    `timeout` seconds have passed. Raises RayEndedError."""
    import ray

    by_reference = {future._reference: future for future in futures}
    count = 1 if timeout else len(by_reference)
    try:
        done, _ = ray.wait(list(by_reference), num_returns=count, timeout=timeout)
    except ray.exceptions.RayError as error:
        raise RayEndedError(f"Ray cannot be asked any more: {error}") from error
    return [by_reference[reference] for reference in done]


def without_place(workers: Sequence[WorkerHandle], timeout: float) -> dict[str, str]:
    """Those whose processes Ray has not started after `timeout` seconds, by their names, and what
    Ray says of each, "" where it still tries; returns as soon as nothing is left to wait for."""
    import ray

    places = [worker.place for worker in workers]
    done, _ = ray.wait(places, num_returns=len(places), timeout=timeout)
    without = {}
    for worker in workers:
        if worker.place not in done:
            without[worker.name] = ""
            continue
        try:
            ray.get(worker.place)
        except ray.exceptions.RayError as error:
            without[worker.name] = str(error)
    return without


def share(value: Any) -> Any:
    """`value`, written once to where every process of the machine reads it: hand what is returned
    to several `submit`s as an argument, and the methods get `value` itself."""
    import ray

    return ray.put(value)


def kill(workers: Sequence[WorkerHandle]) -> None:
    """Kill the workers of this machine that are known and still there. Usually Ray does it; where
    that was killed itself, a worker might go on for a while, and write."""
    processes = [process for worker in workers if (process := worker.process())]
    for process in processes:
        with suppress(psutil.Error):  # it is gone
            process.kill()
    psutil.wait_procs(processes, _KILL_SECONDS)


def cause_of(error: WorkerError, workers: Iterable[WorkerHandle]) -> WorkerError:
    """The death of another of `workers` that `error` may only be a consequence of, or `error`."""
    import ray

    others = [] if error.died else [worker for worker in workers if worker.host != error.host]
    deadline = time.monotonic() + _DEATH_SECONDS
    with suppress(ray.exceptions.RayError):  # Ray itself ended: nobody can be asked
        # Asked anew: the one that died may have answered all that it was asked before.
        asked = {worker.ask_for_life(): worker for worker in others}
        while asked and (left := deadline - time.monotonic()) > 0:
            for reference in ray.wait(list(asked), timeout=left)[0]:
                worker = asked.pop(reference)
                try:
                    ray.get(reference)
                except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError) as end:
                    return worker.death(str(end))
    return error


class WorkerHandle:
    """One worker process, `host` its index in the pool and `address` its machine's; `log` holds its
    output. `elsewhere`: its process is known to be on another machine. `place`: Ray's reference to
    where its process is, once that is up.

    Calls run one at a time, in the order in which they were submitted.
    """

    def __init__(self, actor: Any, host: int, log: Path, address: str = LOOPBACK) -> None:
        self._actor = actor
        self.place = actor.place.remote()
        self._process: psutil.Process | None = None
        self._kills_before = _out_of_memory_kills()
        self.host = host
        self.name = f"worker_{host}" + (f" on {address}" if address != LOOPBACK else "")
        self.log = log
        self.address = address
        self.elsewhere = False

    def submit(self, method: str, *arguments: Any) -> Future:
        """Queue a call of the worker object's `method` and return without waiting."""
        return Future(self._actor.call.remote(method, *arguments), self, method)

    def ask_for_life(self) -> Any:
        """Ray's reference to an answer that comes after all that is queued, or to its death."""
        return self._actor.place.remote()

    def process(self) -> psutil.Process | None:
        """Its process; None as long as that is not up, and where it is `elsewhere`."""
        import ray

        if self._process is None and not self.elsewhere:
            with suppress(ray.exceptions.RayError, psutil.NoSuchProcess):
                where, pid, _ = ray.get(self.place, timeout=0)
                self.elsewhere = where != machine()
                self._process = None if self.elsewhere else psutil.Process(pid)
        return self._process

    def on_its_node(self, function: Callable[..., Any], seconds: float) -> Any:
        """What `function(pid, log)` returns in a process of its own on the worker's node: of an
        importable module, of whose names it uses no others than its own and of installed libraries.

        Raises TimeoutError where that takes longer than `seconds`, and RayEndedError.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        try:
            _, pid, node = ray.get(self.place, timeout=0)
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task: Any = ray.remote(function)
            task = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            return ray.get(task.remote(pid, str(self.log)), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"its node did not answer within {seconds:g} s") from None
        except ray.exceptions.RayError as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            raise RayEndedError(f"Ray cannot look there: {told[-1]}") from None

    @property
    def whereabouts(self) -> str:
        """Its name and, as far as they are known, its process and machine."""
        process = self._process
        return f"{self.name} (process {process.pid} on this machine)" if process else self.name

    def failure(self, error_type: str, message: str, traceback_text: str) -> WorkerError:
        """The error for an exception raised inside the worker."""
        return WorkerError(
            self.name,
            message,
            self.log,
            host=self.host,
            whereabouts=self.whereabouts,
            error_type=error_type,
            traceback_text=traceback_text,
        )

    def death(self, told: str) -> WorkerError:
        """The error for a worker whose process is gone, as far as Ray's text `told` knows why."""
        kills = _out_of_memory_kills() - self._kills_before
        silent = "health check failed" in told  # of the node: of the worker nothing is known
        if code := re.search(r"exit code (-?\d+)", told):
            how = f"its process ended with exit code {code[1]}"
        elif told == "unreachable":
            how = (
                "the connection to it broke: its process or its machine failed, or the network to "
                "it is cut"
            )
        elif silent:
            how = (
                "Ray's process on its machine has not answered for a minute: the network to it is "
                "cut, or that machine hangs or is down"
            )
        elif "node has died" in told:
            how = "Ray ended on its machine, which failed or was shut down, or somebody killed it"
        elif "creation task" in told:
            how = f"its process could not be set up\n{told}"
        elif kills:
            how = (
                "its process was killed, and since it started the kernel has killed "
                f"{kills} process(es) here for lack of memory (dmesg names them)"
            )
        else:
            how = "its process was killed by a signal or crashed"
        return WorkerError(
            self.name,
            how,
            self.log,
            host=self.host,
            whereabouts=self.whereabouts,
            died=True,
            silent=silent or told == "unreachable",
        )


def _out_of_memory_kills() -> int:
    """How many processes this machine's kernel has killed for lack of memory since it booted."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
