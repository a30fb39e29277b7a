"""The copies of a run's checkpoints in an object store: `run.mirror`.

    owner               the run that the prefix belongs to, <id>/<token>; made once
    starts/<number>     made once, when a start of the run first mirrors; only the newest continues
    copies/<number>/<start>/…   files as in the run's folder: a checkpoint, metrics, settings, …
    commits/<number>    made once, when all of these are there: from then on the copy counts

Starts and commits are numbered from 1 on and are never deleted, so a few requests for single ones
find the newest. A commit lists all the copies that count. Two starts may copy under one number at
once, to folders of their own; one of them commits. The store is asked for a list only of what to
delete: copies that count no longer, and what uploads that were killed or came too late have left.
What is read is checked by checksums, of the commit, of checksums.json and so of every file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.base import DamagedError, parse_json, read_own, stores, sync_folder, write_whole
from launcher.base.reading import read
from launcher.checkpoint import layout

Progress = Callable[[int, int], None]  # takes the bytes that are copied, and all there are
_TRIES = 2  # of an object that arrives damaged
_CHECKPOINTS = "checkpoints"
_SETTINGS = "config.yaml"
_KEPT = (_SETTINGS, "plan.json", "metrics.jsonl", f"{_CHECKPOINTS}/{layout.BEST}")
_ROLLED_BACK = "rolled_back.json"  # until the mirror follows
_KEPT_FOLDER = "autotune"  # the kernels that XLA chose: without them the last bits may differ
_LATER = "a later start of this run, on another disk, mirrors it now"
_EARLIER = "an earlier start of this run was mirroring until now"
_each = functools.partial(layout.in_threads, threads=4, wait=True)

_log = logging.getLogger(__name__)


class SupersededError(stores.StoreError):
    """A later start mirrors to the prefix now."""


@dataclass(frozen=True)
class MirrorCopy:
    """A complete copy of a checkpoint.

    Attributes:
        number: its number; the newest has the highest.
        start: the number of the start that made it.
        step: the checkpoint's step.
        manifest: the SHA-256 of its checksums.json.
        size: the bytes of its files.
        stays: whether it is kept whatever `keep` is.
        files: the SHA-256 of each of the run's own files, by its path.
    """

    number: int
    start: int
    step: int
    manifest: str
    size: int
    stays: bool
    files: Mapping[str, str]

    @property
    def root(self) -> str:
        """The name of the folder that holds it."""
        return _root(self.number, self.start)


@dataclass(frozen=True)
class _Commit:
    """The copies that count, newest first, and the numbers of those that it has dropped."""

    copies: tuple[MirrorCopy, ...] = ()
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class _RollBack:
    """A note of the newest step that a roll-back has left; its token tells it from others."""

    step: int
    token: str


class Mirror:
    """The objects of one run; every method raises StoreError.

    Args:
        store: the objects.
        start: see the attribute.
        texts: what to upload in place of some of the run's own files, by their path.

    Attributes:
        start: the number of this start of the run among those that have mirrored; None before.
    """

    def __init__(
        self, store: stores.Store, start: int | None = None, texts: Mapping[str, str] | None = None
    ) -> None:
        self.store, self.start, self._texts = store, start, texts or {}

    def owner(self) -> str | None:
        """Return the run that the prefix belongs to, `<id>/<token>`; None if it is nobody's."""
        try:
            return self.store.get("owner").decode(errors="replace")
        except stores.NotFoundError:
            next(self.store.objects("owner"), None)  # raises it where there is no bucket
            return None

    def own(self, owner: str) -> bool:
        """Return whether the prefix belongs to `owner`, from now on if it was nobody's."""
        return self.store.put_if_absent("owner", owner.encode())

    def begin(self) -> int:
        """Return the number of this start of the run, which is the newest if it is a new one."""
        if self.start is None:
            number, token = self._last("starts") + 1, secrets.token_hex(8).encode()
            while not self.store.put_if_absent(f"starts/{number}", token):
                number += 1
            self.start = number
        return self.start

    def copies(self) -> tuple[MirrorCopy, ...]:
        """Return the copies that count, newest first."""
        return self._newest()[1].copies

    def upload(self, home: Path, step: int, keep: int, progress: Progress) -> None:
        """Copy the checkpoint `home/checkpoints/<step>`, then delete what need not be kept.

        Args:
            home: the run's folder.
            step: the checkpoint's step.
            keep: how many checkpoints to keep besides those that stay.
            progress: called for each file, or part of a large one.

        Raises:
            OSError: the checkpoint is gone, or cannot be read.
            SupersededError: a later start of the run has mirrored.
        """
        if self._is_superseded():
            raise SupersededError(_LATER)
        back = _rolled_back(home)
        newest, last = self._newest()
        number, start, root = newest + 1, self.begin(), home / _CHECKPOINTS / str(step)
        place = _root(number, start)
        self._clean(last)  # perhaps not to the end, last time
        self._clear(place)
        # First: if the run saves this step again meanwhile, this copy is not that one's.
        manifest, lasting = (root / layout.CHECKSUMS).read_bytes(), layout.stays(root.parent, step)
        with ExitStack() as stack:
            # Open files can be read to their end, even if the run deletes the checkpoint.
            paths = [root / name for name in parse_json(manifest)["files"]]
            files = {path: stack.enter_context(path.open("rb")) for path in paths}
            own = {name: (home / name).read_bytes() for name in _own_files(home)}
            own |= {name: self._texts[name].encode() for name in self._texts.keys() & own.keys()}
            names = {path: f"{place}/{path.relative_to(home)}" for path in paths}
            size = sum(os.fstat(file.fileno()).st_size for file in files.values())
            sent = _summed(progress, size)
            _each(lambda path: self.store.put_file(names[path], files[path], sent), paths)
        for name, data in {**own, f"{_CHECKPOINTS}/{step}/{layout.CHECKSUMS}": manifest}.items():
            self.store.put(f"{place}/{name}", data)
        sums = {name: _digest(data) for name, data in own.items()}
        copy = MirrorCopy(number, start, step, _digest(manifest), size, lasting, sums)
        dropped = _superfluous([copy, *last.copies], root.parent, keep, back)
        kept = tuple(one for one in (copy, *last.copies) if one.number not in dropped)
        commit = _Commit(kept, dropped)
        superseded, sealed = self._is_superseded(), _sealed(asdict(commit))
        if superseded or not self.store.put_if_absent(f"commits/{number}", sealed):
            self._clear(place)
            raise SupersededError(_LATER) if superseded else stores.StoreError(_EARLIER)
        if back is not None and back == _rolled_back(home):
            (home / _ROLLED_BACK).unlink(missing_ok=True)
        self._clean(commit)

    def fetch(
        self, copy: MirrorCopy, home: Path, progress: Progress, alone: bool = False
    ) -> str | None:
        """Write a checkpoint and the run's files to the disk; return what is wrong with it, if so.

        Nothing is left on the disk of a checkpoint that is not whole. Settings that are there stay,
        as those of a start on this disk; if it is fetched `alone`, all of the run's files do.

        Raises:
            OSError: the disk is full or broken.
        """
        final = home / _CHECKPOINTS / str(copy.step)
        partial = layout.partial_path(final, "mirror")
        problem: str | None = None
        try:
            for _ in range(_TRIES):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                try:
                    own = self._fetch(copy, partial, _summed(progress, copy.size))
                    problem = layout.damage(partial)
                except (stores.NotFoundError, stores.ChangedError, DamagedError) as error:
                    problem = str(error)
                if problem is None:
                    if not alone:
                        _write_own(own, home)
                        (home / _ROLLED_BACK).unlink(missing_ok=True)  # it follows the mirror now
                    shutil.rmtree(final, ignore_errors=True)  # a damaged one, or an empty folder
                    partial.rename(final)
                    sync_folder(final.parent)
                    return None
            return problem
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _fetch(
        self, copy: MirrorCopy, partial: Path, got: Callable[[int], None]
    ) -> dict[str, bytes]:
        """Write a checkpoint's files; return the run's own; raise DamagedError and OSError, too."""

        def get(name: str, checksum: str) -> bytes:
            data = self.store.get(f"{copy.root}/{name}")
            if _digest(data) != checksum:
                raise DamagedError(f"{name} is not what was written")
            return data

        prefix = f"{_CHECKPOINTS}/{copy.step}"
        manifest = get(f"{prefix}/{layout.CHECKSUMS}", copy.manifest)
        write_whole(partial / layout.CHECKSUMS, manifest)
        names = list(parse_json(manifest)["files"])
        _check_names([*names, *copy.files])
        for folder in {(partial / name).parent for name in names}:
            folder.mkdir(parents=True, exist_ok=True)
        root, download = f"{copy.root}/{prefix}", self.store.download
        _each(lambda name: download(f"{root}/{name}", partial / name, got), names)
        return {name: get(name, checksum) for name, checksum in copy.files.items()}

    def _is_superseded(self) -> bool:
        """Return whether this start is not the newest."""
        return self._exists(f"starts/{self.begin() + 1}")

    def _clean(self, commit: _Commit) -> None:
        """Delete what no longer counts since a commit: what it dropped, and others' uploads."""
        for number in commit.dropped:
            self._clear(f"copies/{number}")
        for copy in commit.copies[:1]:
            self._clear(f"copies/{copy.number}", but=f"{copy.root}/")

    def _clear(self, folder: str, but: str | None = None) -> None:
        names = [name for name, _ in self.store.objects(f"{folder}/")]
        _each(self.store.delete, [name for name in names if not but or not name.startswith(but)])

    def _newest(self) -> tuple[int, _Commit]:
        """Return the newest commit's number, and the newest commit that can be read.

        Raises:
            StoreError: there are some, and none can be read.
        """
        newest = self._last("commits")
        for number in range(newest, 0, -1):
            for _ in range(_TRIES):
                with suppress(DamagedError):
                    commit = read(_Commit, _opened(self.store.get(f"commits/{number}")))
                    if commit.copies and commit.copies[0].number == number:
                        return newest, commit
            _log.warning(f"{self.store.url}/commits/{number} is damaged")
        if newest:  # not as if nothing had ever been copied
            raise stores.StoreError(f"all of {self.store.url}/commits are damaged")
        return 0, _Commit()

    def _last(self, folder: str) -> int:
        """Return the highest number of a folder's objects, which lacks none; 0 if it is empty."""

        def lacks(number: int) -> bool:
            return not self._exists(f"{folder}/{number}")

        above = 1
        while not lacks(above):
            above *= 2
        return bisect_left(range(1, above), True, above // 2, key=lacks)

    def _exists(self, name: str) -> bool:
        try:
            self.store.stat(name)
        except stores.NotFoundError:
            return False
        return True


def _root(number: int, start: int) -> str:
    return f"copies/{number}/{start}"


def unmirrored(home: Path, copies: Iterable[MirrorCopy]) -> list[int]:
    """Return the steps to upload, oldest first: of those after the last copy, which are to stay.

    The newest counts among these, after a roll-back also if there are copies of later ones.

    Raises:
        OSError: a checkpoint is gone, or cannot be read.
    """
    there = [(copy.step, copy.manifest) for copy in copies]
    folder = home / _CHECKPOINTS
    steps = layout.steps_in(folder)
    wanted = [step for step in steps if step == steps[-1] or layout.stays(folder, step)]
    paths = {step: folder / str(step) / layout.CHECKSUMS for step in wanted}
    # No run resumes from one without.
    sums = {step: _digest(path.read_bytes()) for step, path in paths.items() if path.exists()}
    done = [number for number, one in enumerate(sums.items(), start=1) if one in there]
    behind = _rolled_back(home) is not None and bool(sums) and [*sums.items()][-1] in there[1:]
    return list(sums)[max(done, default=0) - behind :]


def note_roll_back(home: Path, step: int) -> None:
    """Have the next upload drop all copies of later steps but those of checkpoints on the disk."""
    before = _rolled_back(home)
    note = _RollBack(min(step, before.step) if before else step, secrets.token_hex(8))
    write_whole(home / _ROLLED_BACK, json.dumps(asdict(note)) + "\n", private=True)


def _rolled_back(home: Path) -> _RollBack | None:
    return read_own(home / _ROLLED_BACK, lambda tree: read(_RollBack, tree))


def _superfluous(
    copies: list[MirrorCopy], folder: Path, keep: int, back: _RollBack | None
) -> tuple[int, ...]:
    """Return the numbers of the copies to delete, given all of them, newest first.

    Those of later steps are of a past that the run has gone back on.
    """
    newest, *others = copies
    here = set(layout.steps_in(folder))

    def is_here(copy: MirrorCopy) -> bool:
        sums = folder / str(copy.step) / layout.CHECKSUMS
        return sums.exists() and _digest(sums.read_bytes()) == copy.manifest

    def is_left(copy: MirrorCopy) -> bool:
        return back is not None and copy.step > back.step and not is_here(copy)

    later = [copy for copy in others if copy.step >= newest.step or is_left(copy)]
    stay = [layout.stays(folder, one.step) if one.step in here else one.stays for one in copies]
    left = [one for one, kept in zip(copies, stay, strict=True) if not kept and one not in later]
    return tuple(copy.number for copy in later + left[keep:])


def _own_files(home: Path) -> list[str]:
    paths = [*(home / name for name in _KEPT), *layout.files_below(home / _KEPT_FOLDER)]
    return [str(path.relative_to(home)) for path in paths if path.is_file()]


def _write_own(files: Mapping[str, bytes], home: Path) -> None:
    """Write the run's own files, but for settings that are there."""
    for name, data in files.items():
        if name != _SETTINGS or not (home / name).exists():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(home / name, data)


def _summed(progress: Progress, size: int) -> Callable[[int], None]:
    """Return what several threads tell the bytes that they have copied, of `size`."""
    done, lock = 0, threading.Lock()

    def add(more: int) -> None:
        nonlocal done
        with lock:
            done = min(done + more, size)  # the library may send a part twice
            progress(done, size)

    return add


def _check_names(names: Iterable[str]) -> None:
    """Raise DamagedError if one would not be written below the run's folder."""
    for name in names:
        if name.startswith("/") or ".." in Path(name).parts:
            raise DamagedError(f"it names {name}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sealed(tree: dict[str, Any]) -> bytes:
    """Return a JSON text below its checksum."""
    text = json.dumps(tree)
    return f"{_digest(text.encode())}\n{text}".encode()


def _opened(data: bytes) -> Any:
    """Return what `_sealed` was given; raise DamagedError."""
    checksum, _, text = data.partition(b"\n")
    if checksum != _digest(text).encode():
        raise DamagedError("its checksum is wrong")
    return parse_json(text)
