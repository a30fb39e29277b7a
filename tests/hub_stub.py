"""The Hugging Face hub as far as downloads ask it, in a process of its own on 127.0.0.1.

Repositories are folders below `root`, which tests change while it runs:
`<models|datasets>/<org>/<name>/<commit>/…`, beside `repo.json` with its refs and who may read it.
"""

import contextlib
import hashlib
import json
import re
import subprocess
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_secret0123456789"  # the only one that opens what is closed
SIGNATURE = "signed0123456789"  # of the addresses that files are redirected to
LARGE = (".safetensors", ".parquet", ".bin")
_PATHS = re.compile(
    r"/(?:api/)?(models/|datasets/|)([\w.-]+/[\w.-]+)"
    r"(?:/(revision|resolve)(?:/([^/]+)(?:/(.*))?)?)?"
)


class HubStub:
    """The stub, serving what `add` makes below `root`."""

    def __init__(self, root: Path):
        self.root = root

    def __enter__(self):
        command = [sys.executable, __file__, str(self.root)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *exception):
        self.stop()
        self._process.stdout.close()

    def stop(self):
        self._process.kill()
        self._process.wait()

    def add(self, repo, files, kind="models", ref="main", **flags) -> str:
        """Add a commit, by the contents of its files, and let a ref point to it; return it."""
        home = self.root / kind / repo
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        for name, content in files.items():
            path = home / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        known = (
            json.loads((home / "repo.json").read_text()) if (home / "repo.json").exists() else {}
        )
        known = {"refs": {}, "closed": ""} | known | flags
        known["refs"][ref] = commit
        (home / "repo.json").write_text(json.dumps(known))
        return commit

    def seen(self) -> list[str]:
        """Return the requests so far, each as "METHOD /path range authorization"."""
        with contextlib.suppress(FileNotFoundError):
            return (self.root / "requests.log").read_text().splitlines()
        return []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self):
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        said = f"{self.command} {self.path} {self.headers.get('Range', '-')} {token or '-'}\n"
        with open(self.root / "requests.log", "a") as log:
            log.write(said)
        path, _, query = self.path.partition("?")
        if path.startswith("/cdn/"):
            if SIGNATURE not in query:
                return self.answer(403, b"unsigned")
            return self.send(Path(urllib.parse.unquote(path.removeprefix("/cdn"))))
        found = _PATHS.fullmatch(path)
        home = self.root / (found[1].rstrip("/") or "models") / found[2] if found else self.root
        if not (home / "repo.json").exists():
            return self.answer(401 if not token else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        repo = json.loads((home / "repo.json").read_text())
        what, revision = found[3], urllib.parse.unquote(found[4] or "main")
        if repo["closed"] and token != TOKEN and (what == "resolve" or repo["closed"] == "private"):
            code = {"private": "RepoNotFound", "gated": "GatedRepo"}.get(repo["closed"])
            headers = {"X-Error-Code": code} if code else {}
            return self.answer(403 if token else 401, b"no: " + token.encode(), headers)
        commit = repo["refs"].get(revision, revision)
        if not (home / commit).is_dir():
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if what != "resolve":
            about = {"id": found[2], "sha": commit, "siblings": siblings(home / commit)}
            return self.answer(200, json.dumps(about).encode())
        file = home / commit / urllib.parse.unquote(found[5])
        if not file.is_file():
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest_of(file)}"'}
        if file.suffix in LARGE:
            where = f"/cdn{urllib.parse.quote(str(file))}?Signature={SIGNATURE}"
            linked = {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(file.stat().st_size)}
            return self.answer(302, b"", headers | linked | {"Location": where})
        return self.send(file, headers)

    do_HEAD = do_GET

    def send(self, file, headers=None):
        content, wanted = file.read_bytes(), self.headers.get("Range")
        if not wanted:
            return self.answer(200, content, headers)
        begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        if begin >= len(content):
            return self.answer(416, b"")
        span = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        return self.answer(206, content[begin:], (headers or {}) | span)

    def answer(self, status, content, headers=None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content)

    def log_message(self, *said):
        pass


def siblings(home):
    """Return the files of a commit, as the hub lists them."""
    found = []
    for file in sorted(file for file in home.rglob("*") if file.is_file()):
        name, size = file.relative_to(home).as_posix(), file.stat().st_size
        found.append({"rfilename": name, "size": size, "blobId": git_hash(file)})
        if file.suffix in LARGE:
            found[-1]["lfs"] = {"sha256": digest_of(file), "size": size, "pointerSize": 134}
    return found


def git_hash(file):
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def digest_of(file):
    """Return the hash of a file's ETag."""
    if file.suffix in LARGE:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return git_hash(file)


if __name__ == "__main__":
    _Handler.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
