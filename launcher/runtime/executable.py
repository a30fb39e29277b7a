"""A compiled step: programs for every stage, and the loop that follows the instruction list.

Everything is compiled before the first call. A call flattens its arguments, runs a table of
pre-bound instructions without waiting for any of them, and returns the results' arrays, each on
its stage's devices. Imported by `train` and the public front.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.plan import Plan, PlanError
from launcher.plan.schedule import SCHEDULES, Task
from launcher.plan.simulate import TimedTask, bubble_fraction, simulate
from launcher.runtime.emit import emit
from launcher.runtime.instructions import Free, Run, Send
from launcher.runtime.stage_programs import DATA
from launcher.trace.step import TracedStep

_SPECS = {
    "whole": PartitionSpec(),
    "replicas": PartitionSpec(DATA),
    "stacked": PartitionSpec(None, DATA),
}


@dataclass(frozen=True)
class StageTimes:
    """One step measured task by task, each waited for.

    `stage_seconds`: busy seconds of each stage. `timeline`: the schedule under these times.
    """

    stage_seconds: tuple[float, ...]
    timeline: tuple[TimedTask, ...]
    bubble_fraction: float


def compile_step(step: TracedStep, plan: Plan, devices: Sequence[jax.Device]) -> Executable:
    """Compile a traced step for `plan` on `devices` (numbered as the plan numbers them).

    Raises:
        PlanError: the plan is another program's, or there are fewer devices than it needs.
    """
    if plan.fingerprint != step.fingerprint:
        raise PlanError(
            f"this plan was made for another program (fingerprint {plan.fingerprint}, this one is "
            f"{step.fingerprint}); plan again"
        )
    if len(devices) < plan.num_devices:
        raise PlanError(f"the plan needs {plan.num_devices} devices; here are {len(devices)}")
    return Executable(step, plan, devices)


class Executable:
    """Call it like the step that was traced. See `compile_step`.

    Attributes:
        plan: what it runs. compile_seconds: how long compiling took.
        in_shardings: a pytree like the arguments: where each leaf lives; None for the batch.
    """

    def __init__(self, step: TracedStep, plan: Plan, devices: Sequence[jax.Device]) -> None:
        started = time.perf_counter()
        self.plan = plan
        self._step = step
        self._emitted = emit(step, plan)
        self._meshes = [
            Mesh(
                np.array([devices[d] for d in stage.devices]).reshape(stage.logical_mesh),
                (DATA, "model"),
            )
            for stage in plan.stages
        ]
        self._compiled = self._compile_all()
        self._bind()
        self.compile_seconds = time.perf_counter() - started

    # -- building --------------------------------------------------------------------------------

    def _sharding(self, slot: int) -> NamedSharding:
        held = self._emitted.slots[slot]
        return NamedSharding(self._meshes[held.stage], _SPECS[held.layout])

    def _compile_all(self) -> dict[str, Any]:
        first: dict[str, Run] = {}
        for instruction in self._emitted.instructions:
            if isinstance(instruction, Run):
                first.setdefault(instruction.program, instruction)
        lowered = {name: self._lower(run) for name, run in first.items()}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(lambda x: x.compile(), lowered.values())
            return dict(zip(lowered, compiled, strict=True))

    def _lower(self, run: Run) -> Any:
        def abstract(slot: int) -> jax.ShapeDtypeStruct:
            aval = self._emitted.slots[slot].aval
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=self._sharding(slot))

        fun = self._emitted.programs[run.program]
        jitted = jax.jit(
            lambda *flat: tuple(fun(*flat)),
            donate_argnums=run.donated,
            out_shardings=tuple(self._sharding(slot) for slot in run.outputs),
            keep_unused=True,
        )
        return jitted.lower(*(abstract(slot) for slot in run.inputs))

    def _bind(self) -> None:
        """Turn the instructions into the table that `_run` follows, and fill constant slots."""
        emitted = self._emitted
        self._table: list[tuple[Any, tuple[int, ...], Any]] = []
        for x in emitted.instructions:
            if isinstance(x, Run):
                self._table.append((self._compiled[x.program], x.inputs, x.outputs))
            elif isinstance(x, Send):
                shardings = [self._sharding(slot) for slot in x.outputs]
                self._table.append((_Transfer(shardings), x.inputs, x.outputs))
            else:
                self._table.append((None, x.slots, ()))
        self._template: list[Any] = [None] * len(emitted.slots)
        for value, slot in emitted.constants:
            self._template[slot] = jax.device_put(value, self._sharding(slot))
        literals: dict[int, Any] = {}
        for i, (result, literal, stage) in enumerate(emitted.results):
            if result is None:
                whole = NamedSharding(self._meshes[stage], PartitionSpec())
                literals[i] = jax.device_put(np.asarray(literal.val, literal.aval.dtype), whole)
        self._literals = literals
        self._arguments = [(i, slot, self._sharding(slot)) for i, slot in emitted.arguments]
        where = {i: sharding for i, _, sharding in self._arguments}
        flat = [where.get(i) for i in range(len(self._step.in_avals))]
        self.in_shardings = jax.tree.unflatten(self._step.in_tree, flat)

    # -- running ---------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Run one step; returns without waiting. Donated arguments are consumed.

        Raises:
            TypeError: the arguments' structure, shapes or dtypes are not those that were traced.
        """
        slots = self._fill(args)
        for call, inputs, outputs in self._table:
            if call is None:
                for i in inputs:
                    slots[i] = None
            else:
                results = call(*[slots[i] for i in inputs])
                for i, value in zip(outputs, results):  # noqa: B905 (the step's hot loop)
                    slots[i] = value
        return self._results(slots)

    def profile(self, *args: Any) -> tuple[Any, StageTimes]:
        """Run one step waiting for every task: its results, and how long each stage was busy."""
        slots = self._fill(args)
        num_stages = len(self.plan.stages)
        busy = [0.0] * num_stages
        seconds: dict[Task, float] = {}
        jax.block_until_ready([x for x in slots if x is not None])
        for instruction, (call, inputs, outputs) in zip(
            self._emitted.instructions, self._table, strict=True
        ):
            if isinstance(instruction, Free):
                for i in inputs:
                    slots[i] = None
                continue
            start = time.perf_counter()
            results = jax.block_until_ready(call(*[slots[i] for i in inputs]))
            for i, value in zip(outputs, results, strict=True):
                slots[i] = value
            if isinstance(instruction, Run):
                taken = time.perf_counter() - start
                busy[instruction.stage] += taken
                if instruction.task is not None:
                    seconds[instruction.task] = taken
        schedule = SCHEDULES[self.plan.schedule](num_stages, self.plan.num_micro_batches)
        timeline = simulate(schedule, lambda task: seconds.get(task, 0.0))
        times = StageTimes(tuple(busy), tuple(timeline), bubble_fraction(timeline, num_stages))
        return self._results(slots), times

    def _fill(self, args: tuple[Any, ...]) -> list[Any]:
        leaves, tree = jax.tree.flatten(args)
        if not _equal(tree, self._step.in_tree):
            raise TypeError(f"the step was compiled for arguments {self._step.in_tree}, not {tree}")
        slots = self._template.copy()
        moved = []
        for i, slot, sharding in self._arguments:
            leaf = leaves[i]
            if getattr(leaf, "sharding", None) == sharding:
                slots[slot] = leaf
            else:
                moved.append((leaf, slot, sharding))
        for i, slot, axis in self._emitted.batches:
            rows = leaves[i] if axis is None else self._emitted.slicing.stack(leaves[i], axis)
            moved.append((rows, slot, self._sharding(slot)))
        if moved:
            values, places, shardings = zip(*moved, strict=True)
            for slot, value in zip(places, jax.device_put(values, shardings), strict=True):
                slots[slot] = value
        return slots

    def _results(self, slots: list[Any]) -> Any:
        flat = [
            self._literals[i] if slot is None else slots[slot]
            for i, (slot, _, _) in enumerate(self._emitted.results)
        ]
        return jax.tree.unflatten(self._step.out_tree, flat)

    # -- state -----------------------------------------------------------------------------------

    def create(self, init: Callable[..., Any], *args: Any) -> Any:
        """Make the step's first argument in place: `init(*args)`, every leaf on its own stage.

        Raises:
            TypeError: `init` does not return what the step takes.
        """
        expected = self.in_shardings[0]
        shapes = jax.eval_shape(init, *args)
        if not _equal(jax.tree.structure(shapes), jax.tree.structure(expected)):
            raise TypeError("init does not return the structure that the step takes")
        shardings = jax.tree.leaves(expected)
        made: list[Any] = [None] * len(shardings)

        def on_stage(mesh: Mesh) -> None:
            mine = [i for i, s in enumerate(shardings) if s.mesh == mesh]
            if not mine:
                return

            def some(*inputs: Any) -> list[Any]:
                leaves = jax.tree.leaves(init(*inputs))
                return [leaves[i] for i in mine]

            here = jax.device_put(args, NamedSharding(mesh, PartitionSpec()))
            for i, value in zip(
                mine, jax.jit(some, out_shardings=[shardings[i] for i in mine])(*here), strict=True
            ):
                made[i] = value

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(on_stage, self._meshes))
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    def hlo_text(self) -> dict[str, str]:
        """The compiled programs as text, by name."""
        return {name: compiled.as_text() for name, compiled in self._compiled.items()}


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b)  # mypy cannot compare JAX's PyTreeDef


class _Transfer:
    """Copy arrays to another stage of the same process."""

    def __init__(self, shardings: list[NamedSharding]) -> None:
        self._shardings = shardings

    def __call__(self, *arrays: Any) -> list[Any]:
        return jax.device_put(list(arrays), self._shardings)
