"""Keep compiled programs on disk for the next start, in JAX's persistent compilation cache.

`keep_compiled` turns it on in a worker process, before anything is compiled there; the driver asks
`why_not_kept`. What is read back is code that will run, so the folder must be this user's alone.
Every process of a group writes what it compiles; a file appears when it is whole, so several may
write one at a time. JAX could bound the folder, too, but would then read every file's time of last
use for each new program.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from launcher.base import exposed, make_private
from launcher.base.jax_compat import around_cache_reads, write_cache_by
from launcher.base.measurements import cache_folder, file_name, processor

MOST_BYTES = 2 << 30  # at each start
_ENTRY = "-cache"  # how JAX names the files

_log = logging.getLogger(__name__)


def keep_compiled() -> None:
    """Keep what this process compiles below the cache folder, and reuse what is there.

    There is one folder for each kind of processor, since machines may share a home. A user's own
    `JAX_COMPILATION_CACHE_DIR` is left alone; `JAX_ENABLE_COMPILATION_CACHE=false` turns this off.
    If nothing can be kept, a warning says why.
    """
    if _is_the_users():
        return
    try:
        folder = _folder()
        _prune(folder)
    except (OSError, RuntimeError) as error:
        _log.warning(_not_kept(error))
        return
    around_cache_reads(lambda key: _reading(folder, key))
    write_cache_by(lambda key: _writing(folder, key))
    jax.config.update("jax_compilation_cache_max_size", -1)
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


def _prune(folder: Path) -> None:
    """Delete the programs that were used least recently, as far as there are over `MOST_BYTES`.

    Other processes may use the folder, and prune it, at the same time.
    """
    found = []
    for path in folder.glob(f"*{_ENTRY}"):
        with suppress(FileNotFoundError):
            found.append((path.stat(), path))
    left = MOST_BYTES
    for status, path in sorted(found, key=lambda one: -one[0].st_mtime_ns):
        left -= status.st_size
        if left < 0:
            path.unlink(missing_ok=True)


@contextmanager
def _reading(folder: Path, key: str) -> Iterator[None]:
    """Note the use of a program that JAX reads, and delete it if JAX cannot: it never replaces one.

    The note is the file's time of change, since many file systems keep no time of access.
    """
    path = folder / f"{key}{_ENTRY}"
    with suppress(OSError):
        os.utime(path)
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError):  # of the disk, not of the entry
            path.unlink(missing_ok=True)
        raise


@contextmanager
def _writing(folder: Path, key: str) -> Iterator[str]:
    """Have JAX write a program under a name of this thread's, and give it its own once it is whole.

    What a kill leaves is pruned in its turn.
    """
    name = f"{key}.{os.getpid()}.{threading.get_ident()}"
    path = folder / f"{name}{_ENTRY}"
    try:
        yield name
        with suppress(FileNotFoundError):  # JAX does not keep this one
            path.replace(folder / f"{key}{_ENTRY}")
    finally:
        path.unlink(missing_ok=True)
