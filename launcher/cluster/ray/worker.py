"""Call workers from the driver: calls return at once, results are awaited later."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launcher.cluster.errors import RayEndedError, WorkerError
from launcher.cluster.ray import ray_compat
from launcher.cluster.ray.worker_actor import machine_id

LOOPBACK = "127.0.0.1"
WATCH_SECONDS = 0.5
_KILL_SECONDS = 10
_DEATH_SECONDS = 5  # that Ray may take to notice the end of a worker
_BROKEN = "the connection broke"  # in place of a text of Ray's
# The end of a worker, by a part of Ray's text; of the first two nothing more is known.
_ENDS = {
    _BROKEN: "the connection to it broke: its process or its machine failed, or the network to it "
    "is cut",
    ray_compat.NODE_UNREACHABLE: "Ray's process on its machine has not answered for a minute: the "
    "network to it is cut, or that machine hangs or is down",
    ray_compat.NODE_DIED: "Ray ended on its machine, which failed or was shut down, or somebody "
    "killed it",
}


@dataclass(eq=False, frozen=True)
class Future:
    """The result of one call of a worker.

    Attributes:
        reference: Ray's reference to `worker_actor.Outcome`; a further call may take it, and then
            gets the value.
        worker: the worker.
        method: the method called.
    """

    reference: Any
    worker: WorkerHandle
    method: str

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call and return its result; it may be called more than once.

        Args:
            timeout: the seconds to wait; None waits for as long as the worker lives.

        Raises:
            WorkerError: the method raised, or the worker died.
            RayEndedError: Ray itself ended.
            TimeoutError: the call is still running.
        """
        import ray

        try:
            done, value = ray.get(self.reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"{self.worker.name}: {self.method} is still running after {timeout:g} s"
            ) from None
        except ray.exceptions.RayTaskError as error:
            # Raised outside the method: its arguments or its result could not be pickled.
            kind = type(error.cause).__name__
            raise self.worker.failure(kind, str(error.cause), str(error)) from None
        except ray.exceptions.ActorDiedError as error:
            raise self.worker.death(str(error)) from None
        except ray.exceptions.ActorUnavailableError:  # Ray could try again; the launcher does not
            raise self.worker.death(_BROKEN) from None
        except ray.exceptions.RayError as error:
            output = self.worker.log.with_name("ray.log")
            raise RayEndedError(f"Ray lost {self.worker.name}; see {output}: {error}") from error
        if not done:
            raise self.worker.failure(*value)
        return value


def gather(
    futures: Sequence[Future],
    watch: Callable[[list[WorkerHandle]], None] | None = None,
    servers: Sequence[WorkerHandle] = (),
) -> list[Any]:
    """Return the results of all calls, in their order.

    It raises as soon as any call fails, though others may wait for the one that failed. It raises
    the errors of `Future.result`.

    Args:
        futures: the calls.
        watch: called every `WATCH_SECONDS` with the workers that have not answered; an exception
            that it raises ends the wait.
        servers: the parameter servers: the end of one may be why a call failed.
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
                others = [future.worker for future in futures]
                raise cause_of(error, [*servers, *others]) from None
    return [future.result() for future in futures]


def ready(futures: Sequence[Future], *, timeout: float) -> list[Future]:
    """Return the calls that are over, however they ended.

    Args:
        futures: the calls.
        timeout: the seconds to wait for the first of them; 0 does not wait.

    Raises:
        RayEndedError: Ray itself ended.
    """
    import ray

    by_reference = {future.reference: future for future in futures}
    count = 1 if timeout else len(by_reference)
    try:
        done, _ = ray.wait(list(by_reference), num_returns=count, timeout=timeout)
    except ray.exceptions.RayError as error:
        raise RayEndedError(f"Ray no longer answers: {error}") from error
    return [by_reference[reference] for reference in done]


def not_started(workers: Sequence[WorkerHandle], timeout: float) -> dict[str, str]:
    """Return the workers whose processes Ray has not started, by name, with Ray's reason.

    The reason is "" while Ray still tries. It returns as soon as nothing is left to wait for, at
    the latest after `timeout` seconds.
    """
    import ray

    locations = [worker.location for worker in workers]
    done, _ = ray.wait(locations, num_returns=len(locations), timeout=timeout)
    missing = {}
    for worker in workers:
        if worker.location not in done:
            missing[worker.name] = ""
            continue
        try:
            ray.get(worker.location)
        except ray.exceptions.RayError as error:
            missing[worker.name] = str(error)
    return missing


def share(value: Any) -> Any:
    """Write `value` once to where every process of the machine can read it.

    What is returned is passed to several `submit`s as an argument; the methods get `value` itself.
    """
    import ray

    return ray.put(value)


def address_among(addresses: Iterable[str]) -> str | None:
    """Return this machine's address among those of workers; None if all of these are on it."""
    import ray

    others = {*addresses} - {LOOPBACK}
    here: str = ray.util.get_node_ip_address() if others else LOOPBACK
    return here if others - {here} else None


