"""Snapshots: a worker's share of the state in host memory, taken while training continues.

A share is each distinct shard of the state on this process's devices, so that the worker that takes
this one's place needs nothing else. It lies in one of two buffers. These are files of the host's
folder in that of `scratch.shared_memory`, which outlives the workers, is this user's alone, and is
removed at the end of the driver (on other nodes, of the task that lends the node), however that
comes.

Beside a buffer lies its header (`share_file`), which is deleted before the first byte is written,
and comes back by a rename after the last one: a snapshot that was cut anywhere is not there, and
one with a changed bit is not taken. The older of the two buffers is written, so one is whole at any
time, and so are two of the neighbour's copies. The driver asks for the next once the one before is
whole in all places: else the hosts that are left may have no step in common.

What no other host holds as a replica is then copied to the next host's folder. So when a host is
lost with its folder, the others still have all of the state. It is put together from the pieces of
all (`pieces`), under any plan.

Training waits for no copy: a thread copies NumPy's views of the arrays, whose memory XLA leaves as
it is while a view lives; the next step then writes elsewhere. So for that time the share takes the
memory of one more. Arrays of other devices than CPUs are fetched before the next step.

Checkpoints are written from the same buffers; one that is being read for that is not written. A
run that keeps no snapshots has one buffer without a name, for its checkpoints.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import psutil
import xxhash

from launcher.base import write_whole
from launcher.checkpoint.pieces import Moment, Piece
from launcher.checkpoint.shards import outline_share, view_share
from launcher.checkpoint.share_file import (
    HEADER,
    ShareLayout,
    header_of,
    lay_out,
    read_header,
)
from launcher.checkpoint.train_state import TrainState
from launcher.checkpoint.write import stored_parts
from launcher.cluster.ray import NodeFolder

LOCK = "lock.memory"
BUFFERS = "share.0", "share.1"
_COPY = "copy"  # of a neighbour's, and then the moment
_PART = 2**22  # bytes that are copied and digested at a time, so that they are still in the cache
# A cgroup's limit of memory, its use, and the part of it that is cached files, which give way: the
# names of version 2, and of version 1.
_CGROUP_2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostPlace:
    """The place of a host's folder.

    Emulated hosts share a machine, and each has a folder there; they share those of hosts that are
    there no more, too.

    Attributes:
        rank: the host's number.
        index: its number among the hosts on its machine.
        count: the number of these.
    """

    rank: int
    index: int = 0
    count: int = 1

    def own(self, memory: Path) -> Path:
        """Return its folder in that of the machine."""
        return memory / f"host_{self.rank}"

    def all(self, memory: Path) -> list[Path]:
        """Return the folders in its charge: its own, and of hosts before a plan was changed."""
        found = [path for path in memory.glob("host_*") if path.name[5:].isdecimal()]
        return [path for path in found if int(path.name[5:]) % self.count == self.index]


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
        attempt: the number of the attempt that took it.
        is_held: whether it must stay as it is.
        contents: the memory, uint8 [bytes].
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.step, self.attempt, self.is_held = path, -1, -1, False
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
        found = header and after >= 0 and read_header(header)
        self.step, self.attempt = found["moment"] if found else (self.step, self.attempt)
        if after < 0 or self.step > after:
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
    """The buffers of a worker, and the threads that copy to them, and from them to another host.

    Args:
        folder: the folder of the buffers' files; None for one buffer that no other process finds.
        attempt: the number of the run's attempt.

    Attributes:
        newest: the step of the newest one that is complete, and copied to another host; 0: none.
    """

    def __init__(self, folder: Path | None = None, attempt: int = 0) -> None:
        paths = [None] if folder is None else [folder / name for name in BUFFERS]
        self._buffers = [Buffer(path) for path in paths]
        self._folder, self._attempt = folder, attempt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._layout: ShareLayout | None = None
        self._copied: tuple[NodeFolder, ShareLayout] | None = None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._sent = Future[None]()  # the newest copy
        self._sent.set_result(None)
        # With the state itself, copies of its arrays that JAX keeps would stay.
        self._taken: tuple[weakref.ref[TrainState], Future[Buffer]] | None = None
        self._seconds = deque[float]()  # of copies that `spent` has not returned
        self.newest = 0

    @property
    def sizes(self) -> dict[Piece, int]:
        """The bytes of each piece of a share."""
        assert self._layout is not None
        return {piece: place.size for piece, place in self._layout.places}

    def reserve(self, state: TrainState, step: int) -> str | None:
        """Take the memory for shares of a state, unless there is too little; return why not.

        Snapshots of steps after `step` are dropped: the run takes another way from there.
        """
        assert self._folder is not None
        for buffer in self._buffers:
            buffer.forget(after=step)
        self._layout = layout = lay_out(outline_share(stored_parts(state)))
        needed = len(self._buffers) * layout.size
        if problem := self._too_little("two copies of its share take", needed):
            return problem
        try:
            for buffer in self._buffers:
                buffer.reserve(layout.size)
        except OSError as error:
            return f"{self._folder} cannot take {_mib(needed)} ({error.strerror})"
        return None

    def exchange(self, pieces: Collection[Piece], there: NodeFolder, size: int) -> str | None:
        """Copy some pieces of each snapshot to another host, and take those of a third one here.

        Args:
            pieces: the pieces to copy.
            there: the folder to copy them to.
            size: the bytes that are taken here.

        Returns:
            Why they cannot be taken: there is too little memory.
        """
        assert self._layout is not None
        assert self._folder is not None
        wanted = set(pieces)
        chosen = [each for each in self._layout.places if each[0] in wanted]
        self._copied = (there, ShareLayout({}, self._layout.shapes, chosen)) if chosen else None
        if not size:
            for path in self._folder.glob(f"{_COPY}.*"):
                path.unlink(missing_ok=True)
            return None
        needed = 2 * (self._layout.size + size)
        return self._too_little("two copies of its share and two of a neighbour's take", needed)

    def _too_little(self, what: str, needed: int) -> str | None:
        assert self._folder is not None
        shared, taken = os.statvfs(self._folder), 0
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # the end of a neighbour's copy
                taken += path.stat().st_blocks * 512
        free = shared.f_bavail * shared.f_frsize
        return too_little(what, needed, free + taken, memory_left() + taken)

    def take(self, step: int, state: TrainState) -> Future[Buffer]:
        """Begin to copy a state; return once the next step may overwrite its arrays.

        It first waits for the copy of the one before. A state that is copied is not copied again.
        """
        if self._taken is not None:
            newest, taken = self._taken
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
        self._taken = weakref.ref(state), taken
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

    def settle(self) -> None:
        """Wait until the newest one is complete, and at the other host."""
        if self._taken is not None:
            self._taken[1].result()
        self._sent.result()

    def close(self) -> None:
        """Stop the thread and give the memory back."""
        self._thread.shutdown()
        self._sender.shutdown()
        for buffer in self._buffers:
            buffer.remove()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # with a neighbour's copy

    def _copy(self, step: int, views: dict[str, Any], layout: ShareLayout, waited: float) -> Buffer:
        self._sent.result()
        began = time.thread_time()
        free = (buffer for buffer in self._buffers if not buffer.is_held)
        buffer = min(free, key=lambda each: (each.step, each.attempt))
        buffer.forget()
        buffer.reserve(layout.size)
        starts = [place.start for _, place in layout.places]
        digest = copy_to(buffer.contents, _values(views), starts)
        spent = waited + time.thread_time() - began
        with suppress(OSError):  # the folder is full: a restart takes the one before
            if buffer.path is not None:
                header = layout.header(Moment(step, self._attempt), digest)
                write_whole(header_of(buffer.path), header, private=True, durable=False)
            buffer.step, buffer.attempt = step, self._attempt
            if self._copied is not None:
                self._sent = self._sender.submit(self._send, step, buffer, spent, *self._copied)
                return buffer
        self._complete(step, spent)
        return buffer

    def _send(
        self, step: int, buffer: Buffer, spent: float, there: NodeFolder, layout: ShareLayout
    ) -> None:
        """Copy pieces of a buffer to another host, in which they lie as here, with holes between.

        That takes no memory for the holes.
        """
        began, digest = time.thread_time(), xxhash.xxh3_128()
        moment = Moment(step, self._attempt)
        chunks = [(place.start, place.bytes_of(buffer.contents)) for _, place in layout.places]
        for _, value in chunks:
            digest.update(value.data)
        try:
            header = layout.header(moment, digest.hexdigest())
            spent += there.write(f"{_COPY}.{moment.step}.{moment.attempt}", chunks, header)
        except OSError as error:
            _log.warning(f"step {step} is not copied to another host: {error}")
        self._complete(step, spent + time.thread_time() - began)

    def _complete(self, step: int, seconds: float) -> None:
        self._seconds.append(seconds)
        self.newest = step


def keep_snapshots(
    memory: Path, place: HostPlace, state: TrainState, moment: Moment
) -> Snapshots | str:
    """Return a worker's buffers with the memory for its share of a state, or why there are none.

    Args:
        memory: the machine's folder in shared memory.
        place: the worker's place there. Snapshots of a worker that was there before stay.
        state: the present state.
        moment: the number of finished steps, and of the attempt that begins.
    """
    own = place.own(memory)
    with open(memory / LOCK, "a") as lock:  # the workers of a machine, one after the other
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [folder for folder in place.all(memory) if folder != own]
        if others and not own.exists():
            others.pop().rename(own)  # it may be needed until a new one is whole
        own.mkdir(mode=0o700, exist_ok=True)
        for folder in others:
            shutil.rmtree(folder, ignore_errors=True)
        for header in own.glob(f"{_COPY}.*{HEADER}"):
            if not (found := read_header(header)) or found["moment"][0] > moment.step:
                header.unlink(missing_ok=True)
        snapshots = Snapshots(own, moment.attempt)
        problem = snapshots.reserve(state, moment.step)
        if problem is not None:
            snapshots.close()
    return snapshots if problem is None else problem


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


# -- Memory ---------------------------------------------------------------------------------------


def too_little(what: str, needed: int, shared: int, memory: int) -> str | None:
    """Return why buffers are not to be taken; None if they are.

    Half of what is free is left to all others: in shared memory to Ray's object store.

    Args:
        what: the buffers, as a clause without its end.
        needed: the bytes of the buffers.
        shared: the bytes that are free in shared memory.
        memory: the bytes that this process can still take.
    """
    for kind, free in (("of shared memory", shared), ("of memory", memory)):
        if 2 * needed > free:
            return f"{what} {_mib(needed)}, and {_mib(free)} {kind} are free"
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
