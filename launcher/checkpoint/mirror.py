"""The copy of a run's checkpoints in an object store: `run.mirror`.

    owner.json               the run that the prefix belongs to; made once
    checkpoints/<step>/…     a checkpoint's files as on the disk, its checksums.json last
    run/<number>/…           the run's own files when it was copied: metrics, plan, settings, …
    commits/<number>         made once, when all of these are there: from then on it counts
    latest-0, latest-1       the commits there are; written in turn, after the newest
    pending                  the names that an upload or a deletion under way may leave behind

Commits are numbered from 1 on. A reader takes the higher number of the two lists and asks for the
next numbers until there is none: a list that is late, damaged or was never written hides nothing.
It never asks the store which objects there are. What a commit says is checked by checksums, of
itself, of checksums.json and so of every file. Only one process writes, and one that comes later
makes the next commit, which the earlier one then cannot make.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.base import (
    ChangedError,
    DamagedError,
    NotFoundError,
    Store,
    StoreError,
    parse_json,
    sync_folder,
    write_whole,
)
from launcher.base.reading import read
from launcher.checkpoint.layout import (
    BEST,
    CHECKSUMS,
    damage,
    files_below,
    partial_path,
    stays,
    steps_in,
)

Count = Callable[[int], None]  # takes the bytes that were copied since its last call
_THREADS = 4
_TRIES = 2  # of an object that arrives damaged
_CHECKPOINTS = "checkpoints"
_KEPT = ("config.yaml", "plan.json", "metrics.jsonl", f"{_CHECKPOINTS}/{BEST}")
_KEPT_FOLDER = "autotune"  # the kernels that XLA chose: without them the last bits may differ


class SupersededError(StoreError):
    """Another process has made the commit that was to be made."""


@dataclass(frozen=True)
class RunIdentity:
    """The run that a prefix belongs to.

    Attributes:
        run_id: the run's id.
        identity: drawn when the run first used its mirror; tells runs of one id apart.
    """

    run_id: str
    identity: str


@dataclass(frozen=True)
class Commit:
    """A complete copy of a checkpoint.

    Attributes:
        number: its number; the newest has the highest.
        step: the checkpoint's step.
        manifest: the SHA-256 of its checksums.json.
        size: the bytes of its files.
        stays: whether it is kept whatever `keep` is.
        files: the SHA-256 of each of the run's own files, by its path.
    """

    number: int
    step: int
    manifest: str
    size: int
    stays: bool
    files: Mapping[str, str]


class Mirror:
    """The objects of one run; every method raises StoreError."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._next = 1  # the number of the next commit, once `commits` was called

    def owner(self) -> RunIdentity | None:
        """Return the run that the prefix belongs to; None if it is nobody's."""
        try:
            tree = self._read("owner.json")
            return read(RunIdentity, tree) if tree else None
        except DamagedError:
            raise StoreError(f"{self.store.url}/owner.json is damaged") from None

    def own(self, owner: RunIdentity) -> bool:
        """Return whether the prefix belongs to `owner`, from now on if it was nobody's."""
        data = _sealed(asdict(owner))
        return self.store.put_if_absent("owner.json", data) or self.owner() == owner

    def commits(self) -> list[Commit]:
        """Return the commits that can be read, newest first.

        Raises:
            StoreError: there are some, and none can be read.
        """
        listed, damaged = {}, ""
        for name in ("latest-0", "latest-1"):
            try:
                tree = self._read(name) or {"number": 0, "live": []}
                listed[tree["number"]] = {one["number"]: read(Commit, one) for one in tree["live"]}
            except (DamagedError, KeyError, TypeError):
                damaged = f"{self.store.url}/{name} is damaged"
        newest = max(listed, default=0)
        found: dict[int, Commit | None] = {**listed.get(newest, {})}
        self._next = newest + 1
        while self._exists(self._next):
            found[self._next] = self._commit(self._next)
            self._next += 1
        readable = [one for _, one in sorted(found.items(), reverse=True) if one]
        if (damaged or found) and not readable:  # not as if nothing had ever been copied
            raise StoreError(damaged or f"{self.store.url}/commits holds damaged ones alone")
        return readable

    def upload(self, home: Path, step: int, keep: int, count: Count = lambda size: None) -> None:
        """Copy the checkpoint `home/checkpoints/<step>`, then delete what need not be kept.

        Args:
            home: the run's folder.
            step: the checkpoint's step.
            keep: how many checkpoints to keep besides those that stay.
            count: called from several threads.

        Raises:
            OSError: the checkpoint is gone, or cannot be read.
            SupersededError: another process writes here.
        """
        commits, root = self.commits(), home / _CHECKPOINTS / str(step)
        number = self._next
        self._clear(number)
        with ExitStack() as stack:
            # Open files can be read to their end, even if the run deletes the checkpoint.
            paths = [path for path in files_below(root) if path.name != CHECKSUMS]
            files = {f"{step}/{path.relative_to(root)}": path for path in paths}
            opened = {name: stack.enter_context(path.open("rb")) for name, path in files.items()}
            manifest, lasting = (root / CHECKSUMS).read_bytes(), stays(home / _CHECKPOINTS, step)
            own = {name: (home / name).read_bytes() for name in _own_files(home)}
            names = [f"{_CHECKPOINTS}/{name}" for name in (*opened, f"{step}/{CHECKSUMS}")]
            names += [f"run/{number}/{name}" for name in own]
            same = [commit for commit in commits if commit.step == step]
            for commit in same:  # it is about to be overwritten
                self.store.delete(f"commits/{commit.number}")
            self._put("pending", {"number": number, "names": names})
            size = sum(os.fstat(file.fileno()).st_size for file in opened.values())
            put = self.store.put_file
            _each(lambda name: put(f"{_CHECKPOINTS}/{name}", opened[name], count), opened)
        for name, data in own.items():
            self.store.put(f"run/{number}/{name}", data)
        self.store.put(f"{_CHECKPOINTS}/{step}/{CHECKSUMS}", manifest)
        sums = {name: _digest(data) for name, data in own.items()}
        commit = Commit(number, step, _digest(manifest), size, lasting, sums)
        if not self.store.put_if_absent(f"commits/{number}", _sealed(asdict(commit))):
            raise SupersededError(f"{self.store.url}: another process mirrors this run now")
        live = [commit, *(one for one in commits if one not in same)]
        old = _superfluous(live, home / _CHECKPOINTS, keep)
        gone = [f"commits/{one.number}" for one in old]
        gone += [name for one in old for name in self._names(one)]
        gone += [f"run/{one.number}/{name}" for one in same for name in one.files]
        self._put("pending", {"number": 0, "names": gone})
        live = [one for one in live if one not in old]
        tree = {"number": number, "live": [asdict(one) for one in live]}
        self._put(f"latest-{number % 2}", tree)
        self._clear(number)

    def fetch(self, commit: Commit, home: Path, count: Count = lambda size: None) -> str | None:
        """Write a checkpoint and the run's files to the disk; return what is wrong with it, if so.

        Nothing is left on the disk of a checkpoint that is not whole.

        Raises:
            OSError: the disk is full or broken.
        """
        final = home / _CHECKPOINTS / str(commit.step)
        partial = partial_path(final, "mirror")
        own: dict[str, bytes] = {}
        for _ in range(_TRIES):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                own = self._fetch(commit, partial, count)
                problem = damage(partial)
            except (NotFoundError, ChangedError, DamagedError) as error:
                problem = str(error)
            if problem is None:
                break
        else:
            shutil.rmtree(partial)
            return problem
        for name, data in own.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(home / name, data)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync_folder(final.parent)
        return None

    def _fetch(self, commit: Commit, partial: Path, count: Count) -> dict[str, bytes]:
        """Write a checkpoint's files; return the run's own; raise DamagedError and OSError, too."""
        if self._commit(commit.number) != commit:
            raise DamagedError("its commit is gone")
        prefix = f"{_CHECKPOINTS}/{commit.step}"
        manifest = self.store.get(f"{prefix}/{CHECKSUMS}")
        if _digest(manifest) != commit.manifest:
            raise DamagedError(f"{CHECKSUMS} is not what was written")
        write_whole(partial / CHECKSUMS, manifest)
        names = list(parse_json(manifest)["files"])
        _check_names([*names, *commit.files])
        for folder in {(partial / name).parent for name in names}:
            folder.mkdir(parents=True, exist_ok=True)
        _each(lambda name: self.store.download(f"{prefix}/{name}", partial / name, count), names)
        own = {}
        for name, checksum in commit.files.items():
            own[name] = self.store.get(f"run/{commit.number}/{name}")
            if _digest(own[name]) != checksum:
                raise DamagedError(f"{name} is not what was written")
        return own

    def _names(self, commit: Commit) -> list[str]:
        """Return the names of a commit's objects, without its own."""
        prefix = f"{_CHECKPOINTS}/{commit.step}"
        try:
            files = parse_json(self.store.get(f"{prefix}/{CHECKSUMS}"))["files"]
        except (NotFoundError, DamagedError, KeyError, TypeError):
            files = []
        own = [f"run/{commit.number}/{name}" for name in commit.files]
        return own + [f"{prefix}/{name}" for name in (CHECKSUMS, *files)]

    def _clear(self, number: int) -> None:
        """Delete what an upload or a deletion has left, before commit `number` is made."""
        try:
            pending = self._read("pending")
        except DamagedError:
            pending = None
        if pending and not 0 < pending["number"] < number:  # else it was committed
            commits = [name for name in pending["names"] if name.startswith("commits/")]
            _each(self.store.delete, commits)
            _each(self.store.delete, [name for name in pending["names"] if name not in commits])
        if pending:
            self.store.delete("pending")

    def _exists(self, number: int) -> bool:
        try:
            self.store.stat(f"commits/{number}")
        except NotFoundError:
            return False
        return True

    def _commit(self, number: int) -> Commit | None:
        """Return a commit; None if it is missing or damaged."""
        try:
            tree = self._read(f"commits/{number}")
            return read(Commit, tree) if tree else None
        except DamagedError:
            return None

    def _put(self, name: str, tree: dict[str, Any]) -> None:
        self.store.put(name, _sealed(tree))

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return an object's content, None if there is none; raise DamagedError."""
        try:
            return _opened(self.store.get(name))
        except NotFoundError:
            return None
        except DamagedError:  # perhaps on its way
            return _opened(self.store.get(name))


