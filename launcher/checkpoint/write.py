"""Write checkpoints: each process writes its shards; the first one merges and commits them.

The processes meet in the folder that they write to, `<step>.partial-<token>`: each leaves a list of
its files' checksums there when it is done, and the first process waits for all of them. The folder
gets its final name only when everything is on the disk, so a checkpoint is complete or not there at
all.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.base import DamagedError, read_json, sync_folder, write_whole
from launcher.base.reading import read
from launcher.checkpoint.layout import (
    ARRAYS,
    METADATA,
    Sums,
    checksums,
    files_below,
    partial_path,
    stays,
    steps_in,
    write_checksums,
)
from launcher.checkpoint.orbax_compat import (
    merge_shards,
    os_error_code,
    process_folder,
    step_metadata,
    write_shards,
)

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_LIMIT_SECONDS = 1800.0  # for another process to write its part, on a slow disk

_FREE = "Free some space there"
_PERMIT = "Make it writable, or choose another {place}"
_REMEDIES = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: "Your quota there is used up: free some space, or choose another {place}",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _PERMIT),
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
}


def stored_parts(state: Any) -> dict[str, Any]:
    """Return the parts of a state by the names that they are stored under."""
    return {name: part for name, part in vars(state).items() if part is not None}


class SaveError(OSError):
    """A state could not be saved; the text is one line with the reason and the remedy."""


@dataclass(frozen=True)
class _Note:
    """A process's message to the first one: the checksums of its files, or what went wrong."""

    sums: dict[str, tuple[int, str]] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Writers:
    """The processes that write one checkpoint.

    Attributes:
        index: the index of this process.
        count: the number of processes.
        token: a string that is the same in all processes, and new for every save.
    """

    index: int = 0
    count: int = 1
    token: str = "0"


def save(
    folder: Path,
    step: int,
    state: Any,
    metadata: dict[str, Any],
    keep: int | None = None,
    writers: Writers = Writers(),
) -> None:
    """Write `folder/<step>`, completely or not at all; then delete old checkpoints.

    Every process of `writers` calls it. Those that `stays` protects are kept, and the newest `keep`
    of the others.

    Args:
        folder: the folder of checkpoints.
        step: the number of finished steps.
        state: the state, as `copy_to_host` returns it.
        metadata: JSON-able metadata.
        keep: how many checkpoints to keep; None or 0 for all.
        writers: the processes that write.

    Raises:
        SaveError: the disk refused it; earlier checkpoints are unchanged.
    """
    final = folder.absolute() / str(step)
    save_parts(final, stored_parts(state), step, metadata, writers, "run.dir")
    if writers.index == 0 and keep:
        _prune(final.parent, step, keep)


def save_parts(
    final: Path,
    parts: Mapping[str, Any],
    step: int,
    metadata: dict[str, Any],
    writers: Writers,
    place: str = "folder",
) -> None:
    """Write the checkpoint `final`, completely or not at all.

    Args:
        final: its folder; an earlier checkpoint there is deleted once this one is complete.
        parts: trees of `OwnedShards`, by the names that they are stored under.
        step: the number of finished steps.
        metadata: JSON-able metadata.
        writers: the processes that write.
        place: what to choose another one of, if the disk refuses it.

    Raises:
        SaveError: the disk refused it.
    """
    partial, began = partial_path(final, writers.token), time.time_ns()
    what = f"step {step} in {final.parent}" if final.name == str(step) else str(final)
    try:
        _write_part(partial, parts, writers)
        if writers.index == 0:
            sums = _await_parts(partial, writers)
            rest = _write_rest(partial, metadata, began, sums)
            write_checksums(partial, step, {**sums, **rest})
            _commit(partial, final)
    except Exception as error:
        problem = _explained(error, what, place)
        abandon(partial, writers, problem or f"cannot save {what}: {error!r}")
        if problem is None:
            raise
        raise SaveError(problem) from None


def abandon(partial: Path, writers: Writers, problem: str) -> None:
    """Abandon a save: notify the first process, or delete the files if this is the first."""
    with suppress(OSError):  # cannot be notified: the first process times out
        if writers.index:
            shutil.rmtree(process_folder(partial / ARRAYS, writers.index), ignore_errors=True)
            partial.mkdir(parents=True, exist_ok=True)  # the first process may not have made it yet
            _leave(partial, writers.index, _Note(problem=problem))
        else:
            shutil.rmtree(partial, ignore_errors=True)


