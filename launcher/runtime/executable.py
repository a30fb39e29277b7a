"""Run a compiled step: the loop that follows the dispatch table, between a caller and its arrays.

Everything is compiled before the first call. A call flattens its arguments, runs a table of
pre-bound instructions without waiting for any of them, and returns the arrays of the results, each
on its stage's devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.arrays.stacked_array import StackedArray, StackedSharding, rows_in, stacked_in
from launcher.base import Span
from launcher.base.jax_compat import accept_as_array, is_nan_error, moves_are_guarded
from launcher.plan import Plan
from launcher.runtime.compiled_report import CompiledStep, compiled_report, read_compiled
from launcher.runtime.dispatch_table import (
    Entry,
    StepServices,
    build_table,
    peak_bytes,
    rows_here,
)
from launcher.runtime.emit.instructions import Emitted, Instruction, Run
from launcher.runtime.programs.device_meshes import DeviceMeshes
from launcher.runtime.recording import StageTimes, StepRecording, time_stages
from launcher.runtime.transport.transfer import absent, is_here, place_array
from launcher.trace import (
    Interface,
    Jaxpr,
    Stacks,
    TracedStep,
    jaxpr_as_fun,
    make_jaxpr_and_shape,
    with_rows_apart,
)

accept_as_array(StackedArray, lambda array: array.value)


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
        self._transport, self._servers, self.spans, _ = services
        self._slicing = plan.parts[0].assignment.slicing
        self._rank = self._servers.rank if self._servers else 0
        self._emitted, self._placement, self._compiled = emitted, placement, programs
        peaks = peak_bytes(emitted, placement, programs)
        self.peak_bytes = None if peaks is None else max(peaks)
        self._table = build_table(emitted, placement, programs, whole.donated, services)
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
        self, *args: Any, profiled: bool = True, keep: Path | None = None, waits: bool = True
    ) -> tuple[Any, Callable[[], list[Span]]]:
        """Run one step and record when each of its parts ran; see `runtime.recording`.

        Args:
            *args: the arguments of a call. Donated ones are consumed.
            profiled: whether JAX's profiler is used. Without it the lanes of the devices are
                missing.
            keep: the folder that the profiler's trace is kept in, if it is.
            waits: whether to wait for the results. Otherwise the profiler must not be used.

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
            if waits:
                leaves = jax.tree.leaves(results)
                jax.block_until_ready([x for x in leaves if x.addressable_shards])
        except BaseException as error:
            recording.cancel()
            if isinstance(error, Exception) and is_nan_error(error):
                raise _nan_error(recording.newest) from None
            raise
        recording.end()
        own, number = self.spans.take(), {device: n for n, device in enumerate(jax.devices())}
        devices = [[number[d] for d in mesh.local_devices] for mesh in self._placement.meshes]
        # Each worker of parameter servers is a JAX of its own, whose devices begin with 0.
        first = self._rank * len(number)
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

    def compiled(self) -> CompiledStep:
        """Return what the compiler says of this process's programs, as they run."""
        names: dict[int, tuple[str, ...]] = {}
        for name, program in self._compiled.items():
            names[id(program)] = (*names.get(id(program), ()), name)
        mesh_of = {x.program: x.mesh for x in self._emitted.instructions if isinstance(x, Run)}
        meshes, text = self._placement.meshes, self.hlo_text()
        distinct = {
            (first, *rest): read_compiled(
                self._compiled[first], text[first], meshes[mesh_of[first]]
            )
            for first, *rest in names.values()
        }
        parts = self.plan, self._emitted, self._placement, distinct, self.compile_seconds
        return CompiledStep(compiled_report(*parts), text)

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


class Caller:
    """The caller's side of a step.

    Args:
        whole: the arguments and results of the programs.
        stacks: those of the caller, if they differ.
    """

    def __init__(self, whole: Interface, stacks: Stacks | None) -> None:
        self._differs = stacks is not None
        serialization = sys.modules.get("flax.serialization")  # a script's that has it writes these
        if self._differs and serialization is not None:
            serialization.register_serialization_state(
                StackedArray, lambda array: array.value, lambda _, value: value, override=True
            )
        counts = ((0,) * len(flat) for flat in (whole.in_avals, whole.outvars))
        self._stacks = stacks or Stacks(whole.in_tree, whole.out_tree, *counts)

    def leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of a call's arguments, as the programs take them.

        Raises:
            TypeError: the arguments have another structure.
        """
        leaves, tree = jax.tree.flatten(args)
        if tree != (in_tree := self._stacks.in_tree):
            raise TypeError(f"the step was compiled for arguments {in_tree}, not {tree}")
        return rows_in(leaves, self._stacks.in_rows) if self._differs else leaves

    def by_leaf(self, flat: Sequence[Any], join: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
        """Return something of each argument of the programs for each leaf of the caller's.

        Args:
            flat: what it is of each.
            join: makes one of those of the rows of an array.
        """
        return stacked_in(flat, self._stacks.in_rows, join)

    def arguments(self, leaves: Sequence[Any]) -> Any:
        """Return something of each leaf of the caller's arguments, in their structure."""
        return jax.tree.unflatten(self._stacks.in_tree, leaves)

    def results(self, flat: Sequence[Any]) -> Any:
        """Unflatten the programs' outputs into the caller's result tree."""
        out = stacked_in(flat, self._stacks.out_rows) if self._differs else flat
        return jax.tree.unflatten(self._stacks.out_tree, out)


def with_copies(leaf: Any) -> Any:
    """Return an array whose parts in this process are copies."""
    if isinstance(leaf, StackedArray):
        return StackedArray([with_copies(row) for row in leaf.rows])
    if not isinstance(leaf, jax.Array) or not leaf.addressable_shards:
        return leaf
    if leaf.is_fully_addressable:
        return leaf.copy()
    shards = [shard.data.copy() for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def create_state(
    init: Callable[..., Any], args: tuple[Any, ...], shardings: Any, meshes: Sequence[Mesh]
) -> Any:
    """Compute `init(*args)` with these shardings, as a pytree like its result.

    Each mesh computes its own leaves, so that no process needs memory for those of others.

    Args:
        init: the function that makes the state.
        args: its arguments, which every process has.
        shardings: the sharding of each leaf, a pytree like the state; a `StackedSharding` for one
            whose rows are apart.
        meshes: the meshes that the leaves live on.

    Raises:
        TypeError: `init` does not return what the step takes.
    """
    program, shapes = make_jaxpr_and_shape(init, *args)  # once for all meshes
    expected: Any = jax.tree.structure(shardings)
    if expected != jax.tree.structure(shapes):
        raise TypeError("init does not return the structure that the step takes")
    program, counts = _with_rows(program, jax.tree.leaves(shardings))
    avals = [v.aval for v in program.outvars]
    wanted = jax.tree.leaves(jax.tree.map(_rows_of, shardings))
    made = [None if is_here(s) else absent(a, s) for a, s in zip(avals, wanted, strict=True)]

    def on_mesh(mesh: Mesh) -> None:
        mine = [i for i, s in enumerate(wanted) if s.mesh == mesh and is_here(s)]
        if not mine:
            return

        def some(*inputs: Any) -> list[Any]:
            leaves = jaxpr_as_fun(program)(*jax.tree.leaves(inputs))
            return [leaves[i] for i in mine]

        whole = NamedSharding(mesh, PartitionSpec())
        here = jax.tree.map(lambda x: place_array(x, whole), args)
        values = jax.jit(some, out_shardings=[wanted[i] for i in mine])(*here)
        for i, value in zip(mine, values, strict=True):
            made[i] = value

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(on_mesh, meshes))
    return jax.tree.unflatten(expected, stacked_in(made, counts))


def _rows_of(sharding: Any) -> Any:
    return sharding.rows if isinstance(sharding, StackedSharding) else sharding


def _with_rows(program: Jaxpr, shardings: Sequence[Any]) -> tuple[Jaxpr, tuple[int, ...]]:
    """Return a program that returns the rows of results that are to lie apart, and their numbers.

    A scan that makes such results is its iterations, so that a mesh only runs those of its rows.
    """
    counts = tuple(len(s.rows) if isinstance(s, StackedSharding) else 0 for s in shardings)
    if not any(counts):
        return program, counts
    return with_rows_apart(program, counts), counts
