"""Ray actors that run in a worker process and hold the user's object.

They travel to the worker by value and are the first code there, before anything of this package or
JAX is imported, so that both see the environment and the module search path that they set. Until
then they import only the standard library and the Ray that runs them, so the few private names of
Ray that they use stand here and not in `ray_compat`.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

FOR_THE_DRIVER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_SIG_IGN = 1
_KILL_SECONDS = 10
_KILLS = 500  # with a hundredth of a second between them

Outcome = tuple[bool, Any]  # (True, result) | (False, (exception type, message, traceback text))


class Worker:
    """A worker process: sets the process up, builds the user's object and calls its methods."""

    def __init__(
        self, environ: dict[str, str], search_path: list[str], folder: str, log: str | None
    ) -> None:
        if log is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            # The driver has made this file, so nothing else, to wait for or to follow, is there.
            output = os.open(log, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if os.fstat(output).st_size:
                os.write(output, f"--- {time.ctime()}: process {os.getpid()} begins ---\n".encode())
        gc.set_threshold(20_000)  # imports and tracing make a million objects that stay alive
        faulthandler.enable()  # a crash leaves the Python stack as the log's last lines
        # `kill -QUIT <pid>` adds the stacks of a process that seems to hang; see `diagnose`.
        faulthandler.register(signal.SIGQUIT, file=2)
        self._survive_signals()
        for name in set(os.environ) - set(environ):
            # If the driver does not name the GPUs, this host's own choice of them holds.
            if not name.startswith("RAY_") and name != "CUDA_VISIBLE_DEVICES":
                del os.environ[name]
        os.environ.update(environ)
        os.chdir(folder)
        sys.path[:] = search_path + [entry for entry in sys.path if entry not in search_path]
        from launcher.base import end_with_parent, keep_memory, take_over

        if os.environ.get("JAX_PLATFORMS") == "cpu":
            keep_memory()
        take_over(logging.StreamHandler())  # standard error is the worker's log
        end_with_parent()  # ends with Ray's process, also while it is stopped
        self._object: Any = None
        self._construct_failure: Any = None  # the answer to every call, if there is one

    def _survive_signals(self) -> None:
        # The driver decides what a signal means, so none of these ends a worker. A handler, not
        # SIG_IGN or the mask it was born with, because its own children would inherit those two.
        for number in FOR_THE_DRIVER:
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_DRIVER)

    def location(self) -> tuple[str, int, str]:
        """Return the machine, as `machine_id` does, the process number, and Ray's node id."""
        import ray

        return machine_id(), os.getpid(), ray.get_runtime_context().get_node_id()

    def construct(self, pickled: bytes) -> Outcome:
        """Build the user's object from a pickled `(class, arguments)`."""
        try:
            worker_class, arguments = pickle.loads(pickled)
            self._object = worker_class(*arguments)
        except BaseException as error:
            self._construct_failure = _described(error)
            return False, self._construct_failure
        return True, None

    def call(self, method: str, *arguments: Any) -> Outcome:
        """Call a method of the user's object; an exception is returned as text, never pickled."""
        if self._construct_failure is not None:
            return False, self._construct_failure
        try:
            return True, getattr(self._object, method)(*arguments)
        except BaseException as error:
            return False, _described(error)

    def end(self, processes: list[int]) -> None:
        """Kill other workers of this node and what they have started, and wait for their end."""
        import psutil

        raylet, ray, head, *_ = psutil.Process().parents()
        others = [child for child in raylet.children() if child.pid in processes]
        for other in others:
            other.kill()
        psutil.wait_procs(others, _KILL_SECONDS)
        end_children(head.pid, [ray])


class Server(Worker):
    """A process whose object has coroutines for methods, so that calls run concurrently.

    It starts no process of its own. Calls that arrive before the object is built wait for it: the
    callers are the workers, and the driver has it built.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_built = asyncio.Event()

    def construct(self, pickled: bytes) -> Outcome:
        """See `Worker.construct`."""
        try:
            return super().construct(pickled)
        finally:
            self._is_built.set()

    def _survive_signals(self) -> None:
        # Ray constructs such an actor in a thread in which Python sets no handlers.
        for number in FOR_THE_DRIVER:
            ctypes.CDLL(None).signal(int(number), _SIG_IGN)

    async def live(self) -> None:
        """Wait for the end of the process, which ends the call."""
        await asyncio.Event().wait()

    async def answer(self, method: str, *arguments: Any) -> Outcome:
        """Call a coroutine of the user's object; an exception is returned as `call` does."""
        await self._is_built.wait()
        if self._construct_failure is not None:
            return False, self._construct_failure
        try:
            return True, await getattr(self._object, method)(*arguments)
        except Exception as error:
            return False, _described(error)


def machine_id() -> str:
    """Return a text that identifies this machine, or this container of it.

    Where it is the same, a process number means the same process.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def end_children(pid: int, kept: list[Any]) -> None:
    """Kill the children of a process, except those of `kept`, and what it gets when they end.

    Args:
        pid: the process.
        kept: some of psutil's processes.
    """
    import psutil

    for _ in range(_KILLS):  # each leaves what it has started in turn
        found = False
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children():
                if child not in kept and child.status() != psutil.STATUS_ZOMBIE:
                    found = True
                    child.kill()
        if not found:
            break
        time.sleep(0.01)


def _described(error: BaseException) -> tuple[str, str, str]:
    inner = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
    text = "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))
    return type(error).__name__, str(error), text
