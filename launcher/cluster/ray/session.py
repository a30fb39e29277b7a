"""Start worker and parameter server processes on one Ray, private or existing.

Waits for them have a limit, and are logged now and then.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil

from launcher.base import OF_ANOTHER, Advance, open_own
from launcher.cluster.devices import DevicePool
from launcher.cluster.errors import RayEndedError
from launcher.cluster.ray import ray_compat, worker_actor
from launcher.cluster.ray.parameter_server import ExchangeServer
from launcher.cluster.ray.worker import WorkerHandle, kill, not_started
from launcher.hardware import gpu_memory_variables

_POLL_SECONDS = 0.2
_SILENCE, _AGAIN = 10.0, 30.0  # seconds before a wait is first reported, and between reports
_GROWN_SECONDS = 15.0  # that a healthy host takes to come again

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartLimit:
    """The time that a start may take without progress, and a check that may end its waits.

    Attributes:
        seconds: the time until Ray is up, until it answers, until one more process is up.
        setting: the name by which the user knows `seconds`.
        check: called repeatedly during a wait; an exception that it raises ends the wait.
        hosts: the number of hosts with which the run has trained, that is enough for it to
            continue at once; None: all are needed.
        host_seconds: the time that a lost host has to come back; then those that are there are
            enough.
    """

    seconds: float = 120.0
    setting: str = "cluster.start_timeout"
    check: Callable[[], None] = lambda: None
    hosts: int | None = None
    host_seconds: float = 0.0


class Waiting:
    """The waits of one start.

    Attributes:
        advance: called with the number of processes or nodes that are up, and their total.
    """

    def __init__(self, limit: StartLimit) -> None:
        self._limit = limit
        self.advance: Advance | None = None
        self._up, self._calls, self._spoken = 0, 0, _SILENCE

    def counts(self, up: int, total: int, unit: str) -> None:
        """Note how many processes are up; more of them is progress."""
        if up > self._up:
            self._up, self._calls, self._spoken = up, 0, _SILENCE
        if self.advance is not None:
            self.advance(up, total, unit)

    def until(
        self, ready: Callable[[float], object], what: str, seconds: float | None = None
    ) -> bool:
        """Wait until `ready` returns true; return whether it did in time.

        The time is counted in calls, not by the clock: while this process is stopped, the others
        may be too.

        Args:
            ready: waits up to as many seconds as it is given.
            what: the goal of the wait, in words.
            seconds: its limit, if it is not the start's.
        """
        start = self._limit
        limit = start.seconds if seconds is None else seconds
        self._up, self._calls, self._spoken = 0, 0, _SILENCE
        while not ready(_POLL_SECONDS):
            start.check()
            self._calls += 1
            waited = self._calls * _POLL_SECONDS
            if waited >= limit:
                return False
            if waited >= self._spoken:
                self._spoken += _AGAIN
                _log.info(f"waiting for {what}: {waited:.0f} s so far, at most {limit:.0f} s")
        start.check()
        return True


class BackgroundCall:
    """A call in a thread of its own, which no signal interrupts and which can be given up."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._over = threading.Event()  # an interrupted `Thread.join` cannot be resumed
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # some Pythons start none while they exit
            self._run()

    def ended(self, seconds: float) -> bool:
        """Wait up to `seconds` seconds for the call; return whether it is over."""
        return self._over.wait(seconds)

    def finish(self) -> None:
        """Wait for the call however often that is interrupted, then raise the last interrupt."""
        interrupt = None
        while not self._over.is_set():
            try:
                self._over.wait()
            except KeyboardInterrupt as error:
                interrupt = error
        self.result()
        if interrupt is not None:
            raise interrupt

    def result(self) -> None:
        """Raise the exception of the call, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._over.set()


# -- A session ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A host to start a process on.

    Attributes:
        host: the host's index in the pool.
        address: the host's address.
        options: Ray's options of the actor, which bring it there.
    """

    host: int
    address: str
    options: Mapping[str, Any]


