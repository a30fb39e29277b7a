"""Diagnose a worker that does not answer: the state of its process and its Python stacks.

Linux tells most about a process; on other systems the diagnosis says less.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from launcher.base import DamagedError, open_regular
from launcher.cluster.errors import RayEndedError
from launcher.cluster.ray.worker import WorkerHandle

_DUMP_SECONDS = 3.0  # enough for a process that can still write its stacks
_NODE_SECONDS = 30.0  # for another machine, which starts a process for the diagnosis
_MOST_FRAMES = 12  # of each thread, the newest
_ROOT = Path(__file__).parents[2]
_OURS = tuple(f'"{_ROOT / package}{os.sep}' for package in ("launcher", "recipes"))


def diagnose(worker: WorkerHandle) -> str:
    """Return the state of a worker that does not answer, in a few lines.

    The state is that of its process (running, waiting or stopped), with the stacks of its main
    thread and of the threads that run code of the launcher. The process writes the stacks of all
    threads to its log. For that, a stopped process is continued, so it should be ended afterwards.
    A worker on another machine is diagnosed there.
    """
    process = worker.process()
    if process is not None:
        return diagnose_process(process.pid, str(worker.log))
    if not worker.elsewhere:
        return "its process is not up yet"
    try:
        return str(worker.run_on_node(diagnose_process, _NODE_SECONDS))
    except (TimeoutError, RayEndedError) as error:
        return f"its process is on another machine, whose state is unknown: {error}"


def diagnose_process(pid: int, log: str) -> str:
    """Return what `diagnose` does, for a process of this machine."""
    path = Path(log)
    try:
        process = psutil.Process(pid)
        state = _state(process)
        written = _size(path)
        # A stopped process handles it as soon as it is continued, before anything else.
        process.send_signal(signal.SIGQUIT)
        process.send_signal(signal.SIGCONT)
    except psutil.Error as error:
        return f"its process cannot be diagnosed: {error}"
    stacks = relevant_stacks(_new_text(path, written))
    if not stacks:
        return f"{state}; it wrote no stacks on request"
    heading = f"{state}; its stacks (all threads: {path}):"
    return "\n".join([heading, *(f"  {line}" for line in stacks)])


def relevant_stacks(dump: str) -> list[str]:
    """Return the lines of the relevant threads of a stack dump of faulthandler.

    These are the threads that run code of the launcher, then the main thread, which the dump has
    last. Each is cut to its newest frames.
    """
    *others, main = [block.splitlines() for block in dump.strip().split("\n\n")]
    lines = []
    for block in [block for block in others if any(map(_in_our_code, block))] + [main]:
        lines += block[: _MOST_FRAMES + 1]
    return lines


def _in_our_code(line: str) -> bool:
    return any(folder in line for folder in _OURS)


def _state(process: psutil.Process) -> str:
    status = process.status()
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "its process was stopped (SIGSTOP, or a debugger)"
    text = {
        psutil.STATUS_DISK_SLEEP: "its process waits for a disk or network file system",
        psutil.STATUS_RUNNING: "its process is computing",
        psutil.STATUS_ZOMBIE: "its process has ended",
    }.get(status, "its process waits")
    with suppress(OSError):  # the system may hide where in the kernel
        if (channel := Path(f"/proc/{process.pid}/wchan").read_text().strip()) not in ("", "0"):
            text += f" in the kernel ({channel})"
    return text


def _size(log: Path) -> int:
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _new_text(log: Path, start: int) -> str:
    """Return what was added to `log` after byte `start`, once it stops growing."""
    deadline, size = time.monotonic() + _DUMP_SECONDS, start
    while time.monotonic() < deadline:
        time.sleep(0.2)
        before, size = size, _size(log)
        if size > start and size == before:
            break
    if size <= start:
        return ""
    try:
        descriptor = open_regular(log, os.O_RDONLY | os.O_NOFOLLOW)
    except (OSError, DamagedError):  # something else stands in its place
        return ""
    with open(descriptor, "rb") as file:
        file.seek(start)
        return file.read(size - start).decode(errors="replace")
