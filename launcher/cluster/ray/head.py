"""Head process of a node of a private Ray: a program, run as `python head.py …`.

The driver starts it in a session of its own, so that no signal of the driver's terminal or process
group reaches Ray or the workers: the driver alone decides what a Ctrl-C means. It ends everything
below it and deletes the scratch folder as soon as its standard input closes, which the kernel does
however the driver ends; if it was stopped, the kernel continues it then. If this process itself is
killed, the kernel kills `ray start`, then Ray's processes (Ray asks for that) and the workers
(`worker_actor` does).

Standard output: one line, Ray's address, once Ray is up, and nothing if Ray does not come up. Exit
code: 1 if Ray ended by itself.

In a Ray of several nodes the first node's head also answers the tasks of the other nodes, which
wait connected to `--rendezvous`. A task sends a nonce and proves that it knows the secret that
opens Ray. The answer is a proof over that nonce and one line of JSON: Ray's address and the folder
for logs. The heads of these nodes join that Ray, and end when this connection, their `--lifeline`,
does.

The program imports nothing of this package.
"""

from __future__ import annotations

import argparse
import ctypes
import hmac
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

RAY_FOLDER = "r"  # Ray's own folder inside the scratch folder: Ray opens its own to everybody
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"  # names the file with the secret that opens Ray

_FOR_THE_DRIVER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_RAY_SECONDS = 25  # a start that fails later has run into Ray's own time limit
_LOOK_SECONDS = 2.0
_ASKED_BYTES = 200  # more than a task sends
_MOST_CALLERS = 64  # that are not authenticated yet
_KILL_SECONDS = 10  # the kernel cannot kill a process that hangs in a system call: do not wait

# These names and the options in `start_ray` are private to Ray or undocumented (seen in Ray 2.60).
# They belong in `ray_compat`, which this program cannot import. Ray's client server, which is not
# needed, has a fixed port and no off switch: without gRPC's Python module, which only the server
# needs, Ray leaves it out. Ray would write its address to a file, for anyone to find; here only the
# process that started this program gets it.
_RAY = """
import os, sys
output = os.dup(1)
os.dup2(2, 1)
sys.modules["grpc"] = None
import ray._private.utils
ray._private.utils.write_ray_address = lambda address, _: os.write(output, f"{address}\\n".encode())
from ray.scripts.scripts import main
main()
"""


