"""A reverse proxy for HTTP that fails as networks and stores do: for tests of what downloads.

`with FaultProxy("http://127.0.0.1:9000") as proxy` starts a process of its own before a server;
clients use `proxy.url`. `proxy.fail(Fault(...))` adds a fault: the next requests that match it,
`times` of them, meet it; others pass unchanged. `proxy.seen()` lists the requests so far. Each
connection takes one request, which is read whole before it goes on, as is its answer.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import socket
import struct
import subprocess
import sys
import urllib.request

CONTROL = "/-faults"  # no store has a bucket of this name


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to requests.

    Args:
        kind: "status": answered `status`, and not passed on; "lost": passed on, its answer replaced
            by `status`; "reset": the connection is reset after `after` bytes of the answer's body;
            "reset_upload": the same of the request's body; "truncate": closed after `after` bytes;
            "shorten": the same, with a Content-Length that agrees; "flip": a bit of byte `after` of
            the answer's body is another; "delay": passed on after `seconds`; "hide": a LIST does
            not show keys that match `key`.
        matches: a regular expression for "METHOD /path?query"; it is searched.
        times: of how many requests.
        status: the answer's status.
        retry_after: seconds in its Retry-After header; None: it has none.
    """

    kind: str
    matches: str = ""
    times: int = 1
    status: int = 503
    retry_after: int | None = None
    after: int = 0
    seconds: float = 0.0
    key: str = ""


class FaultProxy:
    """A proxy in its own process; see the module."""

    def __init__(self, upstream: str):
        self._upstream = upstream.removeprefix("http://").rstrip("/")

    def __enter__(self):
        command = [sys.executable, __file__, self._upstream]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def fail(self, *faults: Fault) -> None:
        """Add faults, behind those that are left."""
        self._control("POST", json.dumps([dataclasses.asdict(fault) for fault in faults]).encode())

    def heal(self) -> None:
        """Forget the faults that are left."""
        self._control("DELETE")

    def seen(self) -> list[str]:
        """Return the requests so far, each as "METHOD /path?query"."""
        return json.loads(self._control("GET"))

    def _control(self, method, body=None):
        request = urllib.request.Request(self.url + CONTROL, body, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(request, timeout=60).read()


class _Server:
    def __init__(self, upstream):
        host, _, port = upstream.partition(":")
        self.upstream, self.faults, self.requests = (host, int(port or 80)), [], []

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.answer(reader, writer)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async def answer(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ", 2)
        if b"100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(reader, head)
        if path == CONTROL:
            return writer.write(_plain(200, self.control(method, body)))
        self.requests.append(f"{method} {path}")
        fault = self.next_fault(self.requests[-1])
        if fault.kind == "status":
            return writer.write(_plain(fault.status, b"a fault", fault.retry_after))
        await asyncio.sleep(fault.seconds)
        if fault.kind == "reset_upload":
            await self.ask(head, body[: fault.after], partial=True)
            return _reset(writer)
        found, rest = (await self.ask(head, body)).split(b"\r\n\r\n", 1)
        found = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", found) + b"\r\nConnection: close"
        if fault.kind == "lost":
            return writer.write(_plain(fault.status, b"a fault", fault.retry_after))
        if fault.kind == "hide":
            hidden = rf"<Contents>(?:(?!</Contents>).)*<Key>[^<]*{fault.key}.*?</Contents>"
            rest = re.sub(hidden.encode(), b"", rest, flags=re.DOTALL)
        if fault.kind == "flip" and len(rest) > fault.after:
            rest = rest[: fault.after] + bytes([rest[fault.after] ^ 1]) + rest[fault.after + 1 :]
        if fault.kind in ("truncate", "reset", "shorten"):
            rest = rest[: fault.after]
        if fault.kind in ("hide", "shorten"):
            length = b"content-length: %d" % len(rest)
            found = re.sub(rb"(?i)content-length: *\d+", length, found)
        writer.write(found + b"\r\n\r\n" + rest)
        await writer.drain()
        if fault.kind == "reset":
            await asyncio.sleep(0.05)  # a reset drops what was not yet read
            _reset(writer)
        return None

    def control(self, method, body):
        if method == "POST":
            self.faults += [Fault(**fault) for fault in json.loads(body)]
        elif method == "DELETE":
            self.faults.clear()
        return json.dumps(self.requests).encode()

    def next_fault(self, request):
        for place, fault in enumerate(self.faults):
            if re.search(fault.matches, request):
                left = dataclasses.replace(fault, times=fault.times - 1)
                self.faults[place : place + 1] = [left] if left.times else []
                return fault
        return Fault("none")

    async def ask(self, head, body, partial=False):
        reader, writer = await asyncio.open_connection(*self.upstream)
        drop = rb"(?i)\r\n(connection|expect|transfer-encoding|content-length):[^\r]*"
        length = _length(head) if partial else len(body)
        head = re.sub(drop, b"", head[:-4]) + b"\r\nConnection: close"
        writer.write(
            head + (b"\r\nContent-Length: %d" % length if length else b"") + b"\r\n\r\n" + body
        )
        found = b"" if partial else await reader.read()
        writer.close()
        return found


async def _body(reader, head):
    if b"transfer-encoding: chunked" not in head.lower():
        return await reader.readexactly(_length(head))
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(parts)


def _length(head):
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(found[1]) if found else 0


def _plain(status, body, retry_after=None):
    later = f"Retry-After: {retry_after}\r\n" if retry_after is not None else ""
    start = (
        f"HTTP/1.1 {status} Fault\r\nContent-Length: {len(body)}\r\n{later}Connection: close\r\n"
    )
    return start.encode() + b"\r\n" + body


def _reset(writer):
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def _main(upstream):
    server = await asyncio.start_server(_Server(upstream).serve, "127.0.0.1", limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
