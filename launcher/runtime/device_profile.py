"""Device operations recorded by JAX's profiler, and the collectives in a program's text.

Nothing has to be waited for, and what overlaps is seen to overlap. On CPU devices every operation
is an event that names its program, its run and its device; of other devices none is read yet.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax

from launcher.runtime.programs.collectives import GRADIENT_SUM

_BEGIN = "launcher.begin"  # an event that tells the profiler's clock
_OTHERS = "end: ", "ThreadpoolListener"  # most of the events, which are slow to look into
STOP_SECONDS = 60.0  # for the profiler to stop
STOPPING = "launcher: the profiler stops"  # the thread's name
_MODULE = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COLLECTIVE = re.compile(
    r"\b(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start|-done)?\("
)
_NAME = re.compile(r"%([\w.\-]+)")
_BUCKET = re.compile(rf'op_name="[^"]*\b{GRADIENT_SUM}_(\d+)\b')
_log = logging.getLogger(__name__)


class Operation(NamedTuple):
    """An operation of a compiled program, as it ran on one device.

    Attributes:
        name: its name in the compiled program.
        start: when it began, in nanoseconds since the epoch.
        end: when it had ended.
    """

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class ProgramRun:
    """A run of a compiled program on one device.

    Attributes:
        module: the name of the compiled program.
        device: the device's position in `jax.devices()`.
        operations: what ran, at least one operation.
    """

    module: str
    device: int
    operations: list[Operation]

    @property
    def start(self) -> int:
        """When the first operation began."""
        return min(operation.start for operation in self.operations)

    @property
    def end(self) -> int:
        """When the last operation had ended."""
        return max(operation.end for operation in self.operations)


def _stopped_in_time() -> bool:
    """End the profiler's session; False, with a warning, if that fails or takes too long.

    The tracer of a GPU has been seen to take seven minutes; it is left alone then.
    """
    failed: list[Exception] = []

    def stop() -> None:
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # a full disk; the user has stopped it
            failed.append(error)

    stopping = threading.Thread(target=stop, name=STOPPING, daemon=True)
    stopping.start()
    stopping.join(STOP_SECONDS)
    if failed:
        _log.warning(f"the timeline has no lanes of devices: {failed[0]}")
        return False
    if stopping.is_alive():
        _log.warning(f"JAX's profiler has not stopped for {STOP_SECONDS:.0f} s: its trace is lost")
        return False
    return True


class DeviceProfile:
    """A session of JAX's profiler, from its making to `stop`.

    There can be one session in a process: while the user has another one, this one is empty.

    Args:
        keep: the folder that the trace is kept in, for TensorBoard or Perfetto; None: it is read
            and deleted.
    """

    def __init__(self, keep: Path | None = None) -> None:
        self._folder: ExitStack | None = None
        self._path = keep
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            if any(thread.name == STOPPING for thread in threading.enumerate()):
                raise RuntimeError("the one before still stops")  # starting would wait for it
            folder = ExitStack()
            if keep is None:
                temporary = TemporaryDirectory(prefix="launcher-profile-")
                self._path = Path(folder.enter_context(temporary))
            else:  # JAX would fail only at the end, and keep its session
                keep.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self._path), profiler_options=options)
            self._folder = folder
        except (OSError, RuntimeError) as error:  # a full disk; another session
            lost = f"no trace is written to {keep}, and " if keep else ""
            _log.warning(f"{lost}the timeline has no lanes of devices: {error}")
        self._began = time.time_ns()
        with jax.profiler.TraceAnnotation(_BEGIN):
            pass

    def stop(self) -> list[ProgramRun]:
        """End the session and return the runs of all programs, in the order of their start."""
        if self._folder is None or self._path is None:
            return []
        with self._folder, warnings.catch_warnings():
            # Of jaxlib's own types, made at first use: since 0.11 it aborts where that is an error.
            warnings.simplefilter("ignore", DeprecationWarning)
            if not _stopped_in_time():
                return []
            found = [run for path in self._path.rglob("*.xplane.pb") for run in self._read(path)]
        return sorted(found, key=lambda run: run.start)

    def _read(self, path: Path) -> list[ProgramRun]:
        events = [
            event
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            for line in plane.lines
            for event in line.events
            if not event.name.startswith(_OTHERS)
        ]
        epoch = self._began - next(event.start_ns for event in events if event.name == _BEGIN)
        number = {device: n for n, device in enumerate(jax.devices())}
        device = {d.id: number[d] for d in jax.local_devices()}
        found: dict[tuple[Any, ...], ProgramRun] = {}
        for event in events:
            stats = dict(event.stats)
            if "hlo_op" not in stats or stats.get("device_ordinal") not in device:
                continue
            module, at = str(stats["hlo_module"]), device[stats["device_ordinal"]]
            run = found.setdefault((module, stats.get("run_id"), at), ProgramRun(module, at, []))
            start = int(epoch + event.start_ns)
            end = start + int(event.duration_ns)
            run.operations.append(Operation(str(stats["hlo_op"]), start, end))
        return list(found.values())


@dataclass(frozen=True)
class CollectiveOperation:
    """A collective of a compiled program.

    Attributes:
        kind: "all-reduce", "reduce-scatter" and so on.
        bucket: the number of the bucket of gradients that it sums, or None.
    """

    kind: str
    bucket: int | None


@dataclass(frozen=True)
class ProgramText:
    """What the text of a compiled program says.

    Attributes:
        module: the program's name.
        collectives: its collectives, by the name of the operation.
        after_sums: the operations that wait for a sum of gradients, such as those that unpack it.
    """

    module: str
    collectives: dict[str, CollectiveOperation]
    after_sums: frozenset[str]


def read_program(text: str) -> ProgramText:
    """Read the text of a compiled program, whose operations stand after their operands."""
    collectives: dict[str, CollectiveOperation] = {}
    after: set[str] = set()
    sums: set[str] = set()
    for line in text.splitlines():
        if (match := _OPERATION.match(line)) is None:
            continue
        name, rest = match.groups()
        if not sums.union(after).isdisjoint(_NAME.findall(rest)):
            after.add(name)
        if found := _COLLECTIVE.search(rest):
            bucket = _BUCKET.search(rest)
            kind = found.group(1)
            collectives[name] = CollectiveOperation(kind, int(bucket.group(1)) if bucket else None)
            if bucket:
                sums.add(name)
    module = _MODULE.search(text)
    return ProgramText(module.group(1) if module else "", collectives, frozenset(after - sums))
