"""Compiled programs kept on disk for the next start, by JAX's own persistent compilation cache.

`keep_compiled` turns it on in a worker process, before anything is compiled there. What is read
back is code that will run, so the folder must be this user's alone. Imported by `cluster.peer`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import jax

from launcher.files import is_safe
from launcher.plan.profile.cache import cache_folder, file_name, processor

MOST_BYTES = 2 << 30  # the programs that were used least recently go first


def keep_compiled(say: Callable[[str], None]) -> None:
    """Keep what this process compiles below the cache folder, and take from there what was.

    A folder for each kind of processor, since machines may share a home. A user's own
    `JAX_COMPILATION_CACHE_DIR` is left alone; `JAX_ENABLE_COMPILATION_CACHE=false` turns it off.
    Of several processes JAX lets only the first one write.

    Args:
        say: told in a line why nothing is kept.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        folder = cache_folder() / "compiled" / file_name(processor())
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_safe(folder.resolve()):
            raise PermissionError(f"others could put theirs in the place of {folder}")
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows this user's home
        say(f"compiled programs are not kept for the next start: {error}")
        return
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
