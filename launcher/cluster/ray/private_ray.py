"""Start, use and clean up a private Ray, on this machine or on the nodes of a Slurm job.

The constructor does not wait: Ray comes up in the background, and `spawn` waits for it. Between the
two, `begin` starts the workers in the background as well. However the driver ends, nothing is left
behind; see `head`.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from launcher.base import open_own
from launcher.cluster.devices import DevicePool
from launcher.cluster.errors import ClusterError, RayEndedError, last_lines
from launcher.cluster.ray import ray_compat, scratch, worker_actor
from launcher.cluster.ray.head import readable
from launcher.cluster.ray.session import (
    Place,
    RaySession,
    StartLimit,
    ray_environment,
    replaced_environment,
)
from launcher.cluster.ray.worker import LOOPBACK, has_ended
from launcher.cluster.slurm.rendezvous import Rendezvous

_SHARE_OF_HOST = 0.01  # of the resource that stands for a host: it says where, and bounds nothing
_OWN = "raylet", "gcs_server"
_HASTE_SECONDS = 1.5  # for a step of the shutdown that usually takes a moment
_SHUTDOWN_SECONDS = 15.0
_END_SECONDS = 30.0  # for those that stand by, which may still trace, to end the others
_HEAD_SECONDS = 30  # for the head to end everything
_DEFAULT_LIMIT = StartLimit()


class PrivateRay(RaySession):
    """A private Ray and its workers; its constructor starts it without waiting for it.

    There is one at a time in a process. Those of other processes on the machine are independent.

    Args:
        pool: the devices of the run.
        log_dir: an existing folder for the output of Ray (`ray.log`) and of the processes. None
            makes a private one, which is deleted when this Ray is closed or this process ends,
            however that ends.
        rendezvous: the meeting point of the tasks of the job's other nodes; None for this machine
            alone.
        limit: how long the start may take, and what happens during the wait.

    Raises:
        ClusterError: there is no folder for Ray's sockets, or Ray was imported before.
        OSError: `log_dir` cannot be written.
    """

    _log_dir: Path
    renews = True

    def __init__(
        self,
        pool: DevicePool,
        log_dir: Path | None,
        rendezvous: Rendezvous | None = None,
        limit: StartLimit = _DEFAULT_LIMIT,
    ) -> None:
        super().__init__(limit, log_dir and Path(log_dir).resolve())
        self.pool = pool
        self._rendezvous = rendezvous if pool.hosts > 1 else None  # else no other task is expected
        self._known, self._nodes = [LOOPBACK] * pool.hosts, list(range(pool.hosts))
        self._connected, self._at = False, ""
        self._own: list[psutil.Process] = []  # Ray's processes that all others end with
        self._kept: list[psutil.Process] = []  # the head's children, of which these are
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._own_logs = log_dir is None
            if log_dir is None:  # not Ray's own folder, which is deleted when Ray ends
                logs = scratch.create()
                self._undo.callback(logs.remove)
                self._log_dir = logs.path
            folder = scratch.create()
            self._undo.callback(folder.remove)
            token = folder.token(secret())
            self._environ = ray_environment(os.environ, token, nodes=self._rendezvous is not None)
            self._head = self._start_head(folder)
            self._undo.callback(self._let_go)
            self._undo.callback(end_head, self._head, folder.path)
            with replaced_environment(self._environ):
                self._ray = ray_compat.import_ray()
            atexit.register(self.close)  # after Ray's import, so that it runs before Ray's own
            on_error.pop_all()

    def check(self) -> None:
        """See `RaySession.check`; continues Ray's head if that was stopped."""
        if self._head.poll() is not None or any(map(has_ended, self._own)):
            text = "Ray ended: one of its own processes was killed or failed."
            raise RayEndedError(f"{text}\n{self._log_tail()}")
        continue_head(self._head)

    def end_workers(self) -> None:
        """See `RaySession.end_workers`; ends what they have started, too, which the head gets."""
        if self._rendezvous is not None:
            self._end_there()
        super().end_workers()
        worker_actor.end_children(self._head.pid, self._kept)

    def _end_there(self) -> None:
        """Have those that were begun end the others of their nodes.

        Raises:
            RayEndedError: on a node none does, which may be what failed.
        """
        first = {handle.host: handle for handle in reversed(self._begun)}
        ended = {host: list[int]() for host in range(self.pool.hosts)}
        try:
            for handle in self._used:
                _, process, _ = self._ray.get(handle.location, timeout=0)
                ended[handle.host].append(process)
            calls = [first[host].actor.end.remote(ended[host]) for host in ended]
            self._ray.get(calls, timeout=_END_SECONDS)
        except (KeyError, self._ray.exceptions.RayError) as error:
            raise RayEndedError(f"a node has no worker that answers: {error}") from error

    def close(self) -> None:
        """End every process and delete all files of this Ray; see `RaySession.close`."""
        try:
            super().close()
        finally:
            if self._connecting is not None:
                ray_compat.restore_signals(worker_actor.FOR_THE_DRIVER)
                ray_compat.read_settings_again()  # for a Ray of the user's that comes after it
        atexit.unregister(self.close)

    def _place(self, host: int) -> Place:
        there = {} if self._rendezvous is None else {f"host_{self._nodes[host]}": _SHARE_OF_HOST}
        return Place(host, self._known[host], {"num_cpus": 0, "resources": there})

    def _check_started(self, missing: Mapping[str, str], in_time: bool) -> None:
        if not in_time:  # otherwise Ray's reason, if there is one, is raised by the first call
            raise RayEndedError(
                self._late(f"Ray did not start the processes of {', '.join(missing)}")
            )

    def _start_head(self, folder: scratch.Scratch) -> subprocess.Popen[str]:
        if self._rendezvous is None:
            options = [f"--own={self._log_dir}"] if self._own_logs else []
            return start_head(folder, self._environ, self._log, self.pool.hosts, options)
        waiting = self._rendezvous.listener.fileno()
        options = [f"--ip={self._rendezvous.address}", "--host=0"]
        options += [f"--rendezvous={waiting}", f"--logs={self._log_dir}"]
        return start_head(folder, self._environ, self._log, 1, options, [waiting])

    def _connect(self) -> None:
        if self._connected:
            return
        if self._connecting is None:
            self._at = self._address()
            with replaced_environment(self._environ):
                self._join(self._at, _HASTE_SECONDS)  # while Ray is up, which is faster
        assert self._connecting is not None
        if not self._connecting.ended(0):  # this process cannot try again
            raise ClusterError(self._late(f"Ray came up at {self._at}, but did not answer"))
        try:
            self._connecting.result()
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise RayEndedError(f"Ray came up, but accepts no connection: {error}") from error
        if self._rendezvous is not None:
            self._await_nodes(self._rendezvous)
        with suppress(psutil.NoSuchProcess):  # the head, which `check` finds
            head = psutil.Process(self._head.pid)
            self._kept, below = head.children(), head.children(recursive=True)
            self._own = [process for process in below if name_of(process) in _OWN]
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
        if not address or self._head.poll() is not None:  # connecting would never end
            raise RayEndedError(f"Ray did not come up.\n{self._log_tail()}")
        return address

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
        """Wait for the nodes of the job, note the addresses, and take those that Ray has."""
        names = rendezvous.allocation.nodes
        addresses: dict[int, str] = {}

        def there() -> int:
            addresses.clear()
            for node in ray_compat.nodes():
                found = (k for k in range(len(names)) if f"host_{k}" in node.resources)
                addresses.update(dict.fromkeys(found, node.address))
            return len(addresses)

        limit, what = self._limit, f"the job's other nodes (see {self._log_dir}/ray_<node>.log)"
        seconds = rendezvous.timeout if limit.hosts is None else limit.host_seconds
        self._await_hosts(len(names), there, what, seconds)
        self.missing = tuple(name for k, name in enumerate(names) if k not in addresses)
        if self.missing and limit.hosts is None:
            raise ClusterError(
                f"Waited {seconds:g} s for {', '.join(self.missing)}: "
                f"{len(self.missing)} of {len(names)} nodes did not join Ray. The job's "
                f"output and {self._log_dir}/ray_<node>.log say more; raise "
                "cluster.slurm.start_timeout if nodes are slow to start."
            )
        self._nodes = sorted(addresses)
        self._known = [addresses[k] for k in self._nodes]
        self.use(len(self._nodes))


