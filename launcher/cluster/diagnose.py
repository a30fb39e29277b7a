"""What can be found out about a worker that does not answer: its state, and where it stands.

`group` asks before it ends such a worker. Linux; elsewhere less is known.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from launcher.cluster.errors import RayEndedError
from launcher.cluster.ray.worker import WorkerHandle
from launcher.files import DamagedError, open_regular

_DUMP_SECONDS = 3.0  # in which a process that can still do so has written its stacks
_NODE_SECONDS = 30.0  # that another machine may take, which starts a process for it
_MOST_FRAMES = 12  # of one thread, the newest
_ROOT = Path(__file__).parents[2]
_OURS = tuple(f'"{_ROOT / package}{os.sep}' for package in ("launcher", "recipes"))


def diagnose(worker: WorkerHandle) -> str:
    """In some lines: whether the process runs, waits or is stopped, and where in Python its main
    thread stands, and those that do our work. It is made to write all stacks to its log.

    A stopped process is continued for that, so it is to be ended afterwards. Where it is on another
    machine, that is done there.
    """
    process = worker.process()
    if process is not None:
        return diagnosis(process.pid, str(worker.log))
    if not worker.elsewhere:
        return "its process is not up yet: nothing more is known"
    try:
        return str(worker.on_its_node(diagnosis, _NODE_SECONDS))
    except (TimeoutError, RayEndedError) as error:
        return f"its process is on another machine, of which nothing is known: {error}"


def diagnosis(pid: int, log: str) -> str:
    """See `diagnose`: of a process of this machine."""
    path = Path(log)
    try:
        process = psutil.Process(pid)
        state = _state(process)
        written = _size(path)
        # A stopped process takes it as soon as it is continued, before it does anything else.
        process.send_signal(signal.SIGQUIT)
        process.send_signal(signal.SIGCONT)
    except psutil.Error as error:
        return f"its process cannot be diagnosis: {error}"
    stacks = telling(_new_text(path, written))
    if not stacks:
        return f"{state}; it wrote no stacks when asked to"
    told = [f"{state}; where it stands (all of its threads: {path}):"]
    return "\n".join([*told, *(f"  {line}" for line in stacks)])


def telling(dump: str) -> list[str]:
    """Of what faulthandler writes, the threads that tell something: ours, and the main one, which
    comes last. Cut short."""
    *others, main = [block.splitlines() for block in dump.strip().split("\n\n")]
    lines = []
    for block in [block for block in others if any(map(_is_ours, block))] + [main]:
        lines += block[: _MOST_FRAMES + 1]
    return lines


def _is_ours(line: str) -> bool:
    return any(folder in line for folder in _OURS)


def _state(process: psutil.Process) -> str:
    status = process.status()
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "its process was stopped (SIGSTOP, or a debugger)"
    told = {
        psutil.STATUS_DISK_SLEEP: "its process waits for a disk or network file system",
        psutil.STATUS_RUNNING: "its process is computing",
        psutil.STATUS_ZOMBIE: "its process has ended",
    }.get(status, "its process waits")
    with suppress(OSError):  # where in the kernel, if that may be known
        if (channel := Path(f"/proc/{process.pid}/wchan").read_text().strip()) not in ("", "0"):
            told += f" in the kernel ({channel})"
    return told


def _size(log: Path) -> int:
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _new_text(log: Path, start: int) -> str:
    """What is added to `log` after its byte `start`, once nothing more comes."""
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
    except (OSError, DamagedError):  # somebody has put something else there
        return ""
    with open(descriptor, "rb") as file:
        file.seek(start)
        return file.read(size - start).decode(errors="replace")
