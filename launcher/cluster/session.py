"""A private Ray, on this machine or over the nodes of a Slurm job, from its first process to the
last trace of it.

`start` does not wait: Ray comes up in the background, and `Session.spawn` waits for it. Whatever
ends the driver, nothing stays behind: see `head`. `launcher.train` and the command line import it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from launcher.cluster import host, scratch
from launcher.cluster.devices import DevicePool
from launcher.cluster.environment import ray_environment, worker_environment
from launcher.cluster.errors import ClusterError, RayEndedError, last_lines
from launcher.cluster.handle import LOOPBACK, WorkerHandle
from launcher.cluster.holder import end, start_head
from launcher.cluster.slurm_allocation import listen
from launcher.cluster.slurm_meeting import Meeting

_POLL_SECONDS = 0.2
_KILL_SECONDS = 10


def start(pool: DevicePool, log_dir: Path, meeting: Meeting | None = None) -> Session:
    """Begin to bring up a Ray of our own for the hosts of `pool`, and return without waiting.

    Args:
        log_dir: an existing folder for the output of Ray (`ray.log`) and of the workers
            (`worker_<host>.log`).
        meeting: where the tasks of the job's other nodes wait; None for this machine alone.

    Raises:
        ClusterError: there is no folder for Ray's sockets, or Ray was imported before.
        OSError: `log_dir` cannot be written.
    """
    return Session(pool, Path(log_dir).resolve(), meeting)


class Session:
    """A Ray of our own and its workers: a context manager, to be used from the main thread.

    One at a time in a process. Sessions of other processes on the machine do not matter.
    """

    def __init__(self, pool: DevicePool, log_dir: Path, meeting: Meeting | None = None) -> None:
        self._pool = pool
        self._meeting = meeting if pool.hosts > 1 else None  # else nobody else is to come in
        self._addresses = [LOOPBACK] * pool.hosts
        self._log_dir = log_dir
        self._connected = False
        self._undo = ExitStack()
        atexit.register(self.close)
        with ExitStack() as on_error:
            on_error.callback(self.close)
            folder = scratch.create()
            self._undo.callback(folder.remove)
            token = folder.token(secret())
            self._environ = ray_environment(os.environ, token, nodes=self._meeting is not None)
            self._head = self._start_head(folder)
            self._undo.callback(end, self._head)
            with _environment(self._environ):
                self._ray = _import_ray(self._meeting is not None)
            on_error.pop_all()

    def spawn(self, worker_class: type, *arguments: Any) -> list[WorkerHandle]:
        """Start one process a host and build `worker_class(*arguments)` in each.

        Waits for Ray, not for the workers: what their constructors raise comes out of the results
        of the calls that follow. The class and the arguments are pickled; a process gets the
        driver's environment, working folder and module search path as they are now.

        Raises:
            ClusterError: Ray did not come up.
        """
        self._connect()
        try:
            handles = self._spawn(worker_class, arguments)
        except self._ray.exceptions.RayError as error:
            raise RayEndedError(f"Ray cannot start the workers: {error}") from error
        self._undo.callback(_kill, handles)
        return handles

    def _spawn(self, worker_class: type, arguments: Sequence[Any]) -> list[WorkerHandle]:
        # As code, not as a name to import: it runs before anything of this package does.
        self._ray.cloudpickle.register_pickle_by_value(host)
        actor_class = self._ray.remote(num_cpus=0)(host.Host)
        many = self._meeting is not None
        pickled = self._ray.cloudpickle.dumps((worker_class, arguments))
        search_path = [os.path.abspath(entry) for entry in sys.path]
        handles = []
        for index in range(self._pool.hosts):
            environ = worker_environment(os.environ, self._pool, index, self._addresses)
            log = self._log_dir / f"worker_{index}.log"
            place = actor_class.options(resources={f"host_{index}": 1} if many else {})
            actor = place.remote(environ, search_path, os.getcwd(), str(log))
            handles.append(WorkerHandle(actor, index, log, self._addresses[index]))
            actor.construct.remote(pickled)
        return handles

    def check(self) -> None:
        """Raise RayEndedError where Ray has ended: none of its workers answers any more."""
        if self._head.poll() is not None:
            log = self._log_dir / "ray.log"
            raise RayEndedError(
                "Ray ended: one of its own processes was killed or failed.\n"
                f"The last lines of {log}:\n{last_lines(log)}"
            )

    def close(self) -> None:
        """End every process of the session and delete its files. May be called again."""
        self._undo.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_head(self, folder: scratch.Scratch) -> subprocess.Popen[str]:
        log, meeting = self._log_dir / "ray.log", self._meeting
        if meeting is None:
            return start_head(folder, self._environ, log, self._pool.hosts)
        with listen(meeting.allocation.job_id, meeting.address) as free:
            port = free.getsockname()[1]
        waiting = meeting.listener.fileno()
        options = [f"--ip={meeting.address}", f"--port={port}", "--host=0"]
        options += [f"--meeting={waiting}", f"--logs={self._log_dir}"]
        return start_head(folder, self._environ, log, 1, options, [waiting])

    def _connect(self) -> None:
        if self._connected:
            return
        assert self._head.stdout is not None
        address = self._head.stdout.readline().strip()
        if not address or self._head.poll() is not None:  # connecting would try for ever
            log = self._log_dir / "ray.log"
            raise RayEndedError(
                f"Ray did not come up.\nThe last lines of {log}:\n{last_lines(log)}"
            )
        with _environment(self._environ), _signals_held():
            self._undo.callback(self._ray.shutdown)
            try:
                self._ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
            except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
                raise RayEndedError(f"Ray came up, but cannot be talked to: {error}") from error
        if self._meeting is not None:
            self._await_nodes(self._meeting)
        self._connected = True

    def _await_nodes(self, meeting: Meeting) -> None:
        """Wait until Ray has every node of the job, and note their addresses."""
        nodes = dict(enumerate(meeting.allocation.nodes))
        deadline = time.monotonic() + meeting.timeout
        while nodes:
            for node in self._ray.nodes():
                for index in [k for k in nodes if f"host_{k}" in node["Resources"]]:
                    self._addresses[index] = node["NodeManagerAddress"]
                    del nodes[index]
            if nodes and time.monotonic() > deadline:
                raise ClusterError(
                    f"Waited {meeting.timeout:g} s for {', '.join(nodes.values())}: "
                    f"{len(nodes)} of {len(self._addresses)} nodes did not join Ray. The job's "
                    f"output and {self._log_dir}/ray_<node>.log say more; raise "
                    "cluster.slurm.start_timeout where nodes are slow to start."
                )
            if nodes:
                time.sleep(_POLL_SECONDS)


@functools.cache
def _import_ray(nodes: bool) -> Any:
    """Ray, imported where its environment variables are ours, for one machine or for several.

    Ray reads where it listens and how it authenticates when it is imported; one that was imported
    with other settings would search for our cluster for ever.
    """
    if "ray" in sys.modules:
        raise ClusterError(
            "Ray was imported before the launcher could set it up. "
            "Do not import ray in code that the launcher loads (recipes, sitecustomize); a Ray of "
            "your own is joined by launcher.init(address=...)."
        )
    import ray

    return ray


@functools.cache
def secret() -> str:
    """What it takes to talk to our Ray. One a process, because Ray reads it once."""
    return secrets.token_hex(32)


@contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Exactly `environ` in place of this process's environment variables, for a while."""
    before = dict(os.environ)
    _change_environment(environ)
    try:
        yield
    finally:
        _change_environment(before)


