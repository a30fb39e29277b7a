"""The process that holds a private Ray: a program of its own, `python head.py …`, not imported.

The driver starts it in a session of its own, so that no signal of the driver's terminal or process
group reaches Ray or the workers: the driver alone decides what a Ctrl-C means. It ends everything
below it and deletes the scratch folder as soon as its standard input closes, which the kernel does
when the driver ends in whatever way. Should this process itself be killed, Ray's processes follow
(Ray asks the kernel for that), and the workers after them.

Standard output: one line, Ray's address, once it is up; it just ends where Ray does not come up.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import psutil

_FOR_THE_DRIVER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10  # the kernel cannot kill a process that hangs in a system call: do not wait


def main(answer: TextIO) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--store-bytes", type=int, required=True)
    given = parser.parse_args()

    # A batch system may signal every process of a job: Ray's processes inherit this mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_DRIVER)
    if sys.platform == "linux":
        # Orphans of any depth become children of this process, so that none can be missed.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    threading.Thread(target=watch, args=(given.driver, given.scratch, answer)).start()
    try:
        run_ray(given.scratch, given.workers, given.store_bytes)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    end(given.scratch, code=1)


def run_ray(scratch: Path, workers: int, store_bytes: int) -> None:
    """`ray start`, in this thread, for as long as all of Ray's processes live.

    Rather than `ray.init`, which starts two more Python processes that nobody here needs (an
    autoscaler and a log reader): on two busy cores Ray is up in two thirds of the time. No port is
    fixed, and no GPU is Ray's: the driver hands them out.
    """
    # Ray's client server, which nobody here needs, has a fixed port and no other off switch.
    sys.modules["grpc"] = None  # type: ignore[assignment]
    from ray.scripts.scripts import main as ray

    sys.argv = ["ray", "start", "--head", "--block", "--port=0", "--dashboard-port=0"]
    sys.argv += [f"--temp-dir={scratch}", f"--num-cpus={workers}", "--num-gpus=0"]
    sys.argv += [f"--object-store-memory={store_bytes}", "--include-dashboard=false"]
    sys.argv += ["--include-log-monitor=false", "--no-monitor", "--disable-usage-stats"]
    ray()


def watch(driver: int, scratch: Path, answer: TextIO) -> None:
    """Tell the driver the address when there is one; end everything when the driver is gone."""
    address_file = scratch / "ray_current_cluster"
    while os.getppid() == driver:
        if not answer.closed and address_file.exists() and (text := address_file.read_text()):
            answer.write(f"{text}\n")
            answer.close()
        readable, _, _ = select.select([sys.stdin], [], [], 1.0 if answer.closed else 0.02)
        if readable:
            break
    end(scratch, code=0)


def end(scratch: Path, code: int) -> None:
    """Kill whatever is below this process, delete the scratch folder, and exit."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there is no child any more, so nothing below one either
            break
        time.sleep(0.01)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(code)


if __name__ == "__main__":
    own_output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints goes to the log
    main(own_output)