def unmirrored(home: Path, commits: Iterable[Commit]) -> list[int]:
    """Return the steps to upload, oldest first: of those after the last copy, which are to stay.

    The newest counts among these.

    Raises:
        OSError: a checkpoint is gone, or cannot be read.
    """
    there = {(commit.step, commit.manifest) for commit in commits}
    folder = home / _CHECKPOINTS
    steps = steps_in(folder)
    wanted = [step for step in steps if step == steps[-1] or stays(folder, step)]
    last = 0
    for place, step in enumerate(wanted, start=1):
        if (step, _digest((folder / str(step) / CHECKSUMS).read_bytes())) in there:
            last = place
    return wanted[last:]


def _superfluous(commits: list[Commit], folder: Path, keep: int) -> list[Commit]:
    """Return the commits to delete, given all of them, newest first.

    Those of later steps are of a past that the run has gone back on.
    """
    newest, *others = commits
    here = set(steps_in(folder))
    later = [commit for commit in others if commit.step > newest.step]
    counted = [
        commit
        for commit in commits
        if commit not in later
        and not (stays(folder, commit.step) if commit.step in here else commit.stays)
    ]
    return later + counted[keep:]


def _own_files(home: Path) -> list[str]:
    kept = [name for name in _KEPT if (home / name).is_file()]
    chosen = files_below(home / _KEPT_FOLDER)
    return kept + [str(path.relative_to(home)) for path in chosen]


def _each(function: Callable[[Any], Any], items: Iterable[Any]) -> None:
    """Call `function` for each item, in several threads; the first error ends it."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="mirror")
    try:
        for result in [pool.submit(function, item) for item in items]:
            result.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_names(names: Iterable[str]) -> None:
    """Raise DamagedError if one would not be written below the run's folder."""
    for name in names:
        if name.startswith("/") or ".." in Path(name).parts:
            raise DamagedError(f"it names {name}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sealed(tree: dict[str, Any]) -> bytes:
    """Return a JSON text that holds its own checksum."""
    own = _digest(json.dumps(tree, sort_keys=True).encode())
    return (json.dumps({**tree, "sha256": own}, sort_keys=True) + "\n").encode()


def _opened(data: bytes) -> dict[str, Any]:
    """Return what `_sealed` was given; raise DamagedError."""
    tree = parse_json(data)
    if not isinstance(tree, dict):
        raise DamagedError("it is no table")
    tree.pop("sha256", None)
    if _sealed(tree) != data:
        raise DamagedError("its checksum is wrong")
    return tree
