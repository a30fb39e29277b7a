"""Record one step: when each of its instructions ran, on every device and in every lane.

The step runs as usual: it is dispatched without waiting for any of its parts, so overlaps remain.
It only begins when what this process sent before has ended, and the next step is sent
when it has ended, so that no time of a neighbour is in it. Where the times are from:

- Runs of programs: on CPU devices, or where its trace is asked for, JAX's profiler
  (`device_profile`), from the first operation on a device to the last one, with the collectives
  inside. Where gradients are summed inside a backward pass, the pass ends with its last operation
  that waits for no sum, and each sum has a span of its own in another lane: from when the device
  reaches it, so waiting for the other devices is in it. The tracer of a GPU may take minutes to
  stop. Without it a run lasts from when it was sent off, its inputs were there and the one before
  it had ended, to when a thread that waits for one of its results saw it.
- Transfers: from when the arrays were made and the transfer was sent off, to when a thread that
  waits for nothing else saw them arrive. Between processes the sender knows the one and the
  receiver the other; `report.timeline` joins them.
- The calling thread, which sends the instructions off: this host's clock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax

from launcher.base import Span, SpanRecorder
from launcher.plan import Plan
from launcher.runtime.device_profile import DeviceProfile, ProgramRun, ProgramText, read_program
from launcher.runtime.dispatch_table import Entry
from launcher.runtime.emit.instructions import Instruction, Run, Send
from launcher.schedule import Task

_MOST_WATCHERS = 32  # transfers that are waited for at once
_INSIDE = 0.1  # of its time: a run that ends so soon after its call was in it


@dataclass(frozen=True)
class _Sent:
    """A transfer that was sent off.

    Attributes:
        instruction: the transfer.
        number: its number among those between the same meshes, the same in all processes.
        start: when it was sent off.
        reads: the places of the entries that made its arrays.
        leaves: whether arrays leave from this process.
        arrival: when they are there, if any arrive in this process.
    """

    instruction: Send
    number: int
    start: int
    reads: list[int]
    leaves: bool
    arrival: Future[int | None] | None


class StepRecording:
    """The recording of one step: `run` it, `end` it, then `finish`, perhaps in another thread.

    Args:
        recorder: takes the spans; it may have some already, and other threads may add to it.
        profiled: whether JAX's profiler is used.
        keep: the folder that the profiler's trace is kept in, if it is.

    Attributes:
        newest: the instruction that was sent off last.
    """

    def __init__(
        self, recorder: SpanRecorder, profiled: bool = True, keep: Path | None = None
    ) -> None:
        self._recorder = recorder
        profiled = profiled and (keep is not None or jax.default_backend() == "cpu")
        self._profile = DeviceProfile(keep) if profiled else None
        # by place: when its call began and ended, the places it reads of, and when it was there
        self._ends: dict[int, tuple[int, int, list[int], Future[int | None]]] = {}
        self._watchers = ThreadPoolExecutor(_MOST_WATCHERS, thread_name_prefix="watcher")
        self.newest: Instruction | None = None
        self._runs: dict[int, Run] = {}
        self._transfers: dict[int, _Sent] = {}
        self._ended: int | None = None
        self._made_by: dict[int, int] = {}  # by slot: the place of the entry that filled it
        self._reader: dict[int, int] = {}  # by place: that of the first run that reads its arrays
        self._count: Counter[tuple[int, int]] = Counter()

    def run(self, entries: Sequence[Entry], slots: list[Any], key: int) -> None:
        """Follow the entries of a dispatch table, as a call does."""
        watched = {} if self._profile else _watched(entries)
        for place, entry in enumerate(entries):
            if entry.call is None:
                entry.run(slots, key)
                continue
            arrays = [slots[i] for i in entry.inputs]
            self.newest = entry.instruction
            start, name = time.time_ns(), _name(entry)
            with jax.profiler.TraceAnnotation(name):  # in the profiler's own trace
                results = entry.run(slots, key)
            self._recorder.add("dispatch", name, start, sent := time.time_ns())
            if isinstance(entry.instruction, Run):
                self._runs[place] = entry.instruction
                if self._profile is None:
                    told_by = min((results[k] for k in watched[place]), key=attrgetter("nbytes"))
                    ready = self._watchers.submit(_arrival, [told_by])
                    self._ends[place] = start, sent, self._reads(entry), ready
                for i in entry.inputs:
                    self._reader.setdefault(self._made_by.get(i, -1), place)
            elif isinstance(entry.instruction, Send):
                self._watch(place, entry, arrays, results, start)
            self._made_by.update(dict.fromkeys(entry.outputs, place))

    def _reads(self, entry: Entry) -> list[int]:
        """Return the places of the entries that made what an entry takes, before it runs."""
        return [self._made_by[i] for i in entry.inputs if i in self._made_by]

    def _watch(
        self, place: int, entry: Entry, arrays: Sequence[Any], results: Sequence[Any], start: int
    ) -> None:
        x = entry.instruction
        assert isinstance(x, Send)
        here = [array for array in results if array.addressable_shards]
        self._transfers[place] = _Sent(
            instruction=x,
            number=self._count[x.src, x.dst],
            start=start,
            reads=self._reads(entry),
            leaves=any(array is not None and array.addressable_shards for array in arrays),
            arrival=self._watchers.submit(_arrival, here) if here else None,
        )
        self._count[x.src, x.dst] += 1

    def cancel(self) -> None:
        """Stop after a failure."""
        self._recorder.take()
        self._watchers.shutdown(wait=False)
        if self._profile:
            self._profile.stop()

    def end(self) -> None:
        """Note that the step has ended on this process's devices: later runs are not its own."""
        self._ended = time.time_ns()

    def finish(
        self,
        texts: Callable[[], Mapping[str, str]],
        devices_of: Sequence[Sequence[int]],
        first: int = 0,
    ) -> list[Span]:
        """Return the spans of runs and transfers, after `end`.

        Args:
            texts: returns the compiled programs as text, by name (`Executable.hlo_text`).
            devices_of: of each mesh, the positions in `jax.devices()` of this process's devices.
            first: the number that the plan gives the first of `jax.devices()`.
        """
        arrived = {n: x.arrival.result() for n, x in self._transfers.items() if x.arrival}
        assert self._ended is not None
        spans: list[Span] = []
        profiled = self._profile.stop() if self._profile else []
        profiled = [run for run in profiled if run.start < self._ended]
        programs = {name: read_program(text) for name, text in texts().items()} if profiled else {}
        modules = {name: program.module for name, program in programs.items()}
        ends: dict[int, int] = {}
        starts: dict[int, int] = {}
        for place, run in matched(self._runs, modules, devices_of, profiled):
            instruction = self._runs[place]
            numbered = replace(run, device=first + run.device)
            spans += run_spans(instruction, numbered, programs[instruction.program])
            ends[place] = max(run.end, ends.get(place, 0))
            starts[place] = max(run.start, starts.get(place, 0))
        ends |= {place: end for place, end in arrived.items() if end}
        if self._profile is None:
            spans += self._seen_from_here([[first + d for d in of] for of in devices_of], ends)
        for place, sent in self._transfers.items():
            ready = max([sent.start, *(ends[k] for k in sent.reads if k in ends)])
            there, read = arrived.get(place), starts.get(self._reader.get(place, -1))
            if read and sent.arrival:
                # A busy machine may wake the thread that waits late, or when they are used up.
                there = min(there or read, read)
            spans += _transfer_spans(sent, ready, there)
        self._watchers.shutdown()
        return spans

    def _seen_from_here(
        self, devices_of: Sequence[Sequence[int]], ends: dict[int, int]
    ) -> list[Span]:
        """Return the spans of runs without the profiler, and add their ends to those of transfers.

        Results that a later run has used up tell no end: such a run is part of the span of the next
        one that does, which says how many it covers.
        """
        found, before = [], dict.fromkeys(range(len(devices_of)), 0)
        covered, unseen = Counter[int](), dict[int, int]()
        for place, (start, sent, reads, arrival) in sorted(self._ends.items()):
            run, end = self._runs[place], arrival.result()
            covered[run.mesh] += 1
            ready = max([before[run.mesh], *(ends[k] for k in reads if k in ends)])
            # A call may wait for inputs, and run the program itself: that ends with the call.
            is_inside = end is None or end - sent <= _INSIDE * (end - ready)
            begun = ready if ready > start and is_inside else max(ready, sent)
            if end is None:
                unseen.setdefault(run.mesh, begun)
                continue
            ends[place], begun = end, unseen.pop(run.mesh, begun)
            kind, about = _kind(run)
            about |= {"covers": covered.pop(run.mesh)}
            for device in devices_of[run.mesh]:
                lane = f"device {device}"
                found.append(Span(lane, _run_name(run), min(begun, end), end, kind, about))
            before[run.mesh] = end
        return found