def has_ended(process: psutil.Process, or_is: str = psutil.STATUS_ZOMBIE) -> bool:
    """Return whether a process here has ended, which its parent may not know, or has a status."""
    try:
        return not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, or_is)
    except psutil.NoSuchProcess:
        return True


def kill(workers: Sequence[WorkerHandle], patience: float) -> None:
    """Kill the workers of this machine that are known and still run.

    Usually Ray does that. If Ray itself was killed, a worker might run, and write, for a while.

    Args:
        workers: the workers.
        patience: the seconds that Ray may take to end them itself.
    """
    processes = [process for worker in workers if (process := worker.process())]
    for process in psutil.wait_procs(processes, patience)[1] if patience else processes:
        with suppress(psutil.Error):  # it is gone
            process.kill()
    psutil.wait_procs(processes, _KILL_SECONDS)


def cause_of(error: WorkerError, workers: Iterable[WorkerHandle]) -> WorkerError:
    """Return the death of another of `workers` that may have caused `error`, or else `error`."""
    import ray

    others = [] if error.died else [worker for worker in workers if worker.name != error.worker]
    deadline = time.monotonic() + _DEATH_SECONDS
    with suppress(ray.exceptions.RayError):  # Ray itself ended and cannot be asked
        # By new calls: the worker that died may have answered all earlier ones.
        pending = {worker.ping(): worker for worker in others}
        while pending and (left := deadline - time.monotonic()) > 0:
            for reference in ray.wait(list(pending), timeout=left)[0]:
                worker = pending.pop(reference)
                try:
                    ray.get(reference)
                except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError) as end:
                    return worker.death(str(end))
    return error


def ended_server(servers: Sequence[WorkerHandle]) -> WorkerError | None:
    """Return the death of one of `servers`; None if all live. It waits for nothing."""
    import ray

    lives = {server.life: server for server in servers}
    for life in _over(list(lives), 0):
        try:
            ray.get(life)
        except ray.exceptions.RayError as error:
            return lives[life].death(str(error))
    return None


def silent_servers(servers: Sequence[WorkerHandle], seconds: float) -> list[WorkerHandle]:
    """Return those of `servers` that hang: they answer no new call within `seconds`.

    One that has ended is not among them.
    """
    calls = {server.ping(): server for server in servers}
    over = _over(list(calls), seconds)
    return [server for call, server in calls.items() if call not in over]


def _over(calls: list[Any], seconds: float) -> list[Any]:
    """Return the calls that are over after `seconds` seconds; all, if Ray itself has ended."""
    import ray

    if not calls:
        return []
    try:
        return ray.wait(calls, num_returns=len(calls), timeout=seconds)[0]
    except ray.exceptions.RayError:
        return calls


