"""Repositories of the Hugging Face hub: `hf://org/name[@revision][/path]`, in the hub's own cache.

A revision is resolved to a commit once. The files of a commit are listed there with their hashes,
as huggingface_hub keeps them; a file is there only once it is whole by that list. Files are
transferred here, as that library begins each anew where a process ended, and compares no hash.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

from launcher.base.files import fits_glob, read_json, write_whole
from launcher.base.libraries import lacking

_NAME = re.compile(
    r"hf://(datasets/)?((?!(?:datasets|models|spaces|buckets)/)[\w.-]+/[\w.-]+)"
    r"(?:@(refs/(?:convert/[\w.-]+|pr/\d+)|[^/@]+))?(?:/+((?!.*\.\.).*?))?/*"
)
_COMMIT, _DIGEST = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
# Neither code nor what is unpickled.
_HARMLESS = (
    *(".json", ".jsonl", ".ndjson", ".txt", ".md", ".jinja", ".model"),
    *(".safetensors", ".parquet", ".arrow"),
)
_SMALL = re.compile(
    r"[^/]+\.(json|jinja)|additional_chat_templates/[^/]+\.jinja|merges\.txt|tokenizer\.model"
)
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_FORMAT = 1  # of the list of a commit's files
_MOST_FILES = 50_000  # that the hub lists at once
_TRIES, _WRONG = 5, 3  # that bring nothing, in a row; or other bytes
_DAMAGED = (AttributeError, LookupError, TypeError, ValueError)  # of an answer or a list
_CONNECT_SECONDS, _LIMIT = 1.0, 20.0
_SHORTEST_WAIT, _LONGEST_WAIT = 0.5, 300.0

Fits = Callable[[str], object]  # of a path in the repository: whether it is to be taken
T = TypeVar("T")

_log = logging.getLogger(__name__)


class HubError(Exception):
    """A repository that cannot be had: a clause that follows its name, and what to do about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy


class _UnreachableError(HubError):
    """The hub does not answer, or is not to be asked."""


class HubName(NamedTuple):
    """A name of a repository, or of a part of it.

    Attributes:
        kind: "model" or "dataset".
        repo: `org/name`.
        revision: a branch, a tag or a commit; None: not said.
        below: a folder, a file or a glob in it; "": all of it.
    """

    kind: str
    repo: str
    revision: str | None
    below: str

    @classmethod
    def of(cls, text: str) -> HubName:
        """Return what a text names; raises HubError."""
        found = _NAME.fullmatch(text)
        if found is None or ".." in (revision := unquote(found[3] or "")):
            raise HubError(
                "is not the name of a repository",
                "Write hf://org/name, hf://org/name@revision or hf://datasets/org/name.",
            )
        return cls("dataset" if found[1] else "model", found[2], revision or None, found[4] or "")

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.address}{revision}{'/' if self.below else ''}{self.below}"

    def at(self, revision: str | None) -> HubName:
        """Return the name of another revision."""
        return self._replace(revision=revision)

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit."""
        return _COMMIT.fullmatch(self.revision or "") is not None

    @property
    def address(self) -> str:
        """The repository as the hub's addresses name it."""
        return f"{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"

    @property
    def page(self) -> str:
        """The address of its page."""
        return f"{re.sub('//[^/@]*@', '//', _constants().ENDPOINT)}/{self.address}"

    @property
    def storage(self) -> Path:
        """The repository's folder in the cache."""
        return _cache() / f"{self.kind}s--{self.repo.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The folder of a commit's files."""
        return self.storage / "snapshots" / str(self.revision)

    @property
    def listed(self) -> Path:
        """The list of a commit's files."""
        return self.storage / "trees" / f"{self.revision}.json"


class HubFile(NamedTuple):
    """A file of a commit: its path there, its bytes, and its SHA-256 or Git's hash of it."""

    path: str
    size: int
    digest: str


def is_name(text: object) -> bool:
    """Return whether a text is meant for the name of a repository."""
    return isinstance(text, str) and text.startswith("hf://")


def is_small(path: str) -> bool:
    """Return whether a file of a model's folder is of its settings or its tokenizer."""
    return _SMALL.fullmatch(path) is not None


def is_model(path: str) -> bool:
    """Return whether a file of a model's folder is read of it."""
    return is_small(path) or _WEIGHTS.fullmatch(path) is not None


