"""A process of its own that writes checkpoints while this one trains, at a low priority.

In a thread of the training process the same work would hold up training: it takes the interpreter's
lock, of which a step needs a little all the time, and its processor time on equal terms. The
process here gets only what is left over (on a core that is busy, 3 %), and everything when nothing
trains. `worker` keeps one where a run saves while it trains.

The arrays pass through memory that both processes see. It is kept from save to save, since new
memory costs more than the copying: of the host's, as much as one state takes here.
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

from launcher.follow import follow
from launcher.train.checkpoint.pieces import seen
from launcher.train.checkpoint.write import FIELDS, SaveError, Writers, abandon, save

_LOOK_SECONDS = 5.0
_NICENESS = 15  # above this process's own
_MOST_NICENESS = 19
_ALIGNMENT = 64  # bytes
_ALONE = Writers()
_PART = 2**22  # bytes that one thread copies at a time
_THREADS = 8
_PROGRAM = f"from {__name__} import serve; serve()"
# What the driver may be sent, and a batch system sends to every process of a job.
_FOR_THE_DRIVER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class _StoppedError(OSError):
    """The process is stopped."""


class Background:
    """The process, from its start to `close`; it ends with this one in whatever way that ends.

    Linux.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("state")
        self._view: mmap.mmap | None = None
        self._start()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def copied(self, state: Any) -> bytes:
        """Copy a state's arrays to where the process sees them, for the next `save`: it holds for
        one alone. Waits until they are computed."""
        fields = {name: seen(getattr(state, name)) for name in FIELDS}
        message, buffers = _pickled(fields)
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
        """`checkpoint.save` in that process, of what `copied` has returned; waits for it.

        Raises SaveError also where the process ends meanwhile, or is stopped and so ended; the next
        save has a new one.
        """
        arguments = (folder, step, metadata, keep, writers)
        try:
            self._connection.send((state, arguments))
            kind, told = self._answer()
        except (EOFError, OSError) as error:
            code = self._end()
            how = "was stopped (SIGSTOP, or a debugger)" if isinstance(error, _StoppedError) else ""
            told = f"the process that writes it {how or f'ended ({_how(code)})'}"
            told = f"cannot save step {step} in {folder}: {told}."
            abandon(folder, step, writers, told)
            self._start()
            raise SaveError(told) from None
        if kind == "refused":
            raise SaveError(told)
        if kind == "failed":
            raise RuntimeError(f"the process that writes checkpoints failed\n{told}")

    def _answer(self) -> tuple[str, str]:
        """What the process says in the end; one that is stopped would never."""
        process, looks = psutil.Process(self._process.pid), 0
        while not self._connection.poll(_LOOK_SECONDS):
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            looks = looks + 1 if stopped else 0
            if looks == 2:
                raise _StoppedError
        kind, told = self._connection.recv()
        return kind, told

    def close(self) -> None:
        """End the process, at once."""
        self._end()
        os.close(self._memory)

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        handed = [theirs.fileno(), self._memory]
        command = [sys.executable, "-P", "-c", _PROGRAM, *map(str, handed)]
        environ = _environment(os.environ, sys.path)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_DRIVER)  # which it inherits
        try:
            # No session of its own, whose share of the processors the kernel (`autogroup`) would
            # make as large as this one's, whatever the niceness.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=handed, env=environ, process_group=0
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, _MOST_NICENESS)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)  # all its threads inherit it
        theirs.close()

    def _end(self) -> int:
        self._process.kill()
        code = self._process.wait()
        self._connection.close()
        return code


def _environment(environ: Mapping[str, str], search_path: Sequence[str]) -> dict[str, str]:
    """That of a process that finds what this one finds, and uses no device."""
    kept = {name: value for name, value in environ.items() if name != "XLA_FLAGS"}
    folders = os.pathsep.join(filter(None, search_path))
    return kept | {"PYTHONPATH": folders, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class _Pickler(pickle.Pickler):
    """Leaves the contents of arrays out, those of types of JAX's own as well."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, np.ndarray):
            return NotImplemented
        contents = np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
        return _array, (pickle.PickleBuffer(contents.data), obj.shape, obj.dtype)


def _array(contents: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.ndarray(shape, dtype, contents)


def _pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    """A value without the contents of its arrays, and these."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def _copy(buffers: Sequence[memoryview], target: np.ndarray, starts: Sequence[int]) -> None:
    """Copy each buffer to its place in `target`, with all processors: training waits for it."""
    jobs = []
    for buffer, start in zip(buffers, starts, strict=True):
        source = np.frombuffer(buffer, np.uint8)
        for at in range(0, source.size, _PART):
            part = source[at : at + _PART]
            jobs.append((target[start + at : start + at + part.size], part))

    def copy(some: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        for to, part in some:
            np.copyto(to, part)  # without the interpreter's lock

    threads = min(_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="copy") as pool:
        list(pool.map(copy, [jobs[i::threads] for i in range(threads)]))


def serve() -> None:
    """Save what is asked for, one state after another: all that the process does."""
    follow()
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    with suppress(EOFError, ConnectionError):  # whoever asked is gone
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