def _write_part(partial: Path, parts: Mapping[str, Any], writers: Writers) -> None:
    """Write this process's shards and leave a list of the files."""
    arrays = partial / ARRAYS
    arrays.mkdir(parents=True, exist_ok=True)
    write_shards(arrays, dict(parts), writers.index)
    own = process_folder(arrays, writers.index)
    if writers.index:
        sums = checksums(partial, files_below(own) if own.exists() else [], sync=True)
        _leave(partial, writers.index, _Note(sums))


def _await_parts(partial: Path, writers: Writers) -> dict[str, tuple[int, str]]:
    """Wait for the other processes' parts; return the checksums of their files. Raises OSError."""
    sums: dict[str, tuple[int, str]] = {}
    deadline = time.monotonic() + _LIMIT_SECONDS
    for index in range(1, writers.count):
        note = _note(partial, index)
        while not note.exists():
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"process {index} did not write its part", note)
            time.sleep(_POLL_SECONDS)
        message = _read_note(note)
        if message.problem is not None:
            raise SaveError(" ".join(message.problem.split()))
        sums |= message.sums
        note.unlink()
    return sums


def _write_rest(partial: Path, metadata: dict[str, Any], began: int, sums: Sums) -> Sums:
    """Merge the parts and write the metadata; return the checksums of all files not in `sums`.

    `sums` holds those that the other processes wrote.
    """
    merge_shards(partial / ARRAYS)
    tree = step_metadata(metadata, began, time.time_ns())
    write_whole(partial / METADATA, json.dumps(tree, allow_nan=False))
    paths = [path for path in files_below(partial) if str(path.relative_to(partial)) not in sums]
    return checksums(partial, paths, sync=True)


def _commit(partial: Path, final: Path) -> None:
    """Give a checkpoint its final name; delete an earlier one of that name only then."""
    _sync_folders(partial)
    before = _put_aside(final) if final.exists() else None
    try:
        partial.rename(final)
    except OSError:
        if before:
            before.rename(final)
        raise
    sync_folder(final.parent)
    if before:
        shutil.rmtree(before, ignore_errors=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete checkpoints that need not be kept; those newer than `step` are not this run's."""
    try:
        counted = [s for s in steps_in(folder) if s <= step and not stays(folder, s)]
        for old in counted[:-keep]:
            shutil.rmtree(_put_aside(folder / str(old)), ignore_errors=True)
    except OSError as error:  # not fatal: the next save tries again
        _log.warning("cannot delete what need not be kept in %s: %s", folder, error)


def drop_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps than `step`, the newest first; raise OSError."""
    for later in [each for each in reversed(steps_in(folder)) if each > step]:
        shutil.rmtree(_put_aside(folder / str(later)), ignore_errors=True)


def _put_aside(path: Path) -> Path:
    """Rename a checkpoint before it is deleted, so that half of it is not taken for damage."""
    discarded = partial_path(path, "discarded")
    shutil.rmtree(discarded, ignore_errors=True)
    return path.rename(discarded)


def _note(partial: Path, index: int) -> Path:
    return partial / f"process_{index}.json"


def _leave(partial: Path, index: int, note: _Note) -> None:
    write_whole(_note(partial, index), json.dumps(asdict(note)))


def _read_note(path: Path) -> _Note:
    try:
        return read(_Note, read_json(path))
    except DamagedError as error:
        raise SaveError(f"cannot save {path.parent.stem}: {path} is damaged: {error}.") from None


def _explained(error: Exception, what: str, place: str) -> str | None:
    """Return the error as one line, or None if it is not an error of the disk."""
    if isinstance(error, SaveError):
        return str(error)
    text = " ".join(str(error).split())
    code = error.errno if isinstance(error, OSError) else _code_of(text)
    if code is not None:
        reason = os.strerror(code)
    elif isinstance(error, ValueError) and re.match(r"[A-Z_]+: ", text):
        reason = text  # TensorStore's, for example if another process deleted the folder
    else:
        return None
    remedy = _REMEDIES.get(code or 0, "Check the disk").format(place=place)
    if remedy == _FREE and place == "run.dir":
        remedy += ", or keep fewer states (train.checkpoint.keep)"
    return f"cannot save {what}: {reason}. {remedy}."


def _code_of(text: str) -> int | None:
    """Return the code of the system's error that a message of TensorStore's names, if any."""
    named = (code for code in errno.errorcode if f": {os.strerror(code)}" in text)
    return os_error_code(text) or next(named, None)


def _sync_folders(root: Path) -> None:
    for path in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        sync_folder(path)
