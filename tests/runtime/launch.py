"""Starting a script in several processes that find one another, for tests."""

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def free_coordinator():
    """An address of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def together(script, count, *arguments, given="", timeout=300):
    """Run `script INDEX COUNT COORDINATOR *arguments` in `count` processes, each given the same
    input; the last line that each printed."""
    coordinator = free_coordinator()
    peers = [
        subprocess.Popen(
            [sys.executable, HERE / script, str(i), str(count), coordinator, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for i in range(count)
    ]
    try:
        for peer in peers:
            peer.stdin.write(given)
            peer.stdin.close()
            peer.stdin = None
        told = [peer.communicate(timeout=timeout) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
    for peer, (_, errors) in zip(peers, told, strict=True):
        assert peer.returncode == 0, errors[-3000:]
    return [out.splitlines()[-1] for out, _ in told]