@functools.cache
def pin(text: str) -> str:
    """Return a name with the commit that its revision is now, whose files are then listed.

    Where the hub does not answer, it is the one that the cache had last. Each is asked for once in
    a process.

    Raises:
        HubError: there is no such repository, revision or file, it may not be read, or it is
            neither in the cache nor to be reached.
    """
    if command := lacking("huggingface_hub"):
        raise HubError("needs the package huggingface_hub", f"Install it: {command}.")
    # Its warnings hold addresses, which may be signed.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    name = HubName.of(text)
    if name.is_pinned:
        _chosen(name, bool)
        return text
    last = name.storage / "refs" / (name.revision or "main")
    try:
        commit = _asked(name, lambda: _found(name))[0]
    except _UnreachableError:
        commit = last.read_text().strip() if last.is_file() else ""
        if not _COMMIT.fullmatch(commit):
            raise
        said = _silence() or "does not answer"
        _log.warning(f"{name}: the hub {said}; the cache had commit {commit} last")
    pinned = name.at(commit)
    _chosen(pinned, bool, text)
    _write(last, commit)
    return str(pinned)


def missing(text: str, fits: Fits) -> list[HubFile]:
    """Return the files that are to be downloaded; raises HubError as `pin`."""
    name = HubName.of(pin(text))
    return [file for file in _chosen(name, fits) if _size(name.snapshot / file.path) != file.size]


def described(text: str, fits: Fits) -> str:
    """Return in words which commit it is, and what of it is still to be downloaded.

    Raises:
        HubError: as `pin`, or what is missing may not be read; anybody may list a gated repository.
    """
    if not (lacks := missing(text, fits)):
        return f"{pin(text)} (in the cache)"
    name = HubName.of(pin(text))
    _asked(name, lambda: _hub().get_hf_file_metadata(_url(name, lacks[0]), timeout=_LIMIT))
    size = sum(file.size for file in lacks) / 2**20
    return f"{pin(text)} ({size:,.1f} MiB to download, files: {len(lacks):,})"


def fetch(
    text: str, fits: Fits, progress: Callable[[int, int], object] = lambda done, total: None
) -> Path:
    """Download what is not in the cache; return the path there that a name stands for.

    Args:
        text: the name.
        fits: which of its files to take.
        progress: takes the bytes that are done, and those of all that is missing.

    Raises:
        HubError: as `pin`, or a file arrives damaged, or the cache cannot be written.
    """
    name, lacks = HubName.of(pin(text)), missing(text, fits)
    done, total = 0, sum(file.size for file in lacks)

    def so_far(held: int) -> None:
        progress(done + held, total)

    try:
        for file in lacks:
            _take(name, file, so_far)
            done += file.size
    except OSError as error:
        raise HubError(
            f"cannot be put into the cache {_cache()} ({error.strerror})",
            "Set HF_HUB_CACHE to a folder that you may write, where there is space.",
        ) from None
    return name.snapshot / name.below


def _chosen(name: HubName, fits: Fits, said: str = "") -> list[HubFile]:
    """Return the files of a name; raises HubError where there is none.

    Those of a folder are to fit, by their paths in it. A hint has the name as it was typed.
    """
    files, folder = _files(name), f"{name.below}/" if name.below else ""
    inside = {path[len(folder) :]: file for path, file in files.items() if path.startswith(folder)}
    found = [path for path in inside if fits(path)]
    if not inside:
        inside = {path: file for path, file in files.items() if fits_glob(path, name.below)}
        found = list(inside)
    if not inside:
        folders = {str(above) for path in files for above in PurePosixPath(path).parents}
        near = difflib.get_close_matches(name.below, {*files, *folders}, n=1)
        begin = (said or str(name)).rstrip("/").removesuffix(name.below)
        hint = f"Did you mean {begin}{near[0]}?" if near else f"Look at {name.page}."
        raise HubError("has no such file or folder", hint)
    found = [path for path in found if path.lower().endswith(_HARMLESS)]
    if not found or (fits is is_model and all(map(is_small, found))):
        _forget(name)
        kinds = sorted({PurePosixPath(path).suffix or path for path in inside})
        wanted = "model.safetensors" if fits is is_model else "file that is read here"
        raise HubError(
            f"holds no {wanted}, but {', '.join(kinds[:8])}",
            f"Code and pickled files are never taken. Open {name.page} for another revision or "
            "folder, of many datasets @refs/convert/parquet.",
        )
    return [inside[path] for path in found]


