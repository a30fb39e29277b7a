"""Write files to a folder of another node, by Ray: no port is opened, and Ray knows its clients.

Each part is a task on that node, in a process beside the workers and with a low priority, so that
neither end of it holds a worker up. A file's header is another file, written last.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from launcher.cluster.ray import ray_compat

HEADER = ".json"  # the end of a header's name
_PART = 2**26  # bytes
_PART_SECONDS = 30.0
_NICENESS = 15
Chunk = tuple[int, Any]  # the first byte in the file, and uint8 [bytes]


class NodeFolder(NamedTuple):
    """A folder of a node, by Ray's identifier of the node and the folder's path there."""

    node: str
    path: str

    @classmethod
    def here(cls, path: Path) -> NodeFolder:
        """Return a folder of this process's node."""
        import ray

        return cls(ray.get_runtime_context().get_node_id(), str(path))

    def write(self, name: str, chunks: Iterable[Chunk], header: bytes) -> float:
        """Write a file beside the newest whole one whose name is the same up to the first dot.

        The others of that name are deleted before, so that memory is never taken for three.

        Args:
            name: its name.
            chunks: its content.
            header: the content of its header.

        Returns:
            The processor seconds that it has taken there.

        Raises:
            OSError: it cannot be written there, or the node does not answer.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        task = _task().options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        spent, parts = 0.0, _parts(chunks)
        try:
            for part in parts:
                last = header if part is parts[-1] else None
                spent += ray.get(task.remote(self.path, name, part, last), timeout=_PART_SECONDS)
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise OSError(lines[-1]) from None
        return spent


@functools.cache
def _task() -> Any:
    """Return Ray's task of `write_file_part`, which it gets once."""
    import ray

    ray_compat.register_by_value(sys.modules[__name__])
    return ray.remote(write_file_part)


def _parts(chunks: Iterable[Chunk]) -> Sequence[Sequence[Chunk]]:
    """Return the chunks in parts of at most `_PART` bytes, a longer one in several; views of it."""
    parts, size = [list[Chunk]()], 0
    for start, values in chunks:
        for at in range(0, values.size, _PART):
            piece = values[at : at + _PART]
            size += piece.size
            if size > _PART:
                parts.append([])
                size = piece.size
            parts[-1].append((start + at, piece))
    return parts


def write_file_part(folder: str, name: str, part: Sequence[Chunk], header: bytes | None) -> float:
    """Write a part of a file, with its header if it is the last; return the seconds that it took.

    Args:
        folder: the folder; it must be there.
        name: the file's name.
        part: the chunks.
        header: the content of the header; None if there are further parts.

    Raises:
        OSError: it cannot be written.
    """
    path, described_in = Path(folder, name), Path(folder, name + HEADER)

    def write() -> float:
        alike = {*path.parent.glob(f"{name.partition('.')[0]}.*")} - {path, described_in}
        whole = [each for each in alike if each.name.endswith(HEADER)]
        newest = max(whole, key=lambda each: each.stat().st_mtime_ns, default=path)
        for other in sorted(alike - {newest, newest.with_suffix("")}, reverse=True):
            other.unlink(missing_ok=True)  # headers first
        described_in.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            for start, values in part:
                if os.pwrite(file, values, start) < len(values):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)
        if header is not None:
            partial = path.with_name(f"{name}.partial")
            partial.write_bytes(header)
            partial.replace(described_in)
        return time.thread_time()

    # Ray may give other tasks the process: the low priority is this thread's alone.
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(_NICENESS,)) as thread:
        return thread.submit(write).result()