class WorkerHandle:
    """The driver's handle to one worker process, or to that of a parameter server.

    Calls of a worker run one at a time, in the order in which they were submitted.

    Attributes:
        host: the worker's index in the pool.
        name: its name, such as `worker_0` or `parameter server 1 on host 0`.
        is_server: whether it is a parameter server.
        actor: Ray's handle.
        log: the file with the worker's output.
        address: the address of its machine.
        elsewhere: whether its process is known to be on another machine.
        location: Ray's reference to the result of `Worker.location`, there once the process is up.
        life: of a server, Ray's reference to an answer that comes with the end of the process.
    """

    def __init__(
        self, actor: Any, host: int, log: Path, address: str = LOOPBACK, server: int | None = None
    ) -> None:
        self.actor, self.host, self.log, self.address = actor, host, log, address
        self.location = actor.location.remote()
        self._newest: Any = None
        self._process: psutil.Process | None = None
        self._is_gone = False
        self._kills_before = _out_of_memory_kills()
        self.is_server = server is not None
        self.life = actor.live.remote() if self.is_server else None
        name = f"parameter server {server} on host {host}" if self.is_server else f"worker_{host}"
        self.name = name + (f" on {address}" if address != LOOPBACK else "")
        self.elsewhere = False

    def submit(self, method: str, *arguments: Any) -> Future:
        """Queue a call of the worker object's `method` and return without waiting."""
        self._newest = self.actor.call.remote(method, *arguments)
        return Future(self._newest, self, method)

    def is_busy(self) -> bool:
        """Return whether the newest call is still to be answered."""
        import ray

        return self._newest is not None and not ray.wait([self._newest], timeout=0)[0]

    def ping(self) -> Any:
        """Return Ray's reference to an answer after all queued calls, or to the worker's death."""
        return self.actor.location.remote()

    def process(self) -> psutil.Process | None:
        """Return the worker's process; None until it is up, and if it is on another machine.

        None, too, if it was gone when it was first looked for.
        """
        import ray

        if self._process is None and not self.elsewhere and not self._is_gone:
            with suppress(ray.exceptions.RayError):
                where, pid, _ = ray.get(self.location, timeout=0)
                self.elsewhere = where != machine_id()
                try:
                    self._process = None if self.elsewhere else psutil.Process(pid)
                except psutil.NoSuchProcess:
                    self._is_gone = True
        return self._process

    @property
    def node(self) -> str:
        """Ray's identifier of its node, of a process that was up; raises WorkerError if it died."""
        import ray

        try:
            return str(ray.get(self.location, timeout=0)[2])
        except ray.exceptions.RayError as error:
            raise self.death(str(error)) from None

    def is_lost(self) -> bool:
        """Return whether the worker's process, on this machine, was up and is gone or stopped."""
        process = self.process()
        return self._is_gone if process is None else has_ended(process, or_is=psutil.STATUS_STOPPED)

    def run_on_node(self, function: Callable[..., Any], seconds: float) -> Any:
        """Return `function(pid, log)`, called in a process of its own on the worker's node.

        Args:
            function: a function of an importable module, which uses no names but its own and those
                of installed libraries.
            seconds: the time that the call may take.

        Raises:
            TimeoutError: it takes longer.
            RayEndedError: Ray cannot start it there.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray_compat.register_by_value(sys.modules[function.__module__])
        try:
            _, pid, node = ray.get(self.location, timeout=0)
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task: Any = ray.remote(function)
            task = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            return ray.get(task.remote(pid, str(self.log)), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"its node did not answer within {seconds:g} s") from None
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RayEndedError(f"Ray cannot run a task there: {lines[-1]}") from None

    @property
    def whereabouts(self) -> str:
        """The worker's name with its process and machine, if known."""
        process = self._process
        return f"{self.name} (process {process.pid} on this machine)" if process else self.name

    def failure(self, error_type: str, message: str, traceback_text: str) -> WorkerError:
        """Return the error for an exception raised inside the worker."""
        return self._error(message, error_type=error_type, traceback_text=traceback_text)

    def death(self, reason: str) -> WorkerError:
        """Return the error for a worker whose process is gone.

        Args:
            reason: Ray's text about the end of the actor, or `_BROKEN`.
        """
        kills = _out_of_memory_kills() - self._kills_before
        how = next((text for mark, text in _ENDS.items() if mark in reason), "")
        if code := ray_compat.EXIT_CODE.search(reason):
            how = f"its process ended with exit code {code[1]}"
        elif not how and ray_compat.CREATION_FAILED in reason:
            how = f"its process could not be set up\n{reason}"
        elif not how and kills:
            how = (
                "its process was killed, and since it started the kernel has killed "
                f"{kills} process(es) here for lack of memory (dmesg names them)"
            )
        how = how or "its process was killed by a signal or crashed"
        silent = ray_compat.NODE_UNREACHABLE in reason or reason == _BROKEN
        return self._error(how, died=True, is_server=self.is_server, silent=silent)

    def _error(self, message: str, **about: Any) -> WorkerError:
        where = self.whereabouts
        return WorkerError(self.name, message, self.log, host=self.host, whereabouts=where, **about)


def _out_of_memory_kills() -> int:
    """Return how many processes this machine's kernel has killed since boot for lack of memory."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