def _files(name: HubName) -> dict[str, HubFile]:
    """Return the files of a commit, by their paths."""
    with suppress(OSError, *_DAMAGED):
        kept = read_json(name.listed)
        if kept["format_version"] == _FORMAT:
            return _listed(kept["files"])
    return _asked(name, lambda: _found(name))[1]


def _listed(tree: Any) -> dict[str, HubFile]:
    """Return the files of a list; raises ValueError for one that no repository has."""
    files = {}
    for path, one in tree.items():
        file = HubFile(path, int(one["size"]), one.get("lfs_sha256") or one["blob_id"])
        if path.startswith("/") or ".." in path.split("/") or not _DIGEST.fullmatch(file.digest):
            raise ValueError(f"{path!r} of {file.digest!r} is no file")
        files[path] = file
    return files


def _found(name: HubName) -> tuple[str, dict[str, HubFile]]:
    """Return the commit of a revision and its files, after noting those in the cache.

    They are noted in the form of huggingface_hub's `trees/`.
    """
    ask = _hub().HfApi().repo_info
    found = ask(
        name.repo, repo_type=name.kind, revision=name.revision, files_metadata=True, timeout=_LIMIT
    )
    tree = {
        one.rfilename: {
            "size": one.size,
            "blob_id": one.blob_id,
            **({"lfs_sha256": one.lfs.sha256, "lfs_size": one.size} if one.lfs else {}),
        }
        for one in found.siblings
    }
    files, pinned = _listed(tree), name.at(found.sha)
    if not pinned.is_pinned:
        raise ValueError(f"{found.sha!r} is no commit")
    if len(files) >= _MOST_FILES:
        raise HubError("has too many files to be listed", f"Download a part of {name.page}.")
    _write(pinned.listed, json.dumps({"format_version": _FORMAT, "files": tree}))
    return found.sha, files


def _take(name: HubName, file: HubFile, progress: Callable[[int], object]) -> None:
    """Put a file into the cache, whole or not at all; of several processes one downloads it."""
    blob, link = name.storage / "blobs" / file.digest, name.snapshot / file.path
    lock = _cache() / ".locks" / name.storage.name / f"{file.digest}.lock"
    for folder in (blob.parent, lock.parent, link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with _hub().utils.WeakFileLock(lock):
        if _size(blob) != file.size:
            partial = blob.with_name(f"{blob.name}.launcher-part")
            _download(name, file, partial, progress)
            os.replace(partial, blob)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


def _download(
    name: HubName, file: HubFile, partial: Path, progress: Callable[[int], object]
) -> None:
    """Write the rest of a file, until it is whole by its hash."""
    for _ in range(_WRONG):
        partial.touch()
        while partial.stat().st_size < file.size:
            _asked(name, lambda: _append(name, file, partial, progress))
        if _has_hash(partial, file.digest):
            return
        partial.unlink()
        _log.warning(f"{name}: {file.path} arrived damaged, and is downloaded again")
    _forget(name)
    why = f"sends {file.path} with other bytes than it lists"
    raise HubError(why, "Try again; a proxy on the way may be at fault.")


def _append(name: HubName, file: HubFile, partial: Path, progress: Callable[[int], object]) -> None:
    """Write a file's next bytes, as many as come; raises an error of the hub where none does."""
    url, session = _url(name, file), _hub().utils.get_session()
    with open(partial, "ab") as output:
        begin = output.tell()
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={begin}-"}
        headers |= _hub().utils.build_hf_headers()
        try:
            with session.stream("GET", url, headers=headers, timeout=_LIMIT) as response:
                _hub().utils.hf_raise_for_status(response)
                if response.status_code != 206:
                    begin = output.seek(output.truncate(0))
                for chunk in response.iter_bytes():
                    output.write(chunk)
                    progress(output.tell())
        except _hub().errors.HTTPError:
            if output.tell() == begin:
                raise
            time.sleep(_SHORTEST_WAIT)
        else:
            if output.tell() == begin:
                raise ValueError("no byte came")


def _url(name: HubName, file: HubFile) -> str:
    return f"{_constants().ENDPOINT}/{name.address}/resolve/{name.revision}/{quote(file.path)}"


def _has_hash(file: Path, digest: str) -> bool:
    """Return whether a file has a SHA-256, or Git's hash of a file, and is on the disk."""
    found = hashlib.sha256()
    if len(digest) == 40:
        found = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
    with open(file, "rb") as content:
        os.fsync(content.fileno())
        return hashlib.file_digest(content, lambda: found).hexdigest() == digest


def _size(file: Path) -> int:
    """Return the bytes of a file; -1: it is not there."""
    with suppress(OSError):
        return file.stat().st_size
    return -1


def _write(file: Path, content: str) -> None:
    with suppress(OSError):  # a cache that others keep
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)