def _watched(entries: Sequence[Entry]) -> dict[int, list[int]]:
    """Return by place the positions of a run's results that can tell its end.

    All of a program's results are there at once. One that a later run uses up may be gone before a
    thread waits for it; to hold more than one, and a small one, would keep memory in use.
    """
    found, used_up = {}, set[int]()
    for place, entry in reversed([*enumerate(entries)]):
        if isinstance(run := entry.instruction, Run):
            every = range(len(entry.outputs))
            found[place] = [k for k in every if entry.outputs[k] not in used_up] or [*every]
            used_up -= set(entry.outputs)
            used_up |= {run.inputs[k] for k in run.donated}
    return found


def _arrival(arrays: list[jax.Array]) -> int | None:
    """Wait for arrays and return when they were there; None if they are used up already."""
    try:
        jax.block_until_ready(arrays)
    except RuntimeError:  # deleted: donated to a program that was sent off since
        return None
    return time.time_ns()


def _name(entry: Entry) -> str:
    x = entry.instruction
    if isinstance(x, Run):
        return _run_name(x)
    return f"mesh {x.src} to mesh {x.dst}" if isinstance(x, Send) else type(x).__name__.lower()


def _run_name(run: Run) -> str:
    if (task := run.task) is None:
        return run.program
    _, _, piece = run.program.partition(".piece.")
    what = f"stage {task.stage} {task.kind.value} {task.microbatch}"
    return f"{what} piece {piece.partition('.')[0]}" if piece else what