@functools.cache
def secret() -> str:
    """Return the secret that the private Ray requires of its clients.

    There is one a process, because Ray reads it once.
    """
    return secrets.token_hex(32)


# -- The head process (`head`) of a node ----------------------------------------------------------


def start_head(
    folder: scratch.Scratch,
    environ: Mapping[str, str],
    log: Path,
    workers: int,
    options: Sequence[str] = (),
    sockets: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Start a head process that lives no longer than this process.

    Args:
        folder: the scratch folder that the head deletes at its end.
        environ: the environment of Ray's processes.
        log: the file that Ray's output is appended to.
        workers: the number of worker processes that will run on this node.
        options: further options of `head`.
        sockets: the descriptors that these options name.
    """
    command = [sys.executable, "-P", str(Path(__file__).with_name("head.py"))]
    command += [f"--driver={os.getpid()}", f"--scratch={folder.path}", f"--workers={workers}"]
    command += [f"--store-bytes={scratch.store_bytes()}", *options]
    locks = [folder.lock]
    if (memory := scratch.shared_memory()) is not None:
        folder.link(memory.path)
        command += [f"--own={memory.path}"]
        locks.append(memory.lock)
    with open(open_own(log, os.O_WRONLY | os.O_APPEND), "a") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environ,
            pass_fds=[*locks, *sockets],
            start_new_session=True,
        )


def name_of(process: psutil.Process) -> str:
    """Return the name of a process, "" if it has ended."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def continue_head(head: subprocess.Popen[str]) -> None:
    """Continue the head if it was stopped: it watches over the other processes."""
    with suppress(psutil.Error):  # it is gone
        if psutil.Process(head.pid).status() == psutil.STATUS_STOPPED:
            head.send_signal(signal.SIGCONT)


def end_head(head: subprocess.Popen[str], folder: Path) -> None:
    """Have the head end everything, and wait until it has.

    If the head itself was killed, the processes that it had started are ended from here; the
    scratch folder in their environment identifies them.
    """
    for pipe in (head.stdin, head.stdout):
        assert pipe is not None
        pipe.close()
    continue_head(head)
    try:
        head.wait(_HEAD_SECONDS)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait()
    if head.returncode < 0:
        scratch.end_users(folder)
