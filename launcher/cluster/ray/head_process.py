"""Start and end the head process (`head`) of a node of a private Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from launcher.base import open_own
from launcher.cluster.ray.scratch import Scratch, end_users, store_bytes

_END_SECONDS = 30


def start_head(
    folder: Scratch,
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
    command += [f"--store-bytes={store_bytes()}", *options]
    with open(open_own(log, os.O_WRONLY | os.O_APPEND), "a") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environ,
            pass_fds=[folder.lock, *sockets],
            start_new_session=True,
        )


def continue_head(head: subprocess.Popen[str]) -> None:
    """Continue the head if it was stopped: it watches over the other processes."""
    with suppress(psutil.Error):  # it is gone
        if psutil.Process(head.pid).status() == psutil.STATUS_STOPPED:
            head.send_signal(signal.SIGCONT)


def end(head: subprocess.Popen[str], folder: Path) -> None:
    """Have the head end everything, and wait until it has.

    If the head itself was killed, the processes that it had started are ended from here; the
    scratch folder in their environment identifies them.
    """
    for pipe in (head.stdin, head.stdout):
        assert pipe is not None
        pipe.close()
    continue_head(head)
    try:
        head.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait()
    if head.returncode < 0:
        end_users(folder)