class RaySession(ABC):
    """Worker processes on one Ray: a context manager, to be used from the main thread.

    Args:
        limit: how long each part of the start may take, and what else ends its waits.
        log_dir: the folder for the output of the processes (`worker_<host>.log`,
            `server_<number>.log`); None leaves it to Ray's own logs.
        kill_after: the seconds that Ray may take to end the workers by itself.

    Attributes:
        pool: the devices: one worker a host. Once connected, those that are there.
        missing: the names of hosts that did not come, as far as they have any.
        renews: whether new workers can start while the old ones run, and take their place.
    """

    pool: DevicePool
    missing: tuple[str, ...] = ()
    renews = False

    def __init__(self, limit: StartLimit, log_dir: Path | None, kill_after: float = 0.0) -> None:
        self._limit, self._log_dir, self._kill_after = limit, log_dir, kill_after
        self._waiting = Waiting(limit)
        self._begun: list[WorkerHandle] = []  # in the order of their begin
        self._used: list[WorkerHandle] = []
        self._known: list[str] = []  # the addresses of all hosts, which are exempt from proxies
        self._undo = ExitStack()
        self._ray: Any = None
        self._connecting: BackgroundCall | None = None
        self._leaving: BackgroundCall | None = None

    @abstractmethod
    def check(self) -> None:
        """Check that Ray is up.

        Raises:
            RayEndedError: Ray has ended, so none of its workers answers any more.
        """

    @abstractmethod
    def _connect(self) -> None:
        """Connect to Ray unless this process is connected."""

    @abstractmethod
    def _place(self, host: int) -> Place:
        """Return the place of a process on a host of the pool."""

    @functools.cached_property
    def _workers_at(self) -> list[Place]:
        """The place of each worker, in the order of the hosts, for all that follow one another."""
        return self._worker_places()

    def _worker_places(self) -> list[Place]:
        return [self._place(host) for host in range(self.pool.hosts)]

    @abstractmethod
    def _check_started(self, missing: Mapping[str, str], in_time: bool) -> None:
        """Raise for workers that did not start, by name, each with Ray's reason if it gave up."""

    def _join(self, address: str, patience: float) -> None:
        """Begin to connect to the Ray at an address, and wait for it within the limit.

        Args:
            address: Ray's address.
            patience: the seconds that each step of leaving it may take.
        """
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        self._connecting = BackgroundCall(functools.partial(self._ray.init, address, **quiet))
        self._undo.callback(self._leave, self._connecting, patience)
        try:
            self._waiting.until(self._connecting.ended, f"Ray's answer at {address}")
        finally:
            ray_compat.restore_signals(worker_actor.FOR_THE_DRIVER)

    def _leave(self, connecting: BackgroundCall, patience: float) -> None:
        if connecting.ended(patience):  # not beside it
            self._leaving = BackgroundCall(self._ray.shutdown)
            self._leaving.ended(patience)

    def connect(self, advance: Advance | None = None) -> int:
        """Wait for Ray and the hosts; return how many hosts are there.

        Raises the errors of `spawn`.

        Args:
            advance: called with the number of nodes that are up.
        """
        self._waiting.advance = advance
        self._connect()
        return self.pool.hosts

    def use(self, hosts: int) -> None:
        """Start processes on so many hosts of the pool only."""
        self.pool = replace(self.pool, hosts=hosts)

    def _await_hosts(self, asked: int, there: Callable[[], int], what: str, seconds: float) -> None:
        """Wait for hosts, or for as many as `StartLimit` takes for enough.

        Args:
            asked: how many.
            there: returns how many are there.
            what: these hosts, in words.
            seconds: the limit of the wait.
        """

        def ready(fewest: int, seconds: float) -> bool:
            self._waiting.counts(found := there(), asked, "nodes")
            if found < fewest:
                time.sleep(seconds)
            return found >= fewest

        fewest = min(self._limit.hosts or asked, asked)
        if fewest < asked:  # those that the run continued without may be there by now
            grown = functools.partial(ready, asked)
            self._waiting.until(grown, what, min(_GROWN_SECONDS, seconds))
        self._waiting.until(functools.partial(ready, fewest), what, seconds)

    def begin(self, worker_class: type, *arguments: Any, ahead: int = 1) -> list[WorkerHandle]:
        """Wait for Ray and have it start the processes, without waiting for these.

        The next `spawn` of the same class and arguments waits for them, on each host for the one
        that was begun first. They take calls from now on. Raises the errors of `spawn`.

        Args:
            worker_class: the class to build.
            *arguments: its arguments.
            ahead: how many processes are to wait on a host; where fewer do, one is started.

        Returns:
            Those that are started.
        """
        self._connect()
        handles = list[WorkerHandle]()
        self._undo.callback(kill, handles, self._kill_after)
        waiting = Counter(handle.host for handle in self._begun)
        try:
            for place in self._workers_at:
                if waiting[place.host] < ahead:
                    handles.append(self._start(place, (worker_class, arguments)))
        except self._ray.exceptions.RayError as error:
            raise RayEndedError(f"Ray cannot start the workers: {error}") from error
        self._begun += handles
        return handles

    def spawn(
        self, worker_class: type, *arguments: Any, advance: Advance | None = None
    ) -> list[WorkerHandle]:
        """Start one process a host and build `worker_class(*arguments)` in each.

        Waits for Ray and the processes. Others that were begun are ended while a call keeps them
        busy. An exception of a constructor is raised by the results of the calls that follow. The
        class and the arguments are pickled; a process gets the driver's environment, working folder
        and module search path as they are now.

        Args:
            worker_class: the class to build.
            *arguments: its arguments.
            advance: called with the number of nodes, and then of processes, that are up.

        Raises:
            ClusterError: Ray or a process did not come up, or not in time.
        """
        self._waiting.advance = advance
        lost = [handle for handle in self._begun if handle.is_lost()]  # while they waited
        kill(lost, self._kill_after)
        self._begun = [handle for handle in self._begun if handle not in lost]
        self.begin(worker_class, *arguments)
        first = {handle.host: handle for handle in reversed(self._begun)}
        handles = [first[host] for host in sorted(first)]
        waiting = [handle for handle in self._begun if handle not in handles]
        self._begun = [handle for handle in waiting if not handle.is_busy()]
        for handle in set(waiting) - set(self._begun):  # these need the processors now
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(handle.actor)
        self._used += handles
        missing = dict.fromkeys([handle.name for handle in handles], "")

        def started(seconds: float) -> bool:
            self.check()
            missing.clear()
            missing.update(not_started(handles, seconds))
            self._waiting.counts(len(handles) - len(missing), len(handles), "processes")
            return not missing or any(missing.values())

        awaited = f"the processes of {', '.join(missing)}"
        self._check_started(missing, self._waiting.until(started, awaited))
        return handles

    def serve(self, count: int, workers: int) -> list[WorkerHandle]:
        """Start `count` parameter servers for `workers` workers; server k is on host k mod hosts.

        Waits for none of them: they come up while the workers trace and compile.

        Raises:
            ClusterError: Ray did not come up.
        """
        self._connect()
        handles: list[WorkerHandle] = []
        self._undo.callback(kill, handles, self._kill_after)
        for number in range(count):
            place = self._place(number % self.pool.hosts)
            handles.append(self._start(place, (ExchangeServer, (workers,)), number))
        self._used += handles
        return handles

    def end_workers(self) -> None:
        """Kill the processes of `spawn` and `serve`, which have been up; those begun since stay.

        Raises:
            RayEndedError: on one of several machines they cannot be killed.
        """
        kill(self._used, 0.0)
        self._used = []

    def close(self) -> None:
        """End every process of this session; may be called again.

        An interrupt that arrives meanwhile is raised at the end.
        """
        BackgroundCall(self._undo.close).finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, place: Place, made_by: tuple[type, Sequence[Any]], server: int | None = None
    ) -> WorkerHandle:
        """Have Ray start a process and build its object, without waiting for either.

        Args:
            place: the host.
            made_by: the object's class and arguments.
            server: the number of a parameter server; None for a worker.

        Raises:
            OSError: the log cannot be written.
        """
        import ray

        # The actor's code runs before anything of this package can be imported.
        ray_compat.register_by_value(worker_actor)
        name = f"worker_{place.host}" if server is None else f"server_{server}"
        log = self._log_dir and self._log_dir / f"{name}.log"
        if log is not None:
            os.close(open_own(log, os.O_WRONLY))
        kind: Any = worker_actor.Worker if server is None else worker_actor.Server
        made: Any = ray.remote(**place.options)(kind)
        environ = worker_environment(os.environ, self.pool, place.host, self._known)
        search_path = [os.path.abspath(entry) for entry in sys.path]
        actor = made.remote(environ, search_path, os.getcwd(), log and str(log))
        handle = WorkerHandle(actor, place.host, log or Path(os.devnull), place.address, server)
        actor.construct.remote(ray_compat.dumps(made_by))
        return handle


