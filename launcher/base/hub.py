"""Repositories of the Hugging Face hub: `hf://org/name[@revision][/path]`, in the hub's own cache.

A revision is resolved to a commit once. The files of a commit are listed there with their hashes,
as huggingface_hub keeps them; a file is there only once it is whole by that list. That library asks
for addresses and tokens; files are transferred here, as it begins each anew where a process ended,
and compares no hash.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from launcher.base.files import read_json, write_whole
from launcher.base.libraries import lacking

_NAME = re.compile(
    r"hf://(datasets/|models/)?((?!(?:datasets|models|spaces|buckets)/)[\w.-]+/[\w.-]+)"
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
_CHUNK = 2**20
_TRIES, _WRONG = 5, 3  # that bring nothing, in a row; or other bytes
_DAMAGED = (AttributeError, LookupError, TypeError, ValueError)  # of an answer or a list
_CONNECT_SECONDS, _ANSWER_SECONDS, _LONGEST_WAIT = 1.5, 10.0, 300.0

Fits = Callable[[str], object]  # of a path in the repository: whether it is to be taken
T = TypeVar("T")

_log = logging.getLogger(__name__)
_kept: set[str] = set()  # names that have the commit which the cache had last


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
        below: a folder or, of a dataset, a file or a glob in it; "": all of it.
    """

    kind: str
    repo: str
    revision: str | None
    below: str

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{kind}{self.repo}{revision}{'/' if self.below else ''}{self.below}"

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit."""
        return _COMMIT.fullmatch(self.revision or "") is not None

    @property
    def storage(self) -> Path:
        """The repository's folder in the cache."""
        cache = Path(_constants().HF_HUB_CACHE).expanduser()
        return cache / f"{self.kind}s--{self.repo.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The folder of a commit's files."""
        return self.storage / "snapshots" / str(self.revision)

    @property
    def page(self) -> str:
        """The address of its page."""
        endpoint = re.sub(r"//[^/@]*@", "//", _constants().ENDPOINT)
        return f"{endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


class HubFile(NamedTuple):
    """A file of a commit: its path there, its bytes, and its SHA-256 or Git's hash of it."""

    path: str
    size: int
    digest: str


def is_small(path: str) -> bool:
    """Return whether a file of a model's folder is of its settings or its tokenizer."""
    return _SMALL.fullmatch(path) is not None


def is_model(path: str) -> bool:
    """Return whether a file of a model's folder is read of it."""
    return is_small(path) or _WEIGHTS.fullmatch(path) is not None


def is_hub(text: object) -> bool:
    """Return whether a text is meant for the name of a repository."""
    return isinstance(text, str) and text.startswith("hf://")


def hub_name(text: str) -> HubName:
    """Return what a text names; raises HubError."""
    if (found := _NAME.fullmatch(text)) is None:
        raise HubError(
            "is not the name of a repository",
            "Write hf://org/name, hf://org/name@revision or hf://datasets/org/name.",
        )
    kind = "dataset" if found[1] == "datasets/" else "model"
    return HubName(kind, found[2], found[3], found[4] or "")


def pin(text: str) -> str:
    """Return a name with the commit that its revision is now, whose files are then listed.

    Where the hub does not answer, it is the one that the cache had last. Each is asked for once in
    a process.

    Raises:
        HubError: there is no such repository, revision or file, it may not be read, or it is
            neither in the cache nor to be reached.
    """
    found = _pinned(text)
    if isinstance(found, HubError):
        raise found
    return found


def missing(text: str, fits: Fits) -> list[HubFile]:
    """Return the files that are to be downloaded; raises HubError as `pin`."""
    name = hub_name(pin(text))
    return [file for file in _chosen(name, fits) if not _is_held(name, file)]


def fetch(text: str, fits: Fits, progress: Callable[[int, int], object] | None = None) -> Path:
    """Download what is not in the cache; return the path there that a name stands for.

    Args:
        text: the name.
        fits: which of its files to take.
        progress: takes the bytes that are done, and those of all that is missing.

    Raises:
        HubError: as `pin`, or a file arrives damaged.
        OSError: the cache cannot be written.
    """
    name, lacks = hub_name(pin(text)), missing(text, fits)
    done, total = 0, sum(file.size for file in lacks)
    for file in lacks:
        try:
            for held in _taken(name, file):
                if progress is not None:
                    progress(done + held, total)
        except HubError as error:
            if not isinstance(error, _UnreachableError):
                _list_file(name).unlink(missing_ok=True)  # it may be the list that is wrong
            raise
        done += file.size
    return name.snapshot / name.below


