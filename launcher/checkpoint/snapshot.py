"""Snapshots: a worker's share of the state in host memory, taken while training continues.

A share is each distinct shard of the state on this process's devices, so that the worker that takes
this one's place needs nothing else. It lies in one of two buffers. These are files of the folder of
`scratch.shared_memory`, which outlives the workers, is this user's alone, and is removed at the end
of the driver (on other nodes, of the task that lends the node), however that comes.

Beside a buffer lies its header with the step, the place of each shard and a digest (xxh3_128, which
finds accidents, not forgery). The header is deleted before the first byte is written, and comes
back by a rename after the last one: a snapshot that was cut anywhere is not there, and one with a
changed bit is not taken. The older of the two buffers is written, so one is whole at any time.

Training waits for no copy: a thread copies NumPy's views of the arrays, whose memory XLA leaves as
it is while a view lives; the next step then writes elsewhere. So for that time the share takes the
memory of one more. Arrays of other devices than CPUs are fetched before the next step.

Checkpoints are written from the same buffers; one that is being read for that is not written. A
run that keeps no snapshots has one buffer without a name, for its checkpoints.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil
import xxhash

from launcher.arrays.stacked_array import StackedArray
from launcher.base import parse_json, read_bytes, write_whole
from launcher.checkpoint.shards import Index, OwnedShards, outline_share, view_share
from launcher.checkpoint.train_state import TrainState, flat_name
from launcher.checkpoint.write import stored_parts

BUFFERS = 2
LOCK = "lock.memory"
_ALIGNMENT = 64  # bytes
_PART = 2**22  # bytes that are copied and digested at a time, so that they are still in the cache
_HEADER = ".json"
# A cgroup's limit of memory, its use, and the part of it that is cached files, which give way: the
# names of version 2, and of version 1.
_CGROUP_2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
Key = tuple[str, tuple[tuple[int, int], ...]]  # an array's name, and the range of each dimension
Shards = Mapping[Key, np.ndarray]  # of a snapshot, views of its buffer


class ShardPlace(NamedTuple):
    """A shard's place in a buffer: its first byte, its shape, and the name of its type."""

    start: int
    shape: tuple[int, ...]
    dtype: str

    def of(self, buffer: np.ndarray) -> np.ndarray:
        """Return the shard, a view of the buffer uint8 [bytes]."""
        size = int(np.prod(self.shape)) * jax.numpy.dtype(self.dtype).itemsize
        contents = buffer[self.start : self.start + size]
        return contents.view(jax.numpy.dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class Pages:
    """A share in a buffer, which another process can map, too.

    Attributes:
        path: the buffer's file.
        size: its bytes.
        outline: of the share, as `ShareLayout` has it.
    """

    path: str
    size: int
    outline: dict[str, Any]

    def state(self) -> Any:
        """Return the state's parts to write, with views of the buffer for values; raise OSError."""
        with open(self.path, "r+b") as file:
            buffer = np.frombuffer(mmap.mmap(file.fileno(), self.size), np.uint8)
        parts = jax.tree.map(lambda shards: _mapped(shards, buffer), self.outline)
        return SimpleNamespace(**parts)


# -- Taking one -----------------------------------------------------------------------------------


class Buffer:
    """Memory for one share.

    Args:
        path: its file; None for memory that no later process is to find.

    Attributes:
        path: as given.
        step: the step of what it holds whole; -1 if it holds nothing.
        is_held: whether it must stay as it is.
        contents: the memory, uint8 [bytes].
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.step, self.is_held = path, -1, False
        self.contents = np.empty(0, np.uint8)
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        elif sys.platform == "linux":
            self._file = os.memfd_create("state")
        else:
            with tempfile.TemporaryFile("w+b") as file:
                self._file = os.dup(file.fileno())

    @property
    def opened_as(self) -> str:
        """The path by which a process of this user opens it while this one has it open."""
        if self.path is not None:
            return str(self.path)
        place = f"/proc/{os.getpid()}" if sys.platform == "linux" else "/dev"
        return f"{place}/fd/{self._file}"

    @property
    def taken(self) -> int:
        """The bytes of memory that it has, also of an earlier process."""
        return os.fstat(self._file).st_blocks * 512

    def reserve(self, size: int) -> None:
        """Take memory for `size` bytes, unless it is taken; raise OSError if there is none."""
        if size != self.contents.size:
            os.ftruncate(self._file, size)
            if self.path is not None:  # else a write beyond what is free would end the process
                os.posix_fallocate(self._file, 0, size)
            self.contents = np.frombuffer(mmap.mmap(self._file, size), np.uint8)

    def forget(self, after: int = -1) -> None:
        """Forget what it holds, if that is of a later step than `after`."""
        header = None if self.path is None else header_of(self.path)
        found = header and _read_header(header)
        self.step = found["step"] if found else self.step
        if self.step > after:
            self.step = -1
            if header is not None:
                header.unlink(missing_ok=True)

    def remove(self) -> None:
        """Give its memory back, with what an earlier process has left there."""
        if self.path is not None:
            header_of(self.path).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        self.contents = np.empty(0, np.uint8)
        os.close(self._file)


class Snapshots:
    """The buffers of a worker, and the thread that copies to them.

    Args:
        paths: the buffers' files; None is a buffer that no other process finds.
    """

    def __init__(self, paths: Sequence[Path | None] = (None,)) -> None:
        self._buffers = [Buffer(path) for path in paths]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._layout: ShareLayout | None = None
        # With the state itself, copies of its arrays that JAX keeps would stay.
        self._newest: tuple[weakref.ref[TrainState], Future[Buffer]] | None = None
        self._seconds = deque[float]()  # of copies that `spent` has not returned

    def reserve(self, state: TrainState, step: int, folder: Path) -> str | None:
        """Take the memory for shares of a state, unless there is too little; return why not.

        Snapshots of steps after `step` are dropped: the run takes another way from there.
        """
        for buffer in self._buffers:
            buffer.forget(after=step)
        self._layout = layout = lay_out(outline_share(stored_parts(state)))
        needed, shared = len(self._buffers) * layout.size, os.statvfs(folder)
        taken = sum(buffer.taken for buffer in self._buffers)
        free = shared.f_bavail * shared.f_frsize
        if problem := too_little(needed, free + taken, memory_left() + taken):
            return problem
        try:
            for buffer in self._buffers:
                buffer.reserve(layout.size)
        except OSError as error:
            return f"{folder} cannot take {_mib(needed)} ({error.strerror})"
        return None

    def take(self, step: int, state: TrainState) -> Future[Buffer]:
        """Begin to copy a state; return once the next step may overwrite its arrays.

        It first waits for the copy of the one before. A state that is copied is not copied again.
        """
        if self._newest is not None:
            newest, taken = self._newest
            if newest() is state:
                return taken
            taken.result()
        parts = stored_parts(state)
        jax.block_until_ready([x for x in jax.tree.leaves(parts) if x.addressable_shards])
        clock = time.thread_time if jax.default_backend() == "cpu" else time.perf_counter
        began = clock()
        views = view_share(parts)
        self._layout = self._layout or lay_out(views)
        taken = self._thread.submit(self._copy, step, views, self._layout, clock() - began)
        self._newest = weakref.ref(state), taken
        return taken

    def hold(self, step: int, state: TrainState) -> Future[Pages]:
        """Do the same, and keep the pages as they are until `release`."""
        taken = self.take(step, state)

        def held() -> Pages:
            buffer, layout = taken.result(), self._layout
            buffer.is_held = True
            assert layout is not None
            return Pages(buffer.opened_as, layout.size, layout.outline)

        return self._thread.submit(held)  # after this copy, before the next one

    def release(self) -> None:
        """Let all pages be written again."""
        for buffer in self._buffers:
            buffer.is_held = False

    def spent(self) -> float | None:
        """Return what the newest copies have cost training, in seconds, once; None if nothing.

        That is processor time and, of GPUs, the time in which a step waited for the arrays.
        """
        found = [self._seconds.popleft() for _ in range(len(self._seconds))]
        return sum(found) if found else None

    def close(self) -> None:
        """Stop the thread and give the memory back."""
        self._thread.shutdown()
        for buffer in self._buffers:
            buffer.remove()

    def _copy(self, step: int, views: dict[str, Any], layout: ShareLayout, waited: float) -> Buffer:
        began = time.thread_time()
        buffer = min((b for b in self._buffers if not b.is_held), key=lambda b: b.step)
        buffer.forget()
        buffer.reserve(layout.size)
        starts = [place.start for _, place in layout.places]
        digest = copy_to(buffer.contents, _values(views), starts)
        with suppress(OSError):  # the folder is full: a restart takes the one before
            if buffer.path is not None:
                _write_header(header_of(buffer.path), step, layout, digest)
            buffer.step = step
        self._seconds.append(waited + time.thread_time() - began)
        return buffer


def keep_snapshots(folder: Path, rank: int, state: TrainState, step: int) -> Snapshots | str:
    """Return buffers in a folder, with the memory for a state's share, or why there are none.

    Args:
        folder: the folder, where the buffers of a worker that has ended may lie.
        rank: the worker's rank, by which the one that takes its place finds them.
        state: the present state.
        step: the number of finished steps.
    """
    kept = Snapshots(buffer_paths(folder, rank))
    with open(folder / LOCK, "a") as lock:  # the workers of a host, one after the other
        fcntl.flock(lock, fcntl.LOCK_EX)
        problem = kept.reserve(state, step, folder)
        if problem is not None:
            kept.close()
    return kept if problem is None else problem


class ShareLayout(NamedTuple):
    """The layout of a share in a buffer.

    Attributes:
        outline: the share's parts, trees of `OwnedShards` with a `ShardPlace` for each value.
        places: the key and the place of each value, in the order of `copy_to`.
        size: the bytes of the buffer.
    """

    outline: dict[str, Any]
    places: list[tuple[Key, ShardPlace]]
    size: int


def lay_out(views: dict[str, Any]) -> ShareLayout:
    """Lay a share out: trees of `OwnedShards`, by the names that they are stored under."""
    places: list[tuple[Key, ShardPlace]] = []
    end = 0

    def placed(name: str, each: tuple[Index, np.ndarray], shape: tuple[int, ...]) -> Any:
        nonlocal end
        index, value = each
        place = ShardPlace(end, value.shape, value.dtype.name)
        places.append((shard_key(name, index, shape), place))
        end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        return index, place

    def outlined(path: Any, leaf: OwnedShards) -> OwnedShards:
        name = flat_name(path)
        shards = tuple(placed(name, each, leaf.shape) for each in leaf.shards)
        others = tuple(placed(name, each, leaf.shape) for each in leaf.others)
        return replace(leaf, shards=shards, others=others)

    outline = jax.tree_util.tree_map_with_path(outlined, views)
    return ShareLayout(outline, places, max(end, _ALIGNMENT))


def copy_to(buffer: np.ndarray, values: Sequence[np.ndarray], starts: Sequence[int]) -> str:
    """Copy values to their places in a buffer uint8 [bytes]; return the digest of all of them."""
    digest = xxhash.xxh3_128()
    for value, start in zip(values, starts, strict=True):
        source = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        for at in range(0, source.size, _PART):
            part = source[at : at + _PART]
            buffer[start + at : start + at + part.size] = part
            digest.update(part.data)
    return digest.hexdigest()


def _values(views: dict[str, Any]) -> list[np.ndarray]:
    return [value for leaf in jax.tree.leaves(views) for _, value in (*leaf.shards, *leaf.others)]


def _mapped(leaf: Any, buffer: np.ndarray) -> Any:
    own = tuple((index, place.of(buffer)) for index, place in leaf.shards)
    return replace(leaf, shards=own, others=())


def shard_key(name: str, index: Index, shape: Sequence[int]) -> Key:
    """Return the key of a shard of an array of that name and shape."""
    ranges = (each.indices(n)[:2] for each, n in zip(index, shape, strict=True))
    return name, tuple(ranges)


# -- Memory ---------------------------------------------------------------------------------------


def too_little(needed: int, shared: int, memory: int) -> str | None:
    """Return why buffers are not to be taken; None if they are.

    Half of what is free is left to all others: in shared memory to Ray's object store.

    Args:
        needed: the bytes of the buffers.
        shared: the bytes that are free in shared memory.
        memory: the bytes that this process can still take.
    """
    for what, free in (("of shared memory", shared), ("of memory", memory)):
        if 2 * needed > free:
            return f"two copies of its share take {_mib(needed)}, and {_mib(free)} {what} are free"
    return None


def memory_left(
    cgroups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes that this process can still take, by the system and by its cgroups."""
    left: int = psutil.virtual_memory().available
    lines = cgroups.read_text().splitlines() if cgroups.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        names, top = (_CGROUP_1, root / "memory") if controllers else (_CGROUP_2, root)
        own = top / path.lstrip("/")
        for folder in (own, *own.parents[: len(own.parts) - len(top.parts)]):
            with suppress(OSError, ValueError):  # none such here, or no limit: "max"
                left = min(left, _left_in(folder, *names))
    return left


def _left_in(cgroup: Path, limit: str, used: str, cached: str) -> int:
    most, now = (int((cgroup / name).read_text()) for name in (limit, used))
    amounts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return most - now + int(amounts.get(cached, 0))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


# -- Reading one ----------------------------------------------------------------------------------


def buffer_paths(folder: Path, rank: int) -> list[Path]:
    """Return the files of a worker's buffers."""
    return [folder / f"share_{rank}.{number}" for number in range(BUFFERS)]


def header_of(buffer: Path) -> Path:
    """Return the file that describes a buffer while it is whole."""
    return buffer.with_name(buffer.name + _HEADER)


def intact(folder: Path, rank: int) -> dict[int, Shards]:
    """Return a worker's snapshots that are whole and of which no bit has changed, by step."""
    return dict(filter(None, map(read_snapshot, buffer_paths(folder, rank))))


def newest_of_all(steps: Sequence[Sequence[int]], after: int, most: int) -> int | None:
    """Return the newest step that each worker has a snapshot of, if there is one.

    Args:
        steps: the steps of each worker's snapshots.
        after: the step of the checkpoint, which an older snapshot is no better than.
        most: the newest step that is recorded.
    """
    common = set.intersection(*map(set, steps))
    return max((step for step in common if after < step <= most), default=None)


def read_snapshot(buffer: Path) -> tuple[int, Shards] | None:
    """Return a buffer's snapshot and its step; None if it is not whole, or not what was written."""
    header = _read_header(header_of(buffer))
    if header is None:
        return None
    shards: dict[Key, np.ndarray] = {}
    digest = xxhash.xxh3_128()
    with open(buffer, "r+b") as file:
        if os.fstat(file.fileno()).st_size != header["size"]:
            return None
        contents = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    for name, ranges, start, shape, dtype in header["shards"]:
        value = ShardPlace(start, tuple(shape), dtype).of(contents)
        shards[name, tuple(map(tuple, ranges))] = value
        digest.update(value.reshape(-1).view(np.uint8).data)
    return (header["step"], shards) if digest.hexdigest() == header["digest"] else None


def restored(shards: Shards, like: TrainState) -> TrainState:
    """Return the state of a snapshot that was taken under the same plan.

    Args:
        shards: the snapshot's; its buffer may be written afterwards.
        like: the state's shapes, a tree of `jax.ShapeDtypeStruct` with shardings.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(stored_parts(like))
    named = [(flat_name(path), leaf) for path, leaf in leaves]
    wanted = [each for name, leaf in named for each in _shards_here(name, leaf)]
    # JAX may take a NumPy array's memory for its own array, and the buffer is written again.
    values = [np.array(shards[key]).reshape(shape) for key, shape, _ in wanted]
    on_devices = iter(jax.device_put(values, [device for *_, device in wanted]))
    arrays = [_assembled(leaf, on_devices) for _, leaf in named]
    return replace(like, **jax.tree.unflatten(tree, arrays))


def _shards_here(name: str, leaf: Any) -> list[tuple[Key, tuple[int, ...], jax.Device]]:
    """Return for each device here the key and the shape of its shard of an array."""
    if isinstance(leaf, StackedArray):
        found = []
        for i, row in enumerate(leaf.rows):
            for (_, ranges), shape, device in _shards_here(name, row):
                found.append(((name, ((i, i + 1), *ranges)), shape, device))
        return found
    shape = leaf.sharding.shard_shape(leaf.shape)
    where = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return [(shard_key(name, index, leaf.shape), shape, device) for device, index in where.items()]


def _assembled(leaf: Any, on_devices: Any) -> Any:
    if isinstance(leaf, StackedArray):
        return StackedArray([_assembled(row, on_devices) for row in leaf.rows])
    count = len(leaf.sharding.addressable_devices)
    own = [next(on_devices) for _ in range(count)]
    return jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, own, dtype=leaf.dtype
    )


def _write_header(path: Path, step: int, layout: ShareLayout, digest: str) -> None:
    shards = [[name, ranges, *place] for (name, ranges), place in layout.places]
    header = {"step": step, "size": layout.size, "digest": digest, "shards": shards}
    text = json.dumps(header).encode()
    own = xxhash.xxh3_128_hexdigest(text).encode()
    write_whole(path, own + b"\n" + text, private=True, durable=False)


def _read_header(path: Path) -> dict[str, Any] | None:
    """Return a header; None if it is not there, or not what was written."""
    try:
        own, _, text = read_bytes(path).partition(b"\n")
    except FileNotFoundError:
        return None
    if own != xxhash.xxh3_128_hexdigest(text).encode():
        return None
    header: dict[str, Any] = parse_json(text)
    return header