# -- Environments of the processes ----------------------------------------------------------------


def ray_environment(environ: Mapping[str, str], token: Path, nodes: bool = False) -> dict[str, str]:
    """Return the environment of a private Ray, which settings of any other Ray do not reach.

    Args:
        environ: the environment of this process.
        token: the file with the secret that this Ray requires of every client.
        nodes: whether this Ray spans several machines.
    """
    return _plain(environ) | ray_compat.private_settings(token, nodes)


def worker_environment(
    environ: Mapping[str, str], pool: DevicePool, host: int, addresses: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of a worker: the driver's, with only one host's devices visible.

    A pool of GPUs without ids leaves the choice to the host's own CUDA_VISIBLE_DEVICES.

    Args:
        environ: the environment of the driver.
        pool: the devices of the run.
        host: the index of the worker's host in the pool.
        addresses: the addresses of the other hosts, which are exempt from proxies.
    """
    variables = _plain(environ, addresses)
    # JAX assumes that a process of a Slurm step or of mpirun owns a single device.
    variables = {name: value for name, value in variables.items() if not OF_ANOTHER.match(name)}
    if pool.kind == "gpu":
        variables.pop("CUDA_VISIBLE_DEVICES", None)
        first = host * pool.devices_per_host
        mine = pool.gpu_ids[first : first + pool.devices_per_host]
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}
        return variables | gpu_memory_variables(environ) | shown | {"JAX_PLATFORMS": "cuda,cpu"}
    kept = [
        flag
        for flag in variables.get("XLA_FLAGS", "").split()
        if flag.partition("=")[0] != pool.count_flag
    ]
    variables.pop("JAX_NUM_CPU_DEVICES", None)  # JAX refuses both it and the flag
    # Each device that waits in a collective blocks one of XLA's threads. Without a spare one, the
    # data that another process needs to join that collective would never be sent.
    cores = len(psutil.Process().cpu_affinity() or [0])
    threads = max(cores, pool.devices_per_host + 1)
    return {
        "NPROC": str(threads),
        **variables,
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*kept, f"{pool.count_flag}={pool.devices_per_host}"]),
    }


def _plain(environ: Mapping[str, str], addresses: Sequence[str] = ()) -> dict[str, str]:
    """Return `environ` without settings of Ray, and with our own machines exempt from proxies."""
    prefix = ray_compat.PREFIX
    variables = {name: value for name, value in environ.items() if not name.startswith(prefix)}
    for name in ("no_proxy", "NO_PROXY"):
        listed = [entry for entry in variables.get(name, "").split(",") if entry]
        ours = dict.fromkeys(("localhost", "127.0.0.1", *addresses))
        local = [entry for entry in ours if entry not in listed]
        variables[name] = ",".join([*listed, *local])
    return variables


@contextmanager
def replaced_environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Replace this process's environment variables by `environ` inside the context."""
    before = dict(os.environ)
    _change(environ)
    try:
        yield
    finally:
        _change(before)


def _change(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
