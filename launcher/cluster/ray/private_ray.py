"""A private Ray, on this machine or over the nodes of a Slurm job, from its start to its clean-up.

`start` does not wait: Ray comes up in the background, and `PrivateRay.spawn` waits for it. Between
the two, `PrivateRay.begin` starts the workers in the background as well. However the driver ends,
nothing is left behind; see `head`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launcher.base.output import Advance
from launcher.cluster.devices import DevicePool
from launcher.cluster.errors import ClusterError, RayEndedError, last_lines
from launcher.cluster.ray import ray_compat, scratch, worker_actor
from launcher.cluster.ray.environment import (
    ray_environment,
    replaced_environment,
    worker_environment,
)
from launcher.cluster.ray.head import readable
from launcher.cluster.ray.head_process import continue_head, end, start_head
from launcher.cluster.ray.start_process import start_server, start_worker
from launcher.cluster.ray.waiting import BackgroundCall, StartLimit, Waiting
from launcher.cluster.ray.worker import LOOPBACK, WorkerHandle, kill, not_started
from launcher.cluster.slurm.rendezvous import Rendezvous

_SHARE_OF_HOST = 0.01  # of the resource that stands for a host: it says where, and bounds nothing
_HASTE_SECONDS = 1.5  # for a step of the shutdown that usually takes a moment
_SHUTDOWN_SECONDS = 15.0
_DEFAULT_LIMIT = StartLimit()


def start(
    pool: DevicePool,
    log_dir: Path | None,
    rendezvous: Rendezvous | None = None,
    limit: StartLimit = _DEFAULT_LIMIT,
) -> PrivateRay:
    """Start a private Ray for the hosts of `pool`, without waiting for it.

    Args:
        pool: the devices of the run.
        log_dir: an existing folder for the output of Ray (`ray.log`) and of the workers
            (`worker_<host>.log`). None makes a private one, which is deleted when this Ray is
            closed or this process ends, however that ends.
        rendezvous: where the tasks of the job's other nodes wait; None for this machine alone.
        limit: how long `PrivateRay.spawn` may take, and what happens during the wait.

    Raises:
        ClusterError: there is no folder for Ray's sockets, or Ray was imported before.
        OSError: `log_dir` cannot be written.
    """
    return PrivateRay(pool, log_dir and Path(log_dir).resolve(), rendezvous, limit)


class PrivateRay:
    """A private Ray and its workers: a context manager, to be used from the main thread.

    There is one at a time in a process. Those of other processes on the machine are independent.
    """

    def __init__(
        self,
        pool: DevicePool,
        log_dir: Path | None,
        rendezvous: Rendezvous | None,
        limit: StartLimit,
    ) -> None:
        self._pool = pool
        self._limit, self._waiting = limit, Waiting(limit)
        self._rendezvous = rendezvous if pool.hosts > 1 else None  # else no other task is expected
        self._addresses = [LOOPBACK] * pool.hosts
        self._connecting: BackgroundCall | None = None
        self._connected, self._at = False, ""
        self._leaving: BackgroundCall | None = None
        self._begun: list[WorkerHandle] = []
        self._undo = ExitStack()
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._own_logs = log_dir is None
            if log_dir is None:  # not Ray's own folder, which is deleted when Ray ends
                logs = scratch.create()
                self._undo.callback(logs.remove)
                log_dir = logs.path
            self._log_dir = log_dir
            folder = scratch.create()
            self._undo.callback(folder.remove)
            token = folder.token(secret())
            self._environ = ray_environment(os.environ, token, nodes=self._rendezvous is not None)
            self._head = self._start_head(folder)
            self._undo.callback(self._let_go)
            self._undo.callback(end, self._head, folder.path)
            with replaced_environment(self._environ):
                self._ray = ray_compat.import_ray()
            atexit.register(self.close)  # after Ray's import, so that it runs before Ray's own
            on_error.pop_all()

    def spawn(
        self, worker_class: type, *arguments: Any, advance: Advance | None = None
    ) -> list[WorkerHandle]:
        """Start one process a host and build `worker_class(*arguments)` in each.

        It waits for Ray and the processes. What a constructor raises is raised by the results of
        the calls that follow. The class and the arguments are pickled; a process gets the driver's
        environment, working folder and module search path as they are now.

        Args:
            worker_class: what is built.
            *arguments: its arguments.
            advance: is told how many nodes, and then processes, are up.

        Raises:
            ClusterError: Ray or a process did not come up, or not in time.
        """
        self._waiting.advance = advance
        if not self._begun:
            self.begin(worker_class, *arguments)
        handles, self._begun = self._begun, []
        left = [handle.name for handle in handles]

        def up(seconds: float) -> bool:
            missing = not_started(handles, seconds)
            left[:] = [name for name in left if missing.get(name) == ""]
            self._waiting.counts(len(handles) - len(left), len(handles), "processes")
            return not left

        if not self._waiting.until(up, f"the processes of {', '.join(left)} (see {self._log})"):
            raise RayEndedError(self._late(f"Ray did not start the processes of {', '.join(left)}"))
        return handles

    def serve(self, count: int, workers: int) -> list[WorkerHandle]:
        """Start `count` parameter servers for so many workers; server k is on host k modulo hosts.

        It waits for none of them: they come up while the workers trace and compile.

        Raises:
            ClusterError: Ray did not come up.
        """
        self._connect()
        handles: list[WorkerHandle] = []
        self._undo.callback(kill, handles)
        for number in range(count):
            host, log = number % self._pool.hosts, self._log_dir / f"server_{number}.log"
            where = host, self._addresses[host]
            handles.append(start_server(number, workers, *self._place(host), log, where))
        return handles

    def begin(self, worker_class: type, *arguments: Any) -> list[WorkerHandle]:
        """Wait for Ray and have it start the processes, without waiting for these.

        The next `spawn` of the same class and arguments waits for them. They take calls from now
        on. It raises the same errors as `spawn`.
        """
        self._connect()
        try:
            handles = self._spawn(worker_class, arguments)
        except self._ray.exceptions.RayError as error:
            raise RayEndedError(f"Ray cannot start the workers: {error}") from error
        self._undo.callback(kill, handles)
        self._begun = handles
        return handles

    def _spawn(self, worker_class: type, arguments: Sequence[Any]) -> list[WorkerHandle]:
        handles = []
        for host in range(self._pool.hosts):
            log, options, environ = self._log_dir / f"worker_{host}.log", *self._place(host)
            where = host, self._addresses[host]
            handles.append(start_worker((worker_class, arguments), options, environ, log, where))
        return handles

    def _place(self, host: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Return Ray's options and the environment of a process on a host."""
        many = self._rendezvous is not None
        there = {f"host_{host}": _SHARE_OF_HOST} if many else {}
        environ = worker_environment(os.environ, self._pool, host, self._addresses)
        return {"num_cpus": 0, "resources": there}, environ

    def check(self) -> None:
        """Check that Ray is up, and continue its head if that was stopped.

        Raises:
            RayEndedError: Ray has ended, so none of its workers answers any more.
        """
        if self._head.poll() is not None:
            text = "Ray ended: one of its own processes was killed or failed."
            raise RayEndedError(f"{text}\n{self._log_tail()}")
        continue_head(self._head)

    def close(self) -> None:
        """End every process and delete all files of this Ray; it may be called again.

        An interrupt that comes during that is raised when it is done.
        """
        try:
            BackgroundCall(self._undo.close).finish()
        finally:
            if self._connecting is not None:
                ray_compat.restore_signals(worker_actor.FOR_THE_DRIVER)
                ray_compat.read_settings_again()  # for a Ray of the user's that comes after it
        atexit.unregister(self.close)

    def __enter__(self) -> PrivateRay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_head(self, folder: scratch.Scratch) -> subprocess.Popen[str]:
        log, rendezvous = self._log_dir / "ray.log", self._rendezvous
        if rendezvous is None:
            options = [f"--own-logs={self._log_dir}"] if self._own_logs else []
            return start_head(folder, self._environ, log, self._pool.hosts, options)
        waiting = rendezvous.listener.fileno()
        options = [f"--ip={rendezvous.address}", "--host=0"]
        options += [f"--rendezvous={waiting}", f"--logs={self._log_dir}"]
        return start_head(folder, self._environ, log, 1, options, [waiting])

    def _connect(self) -> None:
        if self._connected:
            return
        if self._connecting is None:
            self._at = self._address()
            with replaced_environment(self._environ):
                self._connecting = BackgroundCall(functools.partial(self._join, self._at))
                self._undo.callback(self._disconnect)
                try:
                    self._waiting.until(self._connecting.ended, f"Ray's answer at {self._at}")
                finally:
                    ray_compat.restore_signals(worker_actor.FOR_THE_DRIVER)
        if not self._connecting.ended(0):  # this process cannot try again
            raise ClusterError(self._late(f"Ray came up at {self._at}, but did not answer"))
        try:
            self._connecting.result()
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise RayEndedError(f"Ray came up, but accepts no connection: {error}") from error
        if self._rendezvous is not None:
            self._await_nodes(self._rendezvous)
        self._connected = True

    def _address(self) -> str:
        """Wait for Ray's address, which the head prints."""
        output = self._head.stdout
        assert output is not None

        def ready(seconds: float) -> bool:
            continue_head(self._head)
            return bool(readable([output], seconds))

        up = self._waiting.until(ready, f"Ray to come up (see {self._log})")
        address = output.readline().strip() if up else ""
        if not up:
            raise RayEndedError(self._late("Ray did not come up"))
        if not address or self._head.poll() is not None:  # connecting would go on for ever
            raise RayEndedError(f"Ray did not come up.\n{self._log_tail()}")
        return address

    def _join(self, address: str) -> None:
        self._ray.init(address, logging_level=logging.ERROR, log_to_driver=False)

    def _disconnect(self) -> None:
        """Begin to disconnect while Ray is up, which is faster, if Ray answers."""
        assert self._connecting is not None
        if self._connecting.ended(_HASTE_SECONDS):
            self._leaving = BackgroundCall(self._ray.shutdown)
            self._leaving.ended(_HASTE_SECONDS)

    def _let_go(self) -> None:
        """Wait until the connection has ended, which it does after Ray's end."""
        if self._leaving is not None:
            self._leaving.ended(_SHUTDOWN_SECONDS)

    def _late(self, what: str) -> str:
        limit = f"within {self._limit.seconds:g} s ({self._limit.setting})"
        return f"{what} {limit}.\n{self._log_tail()}"

    @property
    def _log(self) -> Path:
        return self._log_dir / "ray.log"

    def _log_tail(self) -> str:
        return f"The last lines of {self._log}:\n{last_lines(self._log)}"

    def _await_nodes(self, rendezvous: Rendezvous) -> None:
        """Wait until Ray has every node of the job, and note their addresses."""
        nodes = dict(enumerate(rendezvous.allocation.nodes))

        def ready(seconds: float) -> bool:
            for node in ray_compat.nodes():
                for index in [k for k in nodes if f"host_{k}" in node.resources]:
                    self._addresses[index] = node.address
                    del nodes[index]
            self._waiting.counts(len(self._addresses) - len(nodes), len(self._addresses), "nodes")
            if nodes:
                time.sleep(seconds)
            return not nodes

        what = f"the job's other nodes (see {self._log_dir}/ray_<node>.log)"
        if not self._waiting.until(ready, what, rendezvous.timeout):
            raise ClusterError(
                f"Waited {rendezvous.timeout:g} s for {', '.join(nodes.values())}: "
                f"{len(nodes)} of {len(self._addresses)} nodes did not join Ray. The job's "
                f"output and {self._log_dir}/ray_<node>.log say more; raise "
                "cluster.slurm.start_timeout if nodes are slow to start."
            )


@functools.cache
def secret() -> str:
    """Return the secret that the private Ray requires of its clients.

    There is one a process, because Ray reads it once.
    """
    return secrets.token_hex(32)