def _kill(workers: Sequence[WorkerHandle]) -> None:
    """Kill the workers that are known and still there. Usually the head does it; where that was
    killed itself, a worker might go on for a while, and write."""
    processes = [process for worker in workers if (process := worker.process())]
    for process in processes:
        with suppress(psutil.Error):  # it is gone
            process.kill()
    psutil.wait_procs(processes, _KILL_SECONDS)


def _change_environment(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold signals for the driver back while Ray connects, and deliver them afterwards.

    An interrupt would leave Ray half connected, which later crashes the process. And Ray sets two
    handlers of its own for SIGTERM: one in Python, which exits, and which is kept from it; one
    below Python, where `signal.getsignal` does not see it, which calls the handler before it but
    has an alarm abort the process three seconds later. To block the signals is not enough: the
    kernel hands them to any thread that does not, and libraries have such threads.
    """
    held: list[int] = []
    before = {s: signal.signal(s, lambda n, frame: held.append(n)) for s in host.FOR_THE_DRIVER}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, host.FOR_THE_DRIVER)
    set_handler, on_alarm = signal.signal, signal.getsignal(signal.SIGALRM)
    alarm_in = signal.alarm(0)
    signal.signal = lambda number, handler: signal.getsignal(number)  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler
        signal.alarm(alarm_in)
        for signum, handler in {**before, signal.SIGALRM: on_alarm}.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number in dict.fromkeys(held):
        signal.raise_signal(number)