def described(text: str, fits: Fits) -> str:
    """Return in words which commit it is, and what is there or is still to be downloaded."""
    name, lacks = pin(text), missing(text, fits)
    if lacks:
        return f"{name}, to be downloaded: {size_text(lacks)}"
    return f"{name}, in the cache{'; the hub does not answer' if name in _kept else ''}"


def size_text(files: list[HubFile]) -> str:
    """Return the number of files and their size in words."""
    size = sum(file.size for file in files)
    return f"{len(files):,} file{'s' if len(files) > 1 else ''} of {size / 1e6:,.1f} MB"


def fits_glob(path: str, pattern: str) -> bool:
    """Return whether a path fits a glob, as one on a disk; `**` stands for folders at any depth."""
    return _fit(path.split("/"), pattern.split("/"))


def _fit(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns or not parts:
        return not parts and all(pattern == "**" for pattern in patterns)
    first, *others = patterns
    if first == "**":
        is_shown = not parts[0].startswith(".")
        return _fit(parts, others) or (is_shown and _fit(parts[1:], patterns))
    is_shown = parts[0].startswith(".") == first.startswith(".")
    return is_shown and fnmatchcase(parts[0], first) and _fit(parts[1:], others)


@functools.cache
def _pinned(text: str) -> str | HubError:
    try:
        if command := lacking("huggingface_hub"):
            raise HubError("needs the package huggingface_hub", f"Install it: {command}.")
        # Its warnings hold addresses, which may be signed.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        name = hub_name(text)
        pinned = name if name.is_pinned else name._replace(revision=_commit(name))
        _chosen(pinned, bool)
        if not name.is_pinned and str(pinned) not in _kept:
            _write(_ref(name), str(pinned.revision))
        return str(pinned)
    except HubError as error:
        return error


def _commit(name: HubName) -> str:
    """Return the commit of a revision."""
    try:
        return _asked(name, lambda: _COMMIT.fullmatch(_info(name)["sha"])[0])  # type: ignore[index]
    except _UnreachableError:
        with suppress(OSError, UnicodeError):
            if _COMMIT.fullmatch(commit := _ref(name).read_text().strip()):
                _kept.add(str(name._replace(revision=commit)))
                return commit
        raise


def _info(name: HubName) -> Any:
    revision = f"/revision/{quote(name.revision, safe='')}" if name.revision else ""
    return _answer(f"{name.repo}{revision}", name.kind)[0]


def _answer(path: str, kind: str) -> tuple[Any, str | None]:
    """Return what the hub's API says, and the address of the next page."""
    url = path if "://" in path else f"{_constants().ENDPOINT}/api/{kind}s/{path}"
    found = _hub().utils.get_session().get(url, **_asking())
    _hub().utils.hf_raise_for_status(found)
    return found.json(), found.links.get("next", {}).get("url")


def _files(name: HubName) -> dict[str, HubFile]:
    """Return the files of a commit, by their paths."""
    noted = _list_file(name)
    with suppress(OSError, *_DAMAGED):
        kept = read_json(noted)
        if kept["format_version"] == _FORMAT:
            return dict(_entries(kept["files"]))
    tree = _asked(name, lambda: _listed(name))
    _write(noted, json.dumps({"format_version": _FORMAT, "files": tree}))
    return dict(_entries(tree))


def _entries(tree: Any) -> Iterator[tuple[str, HubFile]]:
    """Yield the files of a list; raises ValueError for one that no repository has."""
    for path, one in tree.items():
        file = HubFile(path, int(one["size"]), one.get("lfs_sha256") or one["blob_id"])
        if path.startswith("/") or ".." in path or not _DIGEST.fullmatch(file.digest):
            raise ValueError(f"{path!r} of {file.digest!r} is no file")
        yield path, file


def _listed(name: HubName) -> dict[str, dict[str, Any]]:
    """Return the list of a commit's files in the form of huggingface_hub's `trees/`."""
    found = {}
    page: str | None = f"{name.repo}/tree/{name.revision}?recursive=true"
    while page:
        entries, page = _answer(page, name.kind)
        for one in (one for one in entries if one["type"] == "file"):
            found[one["path"]] = {"size": one["size"], "blob_id": one["oid"]}
            if lfs := one.get("lfs"):
                found[one["path"]] |= {"lfs_sha256": lfs["oid"], "lfs_size": lfs["size"]}
    dict(_entries(found))
    return found


def _ref(name: HubName) -> Path:
    """Return the file of the commit that a revision had last."""
    return name.storage / "refs" / (name.revision or "main")


def _list_file(name: HubName) -> Path:
    return name.storage / "trees" / f"{name.revision}.json"


def _write(file: Path, content: str) -> None:
    with suppress(OSError):  # a cache that others keep
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)


