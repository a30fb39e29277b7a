"""Write checkpoints while training continues, in a process of low priority where one is worth it.

In a thread of the training process the same work would hold up training: it takes the interpreter's
lock, which a step needs a little all the time, and competes for the processor on equal terms. The
process here gets only what is left over (on a busy core, 3 %), and everything when nothing trains.

It maps the memory that the state was copied to (`snapshot.Pages`), so that nothing is copied again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil

from launcher.base import SpanRecorder, end_with_parent
from launcher.checkpoint.layout import partial_path
from launcher.checkpoint.pieces import Piece
from launcher.checkpoint.snapshot import Pages, Snapshots, keep_snapshots
from launcher.checkpoint.write import SaveError, Writers, abandon, save
from launcher.cluster.ray.worker_actor import FOR_THE_DRIVER

_LOOK_SECONDS = 5.0
_NICENESS = 15  # relative to this process
_MOST_NICENESS = 19
_ALONE = Writers()
_PROGRAM = f"from {__name__} import serve; serve()"


class _StoppedError(OSError):
    """The process is stopped (SIGSTOP, or a debugger)."""


class Background:
    """The process that writes, until `close`; it ends with this process, however that ends.

    Linux only.
    """

    def __init__(self) -> None:
        self._start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def save(
        self,
        folder: Path,
        step: int,
        pages: Pages,
        metadata: dict[str, Any],
        keep: int | None = None,
        writers: Writers = _ALONE,
    ) -> None:
        """Run `checkpoint.save` in the process, on the pages of a state; wait for it.

        Raises:
            SaveError: as of `checkpoint.save`, or the process ended or was stopped. A stopped
                process is killed; the next save has a new one.
        """
        arguments = (folder, step, metadata, keep, writers)
        try:
            self._connection.send((pages, arguments))
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

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        handed = theirs.fileno()
        command = [sys.executable, "-P", "-c", _PROGRAM, str(handed)]
        environ = _environment(os.environ, sys.path)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_DRIVER)  # the process inherits it
        try:
            # In this session: the kernel's `autogroup` gives sessions equal shares of the
            # processors, whatever the niceness.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[handed], env=environ, process_group=0
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


class Saver:
    """Writes this process's part of a state, one save at a time.

    Args:
        spans: records writing.

    Attributes:
        snapshots: the memory that states are copied to; until snapshots are kept, nobody finds it.
    """

    def __init__(self, spans: SpanRecorder) -> None:
        self._spans, self.snapshots = spans, Snapshots()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._process: Background | None = None
        self._save: Future[None] | None = None

    def start_process(self) -> None:
        """Start the process of low priority that writes the saves from now on; only once."""
        self._process = self._process or Background()

    def keep_snapshots(self, *arguments: Any) -> dict[Piece, int] | str:
        """Keep snapshots, as `keep_snapshots`; return the bytes of each piece, or why not."""
        kept = keep_snapshots(*arguments)
        if isinstance(kept, str):
            return kept
        self.drop_snapshots()
        self.snapshots = kept
        return kept.sizes

    def drop_snapshots(self) -> None:
        """Give the memory for snapshots back; saves take what they need."""
        self.snapshots.close()
        self.snapshots = Snapshots()

    def begin(self, folder: Path, step: int, state: Any, *rest: Any) -> None:
        """Begin to write a state, like `save`; return once it may be overwritten.

        `finish` must have been called for the save before.
        """
        assert self._save is None
        with self._spans.span("save", f"views of the state after step {step}"):
            copied = self.snapshots.hold(step, state)
        self._save = self._thread.submit(self._write, copied, folder, step, *rest)

    def _write(self, copied: Future[Pages], folder: Path, step: int, *rest: Any) -> None:
        with self._spans.span("save", f"state after step {step}"):
            pages = copied.result()
            try:
                # A save at the end of a run holds nothing up: not worth starting a process.
                if self._process is not None:
                    self._process.save(folder, step, pages, *rest)
                else:
                    save(folder, step, pages.state(), *rest)
            finally:
                self.snapshots.release()

    def is_writing(self, seconds: float) -> bool:
        """Wait for up to `seconds`; return whether the save is still being written."""
        return bool(self._save and wait([self._save], seconds).not_done)

    def finish(self) -> str | None:
        """Wait for all copies in progress; return why the save failed, or None if it did not."""
        self.snapshots.settle()
        under_way, self._save = self._save, None
        try:
            if under_way is not None:
                under_way.result()
        except SaveError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Stop the thread and the process, once the save in progress is written."""
        self._thread.shutdown()
        self.snapshots.close()
        if self._process is not None:
            self._process.close()


def serve() -> None:
    """Save states on request until the other end closes: the whole program of the process."""
    end_with_parent()
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError):  # the worker is gone
        while True:
            pages, (folder, step, metadata, keep, writers) = connection.recv()
            try:
                save(folder, step, pages.state(), metadata, keep, writers)
            except SaveError as error:
                connection.send(("refused", str(error)))
            except Exception:
                connection.send(("failed", traceback.format_exc()))
            else:
                connection.send(("saved", ""))