def matched(
    runs: Mapping[int, Run],
    modules: Mapping[str, str],
    devices_of: Sequence[Sequence[int]],
    profiled: Sequence[ProgramRun],
) -> Iterator[tuple[int, ProgramRun]]:
    """Yield each run that a profile shows with the place of the instruction that started it.

    A device runs a program as often as the instructions say, and in their order.

    Args:
        runs: the instructions by their place, in order.
        modules: the name of each program as a compiled one.
        devices_of: the devices of each mesh.
        profiled: what ran, in order.
    """
    started: dict[tuple[str, int], list[int]] = {}
    for place, run in runs.items():
        for device in devices_of[run.mesh]:
            started.setdefault((modules.get(run.program, ""), device), []).append(place)
    ran: dict[tuple[str, int], list[ProgramRun]] = {}
    for found in profiled:
        ran.setdefault((found.module, found.device), []).append(found)
    for key, places in started.items():
        yield from zip(places, ran.get(key, []), strict=False)


def _kind(instruction: Run) -> tuple[str, dict[str, Any]]:
    """Return the kind of a run's span, and what it is about."""
    about: dict[str, Any] = {"mesh": instruction.mesh, "program": instruction.program}
    if instruction.task is None:
        return "update" if "update" in instruction.program else "other", about
    about |= {"stage": instruction.task.stage, "microbatch": instruction.task.microbatch}
    as_one = instruction.program.endswith("forward_backward")
    return "forward_backward" if as_one else instruction.task.kind.value, about


def run_spans(instruction: Run, run: ProgramRun, program: ProgramText) -> list[Span]:
    """Return the spans of a program's run on a device: its own, and one for each collective.

    Args:
        instruction: the instruction that started it.
        run: the run.
        program: what the program's text says of its operations.
    """
    kind, about = _kind(instruction)
    name, lane = _run_name(instruction), f"device {run.device}"
    sums = {op for op, one in program.collectives.items() if one.bucket is not None}
    own = [op for op in run.operations if op.name not in sums | program.after_sums]
    own = own or run.operations
    found = [Span(lane, name, min(op.start for op in own), max(op.end for op in own), kind, about)]
    for op in run.operations:
        if (one := program.collectives.get(op.name)) is None:
            continue
        of = {**about, "of": name, "collective": one.kind}
        if one.bucket is None:
            found.append(Span(f"{lane} collectives", one.kind, op.start, op.end, "collective", of))
        else:
            what = f"bucket {one.bucket}"
            found.append(Span(f"{lane} gradient sums", what, op.start, op.end, "gradient sum", of))
    return found


def _transfer_spans(sent: _Sent, ready: int, arrived: int | None) -> list[Span]:
    """Return a transfer's span, as far as this process knows it: `known` says how far.

    Args:
        sent: the transfer.
        ready: when its arrays were made and it was sent off.
        arrived: when they were there, if they arrived here and it is known.
    """
    x = sent.instruction
    about = {"src_mesh": x.src, "dst_mesh": x.dst, "number": sent.number}
    name = f"mesh {x.src} to mesh {x.dst}"
    if arrived is None:
        known, end = "start", ready
        if not sent.leaves or sent.arrival is not None:
            return []
    else:
        known, end = ("both" if sent.leaves else "end"), max(ready, arrived)
    return [Span("transfers", name, ready, end, "transfer", {**about, "known": known})]


@dataclass(frozen=True)
class StageTimes:
    """Times of one step in which every task was waited for.

    Attributes:
        stage_seconds: the busy seconds of each stage, those of several losses one after another
            (`Plan.all_stages`); 0.0 for stages of other processes, of which nothing is known here.
        task_seconds: the seconds of each task; those of other processes are absent.
    """

    stage_seconds: tuple[float, ...]
    task_seconds: dict[Task, float]


def time_stages(entries: Sequence[Entry], slots: list[Any], key: int, plan: Plan) -> StageTimes:
    """Follow the entries of a dispatch table and wait for each; return the times of the stages.

    Args:
        entries: the entries.
        slots: the arrays, which are there.
        key: the key of the step's call.
        plan: the plan.
    """
    seconds: dict[Task, float] = {}
    stages = [stage.devices for stage in plan.all_stages]
    first_stage = [stages.index(devices) for devices in plan.all_meshes]
    busy = [0.0] * len(stages)
    for entry in entries:
        start = time.perf_counter()
        jax.block_until_ready([x for x in entry.run(slots, key) if x.addressable_shards])
        taken = time.perf_counter() - start
        if isinstance(entry.instruction, Run):
            task = entry.instruction.task
            stage = task.stage if task else first_stage[entry.instruction.mesh]
            busy[stage] += taken
            if task is not None:
                seconds[task] = seconds.get(task, 0.0) + taken
    return StageTimes(tuple(busy), seconds)