def _chosen(name: HubName, fits: Fits) -> list[HubFile]:
    """Return the files of a name; raises HubError where there is none.

    Those of a folder are to fit, by their paths in it.
    """
    files, below = _files(name), name.below
    inside = [path for path in files if path.startswith(f"{below}/" if below else "")]
    if name.kind == "dataset" and not inside:
        inside = [path for path in files if path == below or fits_glob(path, below)]
    if not inside:
        folders = {str(above) for path in files for above in PurePosixPath(path).parents}
        near = difflib.get_close_matches(below, {*files, *folders}, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Look at {name.page}."
        raise HubError(f"has no {'such file' if name.kind == 'dataset' else 'such folder'}", hint)
    at, whole = len(below) + bool(below), inside[0].startswith(f"{below}/" if below else "")
    found = [path for path in inside if not whole or fits(path[at:])]
    found = [path for path in found if path.lower().endswith(_HARMLESS)]
    if not found or (fits is is_model and all(is_small(path[at:]) for path in found)):
        _list_file(name).unlink(missing_ok=True)  # it may have been damaged on its way
        kinds = sorted({PurePosixPath(path).suffix or path for path in inside})
        wanted = "model.safetensors" if fits is is_model else "file that is read here"
        raise HubError(
            f"holds no {wanted}, but {', '.join(kinds[:8])}",
            "Code and pickled files are never taken. Name another revision or folder: of many "
            f"datasets, @refs/convert/parquet; {name.page} shows them.",
        )
    return [files[path] for path in found]


def _is_held(name: HubName, file: HubFile) -> bool:
    with suppress(OSError):
        return (name.snapshot / file.path).stat().st_size == file.size
    return False


def _taken(name: HubName, file: HubFile) -> Iterator[int]:
    """Put a file into the cache, whole or not at all; of several processes one downloads it.

    Yields how many of its bytes are here.
    """
    from filelock import FileLock

    blob = name.storage / "blobs" / file.digest
    partial = blob.with_name(f"{blob.name}.launcher-part")
    lock = name.storage.parent / ".locks" / name.storage.name / f"{blob.name}.lock"
    link = name.snapshot / file.path
    for folder in (blob.parent, lock.parent, link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        damaged = 0
        while not (blob.is_file() and blob.stat().st_size == file.size):
            yield from _transferred(name, file, partial)
            if _has_hash(partial, file.digest):
                os.replace(partial, blob)
                break
            partial.unlink()
            if (damaged := damaged + 1) == _WRONG:
                why = f"sends {file.path} with other bytes than it lists"
                raise HubError(why, "Try again; if it goes on, a proxy on the way is at fault.")
            _log.warning(f"{name}: {file.path} arrived damaged, and is downloaded again")
        made = link.with_name(f".{link.name}.{os.getpid()}")
        made.unlink(missing_ok=True)
        made.symlink_to(os.path.relpath(blob, link.parent))
        os.replace(made, link)


def _transferred(name: HubName, file: HubFile, partial: Path) -> Iterator[int]:
    """Write a file's bytes behind those that are there, until all are; yield how many are."""
    kind = "datasets/" if name.kind == "dataset" else ""
    place = f"{kind}{name.repo}/resolve/{name.revision}/{quote(file.path)}"
    url = f"{_constants().ENDPOINT}/{place}"
    _refuse_offline(name)
    tries, error, reached = 0, None, False
    with open(partial, "ab") as output:
        while (begin := output.seek(0, os.SEEK_END)) < file.size:
            try:
                for chunk in _chunks(url, begin):
                    reached = True
                    if chunk is None:
                        output.seek(output.truncate(0))
                    else:
                        output.write(chunk)
                        yield output.tell()
            except Exception as raised:
                error = raised
            output.flush()
            tries = 0 if output.tell() > begin else tries + 1
            if output.tell() < file.size:
                _pause(name, error, tries, reached)
        os.fsync(output.fileno())


def _chunks(url: str, begin: int) -> Iterator[bytes | None]:
    """Yield a file's bytes from one on; None before all of them."""
    part = {"Range": f"bytes={begin}-"} if begin else {}
    with _hub().utils.get_session().stream("GET", url, **_asking(**part)) as response:
        _hub().utils.hf_raise_for_status(response)
        if response.status_code != 206:
            yield None
        yield from response.iter_bytes()


def _has_hash(file: Path, digest: str) -> bool:
    """Return whether a file has a SHA-256, or Git's hash of a file."""
    found = hashlib.sha256()
    if len(digest) == 40:
        found = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
    with open(file, "rb") as content:
        while chunk := content.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest() == digest


def _asked(name: HubName, ask: Callable[[], T]) -> T:
    """Return the hub's answer, asked for again where that may help; raises HubError."""
    _refuse_offline(name)
    for tries in range(1, _TRIES + 1):
        try:
            return ask()
        except Exception as error:
            _pause(name, error, tries, tries > 1)
    raise AssertionError("the last pause raises")


def _pause(name: HubName, error: Exception | None, tries: int, reached: bool) -> None:
    """Wait before the hub is asked again; raises HubError where that is of no use.

    Args:
        name: what it is asked for.
        error: the problem; None: the answer ended too early.
        tries: how many answers in a row were of no use.
        reached: whether it has answered before.
    """
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    known = (_hub().errors.HTTPError, ConnectionError, *_DAMAGED)
    if error is not None and not isinstance(error, known):
        raise error
    if status is not None and status not in (408, 429) and status < 500:
        raise _refusal(name, error, status) from None
    is_away = type(error).__name__.startswith("Connect") or isinstance(error, ConnectionError)
    if tries >= _TRIES or (is_away and not reached):
        said = f"answers {status}" if status else f"does not answer ({type(error).__name__})"
        raise _away(name, said) from None
    later = response.headers.get("Retry-After", "") if response is not None else ""
    time.sleep(min(float(later), _LONGEST_WAIT) if later.isdigit() else 0.25 * 2**tries)


def _refuse_offline(name: HubName) -> None:
    if _constants().HF_HUB_OFFLINE:
        raise _away(name, "is not to be asked (HF_HUB_OFFLINE)")


def _away(name: HubName, said: str) -> _UnreachableError:
    return _UnreachableError(
        f"is not in the cache {name.storage.parent}, or not whole, and the hub {said}",
        "Download it where there is a network, such as by task=plan there, or set HF_HUB_CACHE "
        "to a cache that holds it.",
    )


def _refusal(name: HubName, error: Any, status: int) -> HubError:
    """Return the error of an answer that will not change; addresses, maybe signed, stay out."""
    token = "set HF_TOKEN to a token that may read it"
    if _hub().utils.get_token():
        token = f"the token in use may not read it: {token}"
    if isinstance(error, _hub().errors.GatedRepoError):
        return HubError("is gated", f"Open {name.page} and accept its conditions; then {token}.")
    if isinstance(error, _hub().errors.RevisionNotFoundError):
        return HubError(f"has no revision {name.revision}", _near_revision(name))
    if isinstance(error, _hub().errors.RepositoryNotFoundError) or status == 404:
        where = f"{_other_kind(name)}Open {name.page}; if it is private, {token}."
        return HubError("is not there, or is private", where)
    if status in (401, 403):
        return HubError("may not be read", f"Open {name.page}; {token}.")
    return HubError(f"is refused by the hub, which answers {status}", f"Open {name.page}.")


def _near_revision(name: HubName) -> str:
    with suppress(Exception):  # it serves the message alone
        refs = _answer(f"{name.repo}/refs", name.kind)[0]
        names = [one["name"] for kind in ("branches", "tags") for one in refs[kind]]
        near = difflib.get_close_matches(name.revision or "", names, n=1)
        return f"Did you mean {near[0]}?" if near else f"It has {', '.join(names[:8])}."
    return f"Look at {name.page}/tree/main."


def _other_kind(name: HubName) -> str:
    other = name._replace(kind="dataset" if name.kind == "model" else "model", revision=None)
    with suppress(Exception):  # it serves the message alone
        _info(other)
        return f"There is a {other.kind} {other}. "
    return ""


def _constants() -> Any:
    from huggingface_hub import constants  # at once; what asks the hub takes half a second

    return constants


def _hub() -> Any:
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def _asking(**headers: str) -> dict[str, Any]:
    """Return the headers of a request and its limits in seconds.

    Where there is no network, that is known soon. The library's own headers take a request first.
    """
    if token := _hub().utils.get_token():
        headers["Authorization"] = f"Bearer {token}"
    timeout = type(_hub().utils.get_session().timeout)(_ANSWER_SECONDS, connect=_CONNECT_SECONDS)
    # A connection that is kept may be closed by the time it is used again.
    headers |= {"Accept-Encoding": "identity", "Connection": "close"}
    return {"headers": headers, "timeout": timeout}
