"""A process of low priority that writes checkpoints while this one trains.

In a thread of the training process the same work would hold up training: it takes the interpreter's
lock, which a step needs a little all the time, and competes for the processor on equal terms. The
process here gets only what is left over (on a busy core, 3 %), and everything when nothing trains.

The arrays pass through shared memory, which is kept from save to save, since allocating it costs
more than copying. It takes as much of the host's memory as this process's part of a state.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from launcher.base import end_with_parent
from launcher.checkpoint.layout import partial_path
from launcher.checkpoint.shards import view_on_host
from launcher.checkpoint.write import SaveError, Writers, abandon, save, stored_parts
from launcher.cluster.ray.worker_actor import FOR_THE_DRIVER

_LOOK_SECONDS = 5.0
_NICENESS = 15  # relative to this process
_MOST_NICENESS = 19
_ALIGNMENT = 64  # bytes
_ALONE = Writers()
_PART = 2**22  # bytes that one thread copies at a time
_THREADS = 8
_PROGRAM = f"from {__name__} import serve; serve()"


class _StoppedError(OSError):
    """The process is stopped (SIGSTOP, or a debugger)."""


class Background:
    """The process that writes, until `close`; it ends with this process, however that ends.

    Linux only.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("state")
        self._view: mmap.mmap | None = None
        self._start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def copy_to_host(self, state: Any) -> bytes:
        """Copy a state's arrays to shared memory once they are computed, for the next `save`.

        The result is valid for one `save`.
        """
        message, buffers = _pickled(stored_parts(view_on_host(state)))
        places, end = [], 0
        for buffer in buffers:
            places.append((end, buffer.nbytes))
            end += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end and (self._view is None or len(self._view) != end):
            os.ftruncate(self._memory, end)
            self._view = mmap.mmap(self._memory, end)
        if self._view is not None:
            _copy(buffers, np.frombuffer(self._view, np.uint8), [start for start, _ in places])
        return pickle.dumps((message, places, end))

    def save(
        self,
        folder: Path,
        step: int,
        state: bytes,
        metadata: dict[str, Any],
        keep: int | None = None,
        writers: Writers = _ALONE,
    ) -> None:
        """Run `checkpoint.save` in the process, on what `copy_to_host` has returned; wait for it.

        Raises:
            SaveError: as of `checkpoint.save`, or the process ended or was stopped. A stopped
                process is killed; the next save has a new one.
        """
        arguments = (folder, step, metadata, keep, writers)
        try:
            self._connection.send((state, arguments))
            kind, message = self._answer()
        except (EOFError, OSError) as error:
            code = self._end()
            how = f"ended ({'signal' if code < 0 else 'exit code'} {abs(code)})"
            if isinstance(error, _StoppedError):
                how = "was stopped (SIGSTOP, or a debugger)"
            message = f"cannot save step {step} in {folder}: the process that writes it {how}."
            abandon(partial_path(folder / str(step), writers.token), writers, message)
            self._start()
            raise SaveError(message) from None
        if kind == "refused":
            raise SaveError(message)
        if kind == "failed":
            raise RuntimeError(f"the process that writes checkpoints failed\n{message}")

    def _answer(self) -> tuple[str, str]:
        """Wait for the process's answer; raise _StoppedError if the process is stopped."""
        process, looks = psutil.Process(self._process.pid), 0
        while not self._connection.poll(_LOOK_SECONDS):
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            looks = looks + 1 if stopped else 0
            if looks == 2:
                raise _StoppedError
        kind, message = self._connection.recv()
        return kind, message

    def close(self) -> None:
        """Kill the process."""
        self._end()
        os.close(self._memory)

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        handed = [theirs.fileno(), self._memory]
        command = [sys.executable, "-P", "-c", _PROGRAM, *map(str, handed)]
        environ = _environment(os.environ, sys.path)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_DRIVER)  # the process inherits it
        try:
            # In this session: the kernel's `autogroup` gives sessions equal shares of the
            # processors, whatever the niceness.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=handed, env=environ, process_group=0
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, _MOST_NICENESS)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)  # inherited by its threads
        theirs.close()

    def _end(self) -> int:
        self._process.kill()
        code = self._process.wait()
        self._connection.close()
        return code


def _environment(environ: Mapping[str, str], search_path: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process that imports what this one can, and uses no device."""
    kept = {name: value for name, value in environ.items() if name != "XLA_FLAGS"}
    folders = os.pathsep.join(filter(None, search_path))
    return kept | {"PYTHONPATH": folders, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


class _Pickler(pickle.Pickler):
    """Pickles a value without its arrays' contents, for types of JAX's own as well."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, np.ndarray):
            return NotImplemented
        contents = np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
        return np.ndarray, (obj.shape, obj.dtype, pickle.PickleBuffer(contents.data))


def _pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    """Return a pickled value without the contents of its arrays, and these contents."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def _copy(buffers: Sequence[memoryview], target: np.ndarray, starts: Sequence[int]) -> None:
    """Copy each buffer to its start in `target` on all processors, as training waits for it."""
    jobs = []
    for buffer, start in zip(buffers, starts, strict=True):
        source = np.frombuffer(buffer, np.uint8)
        for at in range(0, source.size, _PART):
            part = source[at : at + _PART]
            jobs.append((target[start + at : start + at + part.size], part))

    def copy(share: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        for to, part in share:
            np.copyto(to, part)  # releases the interpreter's lock

    threads = min(_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="copy") as pool:
        list(pool.map(copy, [jobs[i::threads] for i in range(threads)]))


def serve() -> None:
    """Save states on request until the other end closes: the whole program of the process."""
    end_with_parent()
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    with suppress(EOFError, ConnectionError):  # the worker is gone
        while True:
            copy, arguments = connection.recv()
            message, places, size = pickle.loads(copy)
            view = memoryview(mmap.mmap(memory, size) if size else b"")
            buffers = [view[start : start + length] for start, length in places]
            state = SimpleNamespace(**pickle.loads(message, buffers=buffers))
            folder, step, metadata, keep, writers = arguments
            try:
                save(folder, step, state, metadata, keep, writers)
            except SaveError as error:
                connection.send(("refused", str(error)))
            except Exception:
                connection.send(("failed", traceback.format_exc()))
            else:
                connection.send(("saved", ""))