def _forget(name: HubName) -> None:
    """Have the list of a commit's files made anew: it may have been damaged on its way."""
    if not _silence():
        with suppress(OSError):
            name.listed.unlink(missing_ok=True)


def _asked(name: HubName, ask: Callable[[], T]) -> T:
    """Return the hub's answer, asked for again where that may help; raises HubError."""
    said = _silence()
    for tries in range(0 if said else _TRIES):
        try:
            return ask()
        except _hub().errors.HFValidationError as error:
            raise HubError("is not the name of a repository", f"{error}") from None
        except (_hub().errors.HTTPError, *_DAMAGED) as error:
            response = getattr(error, "response", None)
            status = getattr(response, "status_code", None)
            if status is not None and status not in (408, 429) and status < 500:
                raise _refusal(name, error, status) from None
            said = f"answers {status}" if status else f"does not answer ({type(error).__name__})"
            later = response.headers.get("Retry-After", "") if response is not None else ""
        if tries < _TRIES - 1:
            wait = float(later) if later.isdigit() else _SHORTEST_WAIT * 2**tries
            wait = min(wait, _LONGEST_WAIT)
            _log.info(f"{name}: the hub {said}; it is asked again in {wait:g} s")
            time.sleep(wait)
    raise _UnreachableError(
        f"is not in the cache {_cache()}, or not whole, and the hub {said}",
        "Try again, download it where there is a network (task=plan does), or set HF_HUB_CACHE to "
        "a cache that holds it.",
    )


@functools.cache
def _silence() -> str:
    """Return why the hub is not asked; "": it is.

    No connection takes long to fail where name servers or routers drop what they are sent.
    """
    if _constants().HF_HUB_OFFLINE:
        return "is not to be asked (HF_HUB_OFFLINE)"
    from urllib.request import getproxies, proxy_bypass  # here: it is seldom needed

    said = [f"does not answer in {_CONNECT_SECONDS:g} s"]

    def connect() -> None:
        try:
            url, proxies = urlsplit(_constants().ENDPOINT), getproxies()
            proxy = proxies.get(url.scheme) or proxies.get("all")
            if proxy and not proxy_bypass(url.hostname or ""):
                url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            place = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection(place, _LIMIT).close()
            said.append("")
        except (OSError, ValueError) as error:  # HF_ENDPOINT may be no address
            said.append(f"does not answer ({error})")

    looking = threading.Thread(target=connect, daemon=True)
    looking.start()
    looking.join(_CONNECT_SECONDS)
    return said[-1]


def _refusal(name: HubName, error: Exception, status: int) -> HubError:
    """Return the error of an answer that will not change; addresses, maybe signed, stay out."""
    token = "set HF_TOKEN to a token that may read it"
    if _hub().utils.get_token():
        token = f"the token in use may not read it: {token}"
    if isinstance(error, _hub().errors.GatedRepoError):
        return HubError("is gated", f"Open {name.page} and accept its conditions; then {token}.")
    if isinstance(error, _hub().errors.RevisionNotFoundError):
        return HubError(f"has no revision {name.revision}", f"Look at {name.page}/tree/main.")
    if isinstance(error, _hub().errors.RepositoryNotFoundError) or status == 404:
        other = f"; of a dataset, write hf://datasets/{name.repo}" if name.kind == "model" else ""
        where = f"Open {name.page}; if it is private, {token}{other}."
        return HubError("is not there, or is private", where)
    return HubError(f"may not be read: the hub answers {status}", f"Open {name.page}; {token}.")


def _cache() -> Path:
    return Path(_constants().HF_HUB_CACHE).expanduser()


def _constants() -> Any:
    from huggingface_hub import constants  # at once; what asks the hub takes half a second

    return constants


def _hub() -> Any:
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub
