"""Run a compiled step: the loop that follows the dispatch table.

Everything is compiled before the first call. A call flattens its arguments, runs a table of
pre-bound instructions without waiting for any of them, and returns the arrays of the results, each
on its stage's devices.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from launcher.arrays.stacked_array import StackedArray, StackedSharding
from launcher.base import Span, SpanRecorder
from launcher.base.jax_compat import is_nan_error, moves_are_guarded
from launcher.plan import Plan
from launcher.runtime.emit.instructions import Instruction, Run
from launcher.runtime.emit.listing import Emitted
from launcher.runtime.execute.caller import Caller, with_copies
from launcher.runtime.execute.dispatch_table import Entry, build_table, peak_bytes, rows_here
from launcher.runtime.observe.recording import StageTimes, StepRecording, time_stages
from launcher.runtime.programs.device_meshes import DeviceMeshes
from launcher.runtime.programs.state import create_state
from launcher.runtime.transport.servers import Servers
from launcher.runtime.transport.transfer import is_here, place_array
from launcher.runtime.transport.transport import Transport
from launcher.trace import Interface, TracedStep


class StepServices(NamedTuple):
    """What a step's instructions use beside its programs.

    Attributes:
        transport: moves arrays between processes.
        servers: the parameter servers.
        spans: records what runs beside the devices.
    """

    transport: Transport | None
    servers: Servers | None
    spans: SpanRecorder


class Executable:
    """A compiled step, called like the step that was traced. See `compile_step`.

    Args:
        step: the step, cut as the plan says.
        plan: the plan.
        emitted: its programs and instructions.
        placement: the devices of its meshes.
        programs: the compiled programs, by name.
        services: what its instructions use.

    Attributes:
        plan: the plan that it runs.
        compile_seconds: how long compilation took.
        peak_bytes: the most that a step puts on any device here, as its programs report; None if
            they do not.
        in_shardings: a pytree like the arguments: where each leaf lives; None for the batch, and a
            `StackedSharding` for one whose rows are apart.
        used: the argument leaves that a call reads or returns, in any process, but for the batch.
        spans: takes what `record` and the threads of the runtime record.
    """

    def __init__(
        self,
        step: TracedStep,
        plan: Plan,
        emitted: Emitted,
        placement: DeviceMeshes,
        programs: dict[str, Any],
        services: StepServices,
    ) -> None:
        self.plan, self.compile_seconds = plan, 0.0
        self._interface = whole = step.whole
        self._caller = Caller(whole, step.stacks)
        self._transport, self._servers, self.spans = services
        self._slicing, self._rank = emitted.slicing, emitted.rank
        self._placement, self._compiled = placement, programs
        peaks = peak_bytes(emitted, placement, programs)
        self.peak_bytes = None if peaks is None else max(peaks)
        self._table = build_table(emitted, placement, programs, whole.donated, *services)
        where = {i: placement.sharding(slot) for i, slot in emitted.arguments}
        flat = [where.get(i) for i in range(len(whole.in_avals))]
        stacked = self._caller.by_leaf(flat, StackedSharding)
        self.in_shardings = self._caller.arguments(stacked)
        used = emitted.used
        any_used = self._caller.by_leaf([i in used for i in range(len(flat))], any)
        self.used = frozenset(i for i, is_used in enumerate(any_used) if is_used)

    def __call__(self, *args: Any) -> Any:
        """Run one step and return without waiting for it. Donated arguments are consumed.

        Raises:
            TypeError: the arguments' structure, shapes or dtypes are not those that were traced.
            FloatingPointError: a task made a NaN, under `jax_debug_nans`.
        """
        if moves_are_guarded():  # stages send what they make to others whatever the user guards
            with jax.transfer_guard_device_to_device("allow"):
                return self._run(args)
        return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Any:
        slots = self._fill(args)
        key = self._first_key()
        entry: Entry | None = None
        try:
            for entry in self._table.entries:
                _, call, inputs, outputs, keyed = entry
                if call is None:
                    for i in inputs:
                        slots[i] = None
                    continue
                arrays = [slots[i] for i in inputs]
                results = call(key, arrays) if keyed else call(*arrays)
                for i, value in zip(outputs, results):  # noqa: B905 (the step's hot loop)
                    slots[i] = value
        except Exception as error:
            if is_nan_error(error):
                raise _nan_error(entry and entry.instruction) from None
            raise
        return self._results(slots)

    def profile(self, *args: Any) -> tuple[Any, StageTimes]:
        """Run one step, waiting for every task; return its results and the time of each stage."""
        slots = self._fill(args)
        key = self._first_key()
        jax.block_until_ready([x for x in slots if x is not None])
        times = time_stages(self._table.entries, slots, key, self.plan)
        return self._results(slots), times

    def record(
        self, *args: Any, profiled: bool = True, keep: Path | None = None
    ) -> tuple[Any, Callable[[], list[Span]]]:
        """Run one step and record when each of its parts ran; see `runtime.recording`.

        Args:
            *args: the arguments of a call. Donated ones are consumed.
            profiled: whether JAX's profiler is used. Without it the lanes of the devices are
                missing.
            keep: the folder that the profiler's trace is kept in, if it is.

        Returns:
            The results, which are there, and a function that returns the spans: it may take a
                second and be called in another thread, once.
        """
        if not self.spans.is_on:
            self.spans.start()
        with self.spans.span("recording", "begins"):  # no part of the step
            slots = self._fill(args)
            there = [x for x in slots if x is not None and x.addressable_shards]
            jax.block_until_ready(there)
            recording = StepRecording(self.spans, profiled, keep)
        try:
            with jax.transfer_guard_device_to_device("allow"):
                recording.run(self._table.entries, slots, self._first_key())
            results = self._results(slots)
            jax.block_until_ready([x for x in jax.tree.leaves(results) if x.addressable_shards])
        except BaseException as error:
            recording.cancel()
            if isinstance(error, Exception) and is_nan_error(error):
                raise _nan_error(recording.newest) from None
            raise
        recording.end()
        own, number = self.spans.take(), {device: n for n, device in enumerate(jax.devices())}
        devices = [[number[d] for d in mesh.local_devices] for mesh in self._placement.meshes]
        # Each worker of parameter servers is a JAX of its own, whose devices begin with 0.
        first = self._servers.rank * len(number) if self._servers else 0
        return results, lambda: own + recording.finish(self.hlo_text, devices, first)

    def warm_up(self, *args: Any) -> None:
        """Run one step on copies of the donated arguments, wait for it and drop its results.

        The first run of a program opens connections and allocates; the next call has no such work.
        """
        leaves, tree = jax.tree.flatten(args)
        donated = self._caller.by_leaf(self._interface.donated, any)
        for i, is_donated in enumerate(donated):
            leaves[i] = with_copies(leaves[i]) if is_donated else leaves[i]
        results = jax.tree.leaves(self(*jax.tree.unflatten(tree, leaves)))
        jax.block_until_ready([array for array in results if array.addressable_shards])

    def create(self, init: Callable[..., Any], *args: Any) -> Any:
        """Make the step's first argument in place: `init(*args)`, with every leaf on its own stage.

        Args:
            init: the function that makes it.
            *args: the arguments of `init`.

        Raises:
            TypeError: `init` does not return what the step takes.
        """
        return create_state(init, args, self.in_shardings[0], self._placement.meshes)

    def batch_rows(self) -> np.ndarray | None:
        """Return which rows of the batch a call reads here, int64 [rows]; None: maybe any.

        Of the others a batch that is given may hold anything.
        """
        return rows_here(self._table.batches, self._interface.in_avals, self._rows)

    def hlo_text(self) -> dict[str, str]:
        """Return the compiled programs as text, by name."""
        return {name: compiled.as_text() for name, compiled in self._compiled.items()}

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that each program needs on every device of its mesh, by program name.

        They are those of its arguments, results and temporaries; a donated buffer is counted once.
        """
        return {
            name: found.argument_size_in_bytes
            + found.output_size_in_bytes
            + found.temp_size_in_bytes
            - found.alias_size_in_bytes
            for name, compiled in self._compiled.items()
            if (found := compiled.memory_analysis()) is not None
        }

    def _first_key(self) -> int:
        """Reserve the keys of a call's transfers and return the first, or number the call."""
        if self._servers:
            return self._servers.reserve()
        return self._transport.reserve(self._table.num_keys) if self._transport else 0

    def _fill(self, args: tuple[Any, ...]) -> list[Any]:
        leaves = self._caller.leaves(args)
        slots = self._table.slots.copy()
        moved = []
        for i, slot, sharding in self._table.arguments:
            leaf = leaves[i]
            if getattr(leaf, "sharding", None) == sharding:
                if leaf.is_deleted():  # JAX would end the process
                    raise _donated_before(self._interface, i)
                slots[slot] = leaf
            else:
                if isinstance(leaf, jax.core.Tracer):
                    raise transformed_error()
                whole = leaf.value if isinstance(leaf, StackedArray) else leaf
                moved.append((whole, slot, sharding))
        for i, slot, sharding, axis in self._table.batches:
            if isinstance(leaves[i], jax.core.Tracer):
                raise transformed_error()
            rows = leaves[i] if axis is None else self._rows(leaves[i], axis)
            moved.append((rows, slot, sharding))
        mine = [x for x in moved if x[2].is_fully_addressable]
        if mine:
            values, places, shardings = zip(*mine, strict=True)
            for slot, value in zip(places, jax.device_put(values, shardings), strict=True):
                slots[slot] = value
        for value, slot, sharding in moved:
            if not sharding.is_fully_addressable and is_here(sharding):
                slots[slot] = place_array(value, sharding)
        return slots

    def _rows(self, leaf: Any, axis: int) -> Any:
        """Return what is read here of a batch leaf, stacked along an axis."""
        return self._slicing.own(self._slicing.stack(leaf, axis), self._rank)

    def _results(self, slots: list[Any]) -> Any:
        fixed = self._table.fixed
        flat = [fixed[i] if s is None else slots[s] for i, s in enumerate(self._table.results)]
        for i in self._table.shared:
            flat[i] = flat[i].copy()
        return self._caller.results(flat)


def _donated_before(whole: Interface, leaf: int) -> ValueError:
    numbered = jax.tree.unflatten(whole.in_tree, range(len(whole.in_avals)))
    path, _ = jax.tree_util.tree_leaves_with_path(numbered)[leaf]
    return ValueError(
        f"argument{jax.tree_util.keystr(path)} was donated to an earlier call, which used it up; "
        "give the one that the call returned, or leave the argument out of donate_argnums"
    )


def _nan_error(instruction: Instruction | None) -> FloatingPointError:
    what = "an argument of the step"
    if isinstance(instruction, Run):
        task = instruction.task
        what = f"the {task.kind.value} pass of stage {task.stage}" if task else "the update"
    return FloatingPointError(
        f"jax_debug_nans found a NaN in {what}; jax.jit of the same step finds the line"
    )


def transformed_error() -> TypeError:
    """Return the error of a step that is called under a transformation of JAX's."""
    return TypeError(
        "a parallelized step is compiled already, and cannot be called under jax.jit, jax.vmap or "
        "another transformation; call it from plain Python"
    )
