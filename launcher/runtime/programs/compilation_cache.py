"""Keep compiled programs on disk for the next start, in JAX's persistent compilation cache.

`keep_compiled` turns it on in a worker process, before anything is compiled there; the driver asks
`why_not_kept`. What is read back is code that will run, so the folder must be this user's alone.
JAX writes its files in place: what a kill or a full disk left of them is deleted here.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import jax
from filelock import FileLock

from launcher.base import exposed, make_private
from launcher.base.jax_compat import on_unreadable
from launcher.base.measurements import cache_folder, file_name, processor

MOST_BYTES = 2 << 30  # the programs that were used least recently go first
_LOCK = ".lockfile"  # JAX's own names
_ENTRY = "-cache"
_USED = "-atime"  # when the entry was used last
_PATIENCE = 10  # seconds, as JAX's

_log = logging.getLogger(__name__)


def keep_compiled() -> None:
    """Keep what this process compiles below the cache folder, and reuse what is there.

    There is one folder for each kind of processor, since machines may share a home. A user's own
    `JAX_COMPILATION_CACHE_DIR` is left alone; `JAX_ENABLE_COMPILATION_CACHE=false` turns this off.
    Of several processes JAX lets only the first one write. If nothing can be kept, a warning says
    why.
    """
    if _is_the_users():
        return
    try:
        folder = _folder()
        _delete_halves(folder)
    except (OSError, RuntimeError) as error:
        _log.warning(_not_kept(error))
        return
    on_unreadable(functools.partial(_delete, folder))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def why_not_kept() -> str:
    """Return one line on why this user cannot keep compiled programs on this machine, or ""."""
    try:
        if not _is_the_users():
            _folder()
    except (OSError, RuntimeError) as error:
        return _not_kept(error)
    return ""


def _is_the_users() -> bool:
    """Return whether the user's own variables decide whether and where programs are kept."""
    return bool(os.environ.get("JAX_COMPILATION_CACHE_DIR")) or (
        not jax.config.values["jax_enable_compilation_cache"]
    )


def _not_kept(error: Exception) -> str:
    return f"compiled programs are not kept for the next start: {error}"


def _folder() -> Path:
    """Make the folder and return its path.

    Raises:
        OSError: it cannot be made, or would not be this user's alone.
        RuntimeError: this user's home is not known.
    """
    folder = cache_folder() / "compiled" / file_name(processor())
    make_private(folder)
    if at := exposed(folder.resolve()):
        raise PermissionError(
            f"{at} is open to others, who could replace them; chmod go-w {at} closes it"
        )
    return folder


def _delete_halves(folder: Path) -> None:
    """Delete each program without its time of last use, and each time without its program.

    JAX would never write a new time for such a program.
    """
    with FileLock(folder / _LOCK, timeout=_PATIENCE):
        programs = {path.name.removesuffix(_ENTRY) for path in folder.glob(f"*{_ENTRY}")}
        times = {path.name.removesuffix(_USED) for path in folder.glob(f"*{_USED}")}
        for key in programs ^ times:
            _unlink(folder, key)


def _delete(folder: Path, key: str) -> None:
    """Delete a program that cannot be read: JAX would neither use nor replace it."""
    with FileLock(folder / _LOCK, timeout=_PATIENCE):
        _unlink(folder, key)


def _unlink(folder: Path, key: str) -> None:
    for end in (_ENTRY, _USED):
        (folder / f"{key}{end}").unlink(missing_ok=True)
