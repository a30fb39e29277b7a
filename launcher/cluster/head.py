"""The process that holds a private Ray: a program of its own, `python head.py …`, not imported.

The driver starts it in a session of its own, so that no signal of the driver's terminal or process
group reaches Ray or the workers: the driver alone decides what a Ctrl-C means. It ends everything
below it and deletes the scratch folder as soon as its standard input closes, which the kernel does
when the driver ends in whatever way. Should this process itself be killed, the kernel kills `ray
start`, then Ray's processes (Ray asks for that), and the workers follow.

Standard output: one line, Ray's address, once it is up; it just ends where Ray does not come up.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

_FOR_THE_DRIVER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_SECONDS = 10  # the kernel cannot kill a process that hangs in a system call: do not wait

# Ray's client server, which nobody here needs, has a fixed port and no off switch: without grpc,
# its one dependency, Ray does without it.
_RAY = "import sys; sys.modules['grpc'] = None; from ray.scripts.scripts import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--store-bytes", type=int, required=True)
    given = parser.parse_args()

    # A batch system may signal every process of a job: Ray's processes inherit this mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_DRIVER)
    # Orphans of any depth become children of this process, so that none can be missed.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ray = start_ray(given.scratch, given.workers, given.store_bytes)
    try:
        watch(given.driver, ray, given.scratch / "ray_current_cluster")
    finally:
        end_everything()
        shutil.rmtree(given.scratch, ignore_errors=True)


def start_ray(scratch: Path, workers: int, store_bytes: int) -> subprocess.Popen[bytes]:
    """`ray start`, which lives for as long as all of Ray's processes do.

    Rather than `ray.init`, which starts two more Python processes that nobody here needs (an
    autoscaler and a log reader): on two busy cores Ray is up in two thirds of the time. No port is
    fixed, and no GPU is Ray's: the driver hands them out.
    """
    command = [sys.executable, "-P", "-c", _RAY, "start", "--head", "--block", "--port=0"]
    command += [f"--temp-dir={scratch}", f"--num-cpus={workers}", "--num-gpus=0"]
    command += [f"--object-store-memory={store_bytes}", "--include-dashboard=false"]
    command += ["--dashboard-port=0", "--include-log-monitor=false", "--no-monitor"]
    return subprocess.Popen(
        [*command, "--disable-usage-stats"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,  # the log
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def watch(driver: int, ray: subprocess.Popen[bytes], address: Path) -> None:
    """Tell the driver the address when there is one; return when the driver or Ray is gone."""
    told = False
    while os.getppid() == driver and ray.poll() is None:
        if not told and address.exists() and (text := address.read_text()):
            print(text, flush=True)
            told = True
        readable, _, _ = select.select([sys.stdin], [], [], 1.0 if told else 0.02)
        if readable:
            return


def end_everything() -> None:
    """Kill whatever is below this process and wait for it."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there is no child any more, so nothing below one either
            return
        time.sleep(0.01)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