def main() -> None:
    """Run the program; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--store-bytes", type=int, required=True)
    parser.add_argument("--ip", help="this node's address, in a Ray of several nodes")
    parser.add_argument("--host", type=int, help="this node's number there")
    parser.add_argument("--rendezvous", type=int, help="a listening socket's descriptor")
    parser.add_argument("--logs", help="the folder for logs that the other nodes get")
    parser.add_argument(
        "--own", type=Path, action="append", default=[], help="a folder that ends with the driver"
    )
    parser.add_argument("--join", help="the address of the Ray that this node becomes part of")
    parser.add_argument("--lifeline", type=int, help="a connected socket's descriptor")
    given = parser.parse_args()

    # A batch system may signal every process of a job; Ray's processes inherit this mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_DRIVER)
    # Orphans of any depth become children of this process, so that none can be missed.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    try:
        ended = run_ray(given)
    finally:
        end_everything()
        shutil.rmtree(given.scratch, ignore_errors=True)
        if os.getppid() != given.driver:  # else the driver deletes them
            for owned in given.own:
                shutil.rmtree(owned, ignore_errors=True)
    sys.exit(int(ended))


def run_ray(given: argparse.Namespace) -> bool:
    """Run Ray until it is not needed any more; return whether it ended by itself.

    `ray start` waits 30 s for its own node, whatever the settings say, and then ends: too short on
    a machine that has much other work. So it is tried again then; if it ends sooner, there is
    another reason.
    """
    for last in (False, False, True):
        began = time.monotonic()
        ray = start_ray(given)
        up = watch(given, ray)
        ended = ray.poll() is not None
        if up or not ended or last or time.monotonic() - began < _RAY_SECONDS:
            break
        end_everything()
    return ended


def start_ray(given: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start `ray start`, which lives as long as all of Ray's processes do.

    `ray.init` would start two more Python processes that are not needed here (an autoscaler and a
    log reader): without them, on two busy cores, Ray is up in two thirds of the time. No port is
    named before Ray holds it: a process that took it first would get the secret. Ray gets no GPU,
    for the driver hands them out.
    """
    # `--no-monitor` is a hidden option.
    command = [sys.executable, "-P", "-c", _RAY, "start", "--block", "--disable-usage-stats"]
    command += [f"--temp-dir={given.scratch / RAY_FOLDER}", "--num-gpus=0"]
    command += [f"--num-cpus={given.workers}"]
    # Ray would refuse a store that leaves little memory if it were all written; nobody asks for
    # the resource, which has to be given then.
    command += [f"--object-store-memory={given.store_bytes}", f"--memory={1 << 30}"]
    command += ["--include-log-monitor=false"]
    # Any free ports: Ray would draw from a range without checking that they are free.
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    if given.ip:
        command += [f"--node-ip-address={given.ip}", f'--resources={{"host_{given.host}": 1}}']
    if given.join:
        command += [f"--address={given.join}"]
    else:
        command += ["--head", "--port=0", "--include-dashboard=false"]
        command += ["--dashboard-port=0", "--no-monitor"]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # the address; all else goes to the log
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def watch(given: argparse.Namespace, ray: subprocess.Popen[bytes]) -> bool:
    """Watch until the driver, Ray or the lifeline is gone; return whether Ray came up.

    Once Ray's address is known, it is passed to the driver and to the other nodes.
    """
    address = ""
    output: Any = ray.stdout
    ends: list[Any] = [sys.stdin]
    if given.lifeline is not None:
        ends.append(socket.socket(fileno=os.dup(given.lifeline)))
    rendezvous = (
        None if given.rendezvous is None else socket.socket(fileno=os.dup(given.rendezvous))
    )
    callers: list[socket.socket] = []
    joined = []  # connections to the job's other tasks, kept open until this process ends
    looked = time.monotonic()
    while os.getppid() == given.driver and ray.poll() is None:
        doors = [rendezvous, *callers] if rendezvous is not None and address else []
        ready = readable([*ends, output, *doors], 1.0)
        if any(end in ready for end in ends):
            break
        if time.monotonic() - looked >= _LOOK_SECONDS:
            looked = time.monotonic()
            resume_ray(ray.pid)
        if output in ready:
            line = output.readline().decode().strip()
            if not line:  # Ray ends
                ray.wait()
                break
            address = line
            print(address, flush=True)
        for caller in [caller for caller in callers if caller in ready]:
            callers.remove(caller)
            with suppress(OSError):  # gone again
                if _answer_task(caller, json.dumps({"ray": address, "logs": given.logs})):
                    joined.append(caller)
                    continue
            caller.close()
        if rendezvous is not None and rendezvous in ready:
            with suppress(OSError):  # gone again
                callers.append(rendezvous.accept()[0])
        while len(callers) > _MOST_CALLERS:
            callers.pop(0).close()  # a task of the job would connect again
    return bool(address)


def _answer_task(caller: socket.socket, body: str) -> bool:
    """Answer a caller that can be read from, if it is a task of this job; return whether it is."""
    caller.setblocking(False)
    nonce, _, given = caller.recv(_ASKED_BYTES).partition(b" ")
    secret = Path(os.environ[TOKEN_VARIABLE]).read_bytes()
    if not hmac.compare_digest(given, proof(secret, b"task", nonce)):
        return False
    caller.sendall(proof(secret, b"driver", nonce, body.encode()) + b" " + body.encode() + b"\n")
    return True


def proof(secret: bytes, *parts: bytes) -> bytes:
    """Return a proof of knowing the secret; only the last part may hold a space."""
    return hmac.new(secret, b" ".join(parts), "sha256").hexdigest().encode()


def readable(files: Iterable[Any], seconds: float) -> list[Any]:
    """Return those of `files` that can be read from, after at most `seconds` seconds.

    Unlike `select.select` it takes descriptors of any number.
    """
    with selectors.PollSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def resume_ray(ray: int) -> None:
    """Continue those of Ray's own processes that were stopped: all others wait for them.

    The workers are left alone: the driver reports a worker that is stopped.
    """
    with suppress(psutil.Error):  # gone
        above = psutil.Process(ray)
        for process in (above, *(p for child in above.children() for p in _with_agents(child))):
            if process.status() == psutil.STATUS_STOPPED:
                process.resume()


def _with_agents(process: psutil.Process) -> list[psutil.Process]:
    agents = [child for child in process.children() if "Agent" in child.name()]
    return [process, *agents]


def end_everything() -> None:
    """Kill everything below this process and wait for it."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # no child is left, and so nothing below one
            return
        time.sleep(0.01)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
