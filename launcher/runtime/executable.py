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
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.plan import Plan, PlanError
from launcher.plan.schedule import Task
from launcher.plan.sharding.layout import AXES, mesh_sizes
from launcher.runtime.collectives import partition_spec
from launcher.runtime.emit import emit
from launcher.runtime.instructions import Instruction, Run, Send
from launcher.runtime.transfer import LocalTransfer, RemoteTransfer, absent, is_here, place
from launcher.runtime.transport import Transport
from launcher.trace.step import TracedStep


@dataclass(frozen=True)
class StageTimes:
    """One step measured task by task, each waited for.

    `stage_seconds`: busy seconds of each stage; `task_seconds`: of each task. Of the stages and
    tasks of other processes nothing is known here: 0.0, and absent.
    """

    stage_seconds: tuple[float, ...]
    task_seconds: dict[Task, float]


class _Row(NamedTuple):
    """One row of the table: what it is, what to call, from which slots into which."""

    instruction: Instruction
    call: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def compile_step(
    step: TracedStep,
    plan: Plan,
    devices: Sequence[jax.Device],
    transport: Transport | None = None,
) -> Executable:
    """Compile a traced step for `plan` on `devices` (numbered as the plan numbers them).

    With devices of several processes every process compiles, in the same order, the same steps;
    each builds only the programs of its own stages. `transport` moves arrays between them.

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
    return Executable(step.cut_at(plan.layer_ends), plan, devices, transport)


class Executable:
    """Call it like the step that was traced. See `compile_step`.

    Attributes:
        plan: what it runs. compile_seconds: how long compiling took.
        in_shardings: a pytree like the arguments: where each leaf lives; None for the batch.
    """

    def __init__(
        self,
        step: TracedStep,
        plan: Plan,
        devices: Sequence[jax.Device],
        transport: Transport | None,
    ) -> None:
        started = time.perf_counter()
        self.plan = plan
        self._step = step
        self._transport = transport
        self._namespace = transport.open() if transport else 0
        self._calls = 0
        self._emitted = emit(step, plan)
        shapes = {
            stage.devices: tuple(mesh_sizes(stage.logical_mesh, plan.num_replicas).values())
            for stage in plan.stages
        }
        self._meshes = [
            Mesh(np.array([devices[d] for d in mesh]).reshape(shapes[mesh]), AXES)
            for mesh in plan.meshes
        ]
        self._offered = {
            slot
            for x in self._emitted.instructions
            if isinstance(x, Send) and not self._is_local(x)
            for slot in x.inputs
        }
        self._compiled = self._compile_all()
        self._bind()
        self.compile_seconds = time.perf_counter() - started

    # -- building --------------------------------------------------------------------------------

    def _sharding(self, slot: int) -> NamedSharding:
        held = self._emitted.slots[slot]
        return NamedSharding(self._meshes[held.mesh], partition_spec(held.spec))

    def _compile_all(self) -> dict[str, Any]:
        first: dict[str, Run] = {}
        for instruction in self._emitted.instructions:
            if isinstance(instruction, Run) and self._runs_here(instruction.mesh):
                first.setdefault(instruction.program, instruction)
        lowered = {name: self._lower(run) for name, run in first.items()}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(lambda x: x.compile(), lowered.values())
            return dict(zip(lowered, compiled, strict=True))

    def _lower(self, run: Run) -> Any:
        def abstract(slot: int) -> jax.ShapeDtypeStruct:
            aval = self._emitted.slots[slot].aval
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=self._sharding(slot))

        # What another process may not have pulled yet must not be written over.
        donated = [k for k in run.donated if run.inputs[k] not in self._offered]
        fun = self._emitted.programs[run.program]
        jitted = jax.jit(
            lambda *flat: tuple(fun(*flat)),
            donate_argnums=donated,
            out_shardings=tuple(self._sharding(slot) for slot in run.outputs),
            keep_unused=True,
        )
        return jitted.lower(*(abstract(slot) for slot in run.inputs))

    def _runs_here(self, mesh: int) -> bool:
        return is_here(NamedSharding(self._meshes[mesh], PartitionSpec()))

    def _bind(self) -> None:
        """Turn the instructions into the table that a call follows: this process's part of them,
        with everything that can be known beforehand looked up."""
        emitted = self._emitted
        self._offset = 0  # of a transfer's keys among those of one call
        self._table: list[_Row] = []
        for x in emitted.instructions:
            if isinstance(x, Run):
                if self._runs_here(x.mesh):
                    self._table.append(_Row(x, self._compiled[x.program], x.inputs, x.outputs))
            elif isinstance(x, Send):
                transfer = self._transfer(x)  # elsewhere too: all count the same keys
                if self._runs_here(x.src) or self._runs_here(x.dst):
                    self._table.append(_Row(x, transfer, x.inputs, x.outputs))
            else:
                self._table.append(_Row(x, None, x.slots, ()))
        self._template: list[Any] = [None] * len(emitted.slots)
        for value, slot in emitted.constants:
            if is_here(self._sharding(slot)):
                self._template[slot] = place(value, self._sharding(slot))
        self._fixed: dict[int, jax.Array] = {}  # results that no call computes here
        for i, (result, literal, mesh) in enumerate(emitted.results):
            if result is None:
                sharding = NamedSharding(self._meshes[mesh], PartitionSpec())
                value = np.asarray(literal.val, literal.aval.dtype)
                here = is_here(sharding)
                self._fixed[i] = place(value, sharding) if here else absent(value, sharding)
            elif not is_here(self._sharding(result)):
                self._fixed[i] = absent(emitted.slots[result].aval, self._sharding(result))
        self._shared = self._results_shared()
        self._arguments = [(i, slot, self._sharding(slot)) for i, slot in emitted.arguments]
        where = {i: sharding for i, _, sharding in self._arguments}
        flat = [where.get(i) for i in range(len(self._step.in_avals))]
        self.in_shardings = jax.tree.unflatten(self._step.in_tree, flat)

    def _results_shared(self) -> list[int]:
        """Results whose array somebody else holds too: this object, the caller, another result.
        They are copied, since the caller may donate any result to the next call."""
        emitted = self._emitted
        held = {slot for _, slot in emitted.constants}
        held |= {slot for i, slot in emitted.arguments if not self._step.donated[i]}
        shared = []
        for i, (slot, _, mesh) in enumerate(emitted.results):
            if self._runs_here(mesh) and (slot is None or slot in held):
                shared.append(i)
            if slot is not None:
                held.add(slot)
        return shared

    def _is_local(self, send: Send) -> bool:
        devices = [d for mesh in (send.src, send.dst) for d in self._meshes[mesh].devices.flat]
        return len({d.process_index for d in devices}) == 1

    def _transfer(self, send: Send) -> LocalTransfer | RemoteTransfer:
        src = [self._sharding(slot) for slot in send.inputs]
        dst = [self._sharding(slot) for slot in send.outputs]
        if self._is_local(send):
            return LocalTransfer(dst)
        if self._transport is None:
            raise PlanError("stages of different processes need a transport to exchange arrays")
        avals = [self._emitted.slots[slot].aval for slot in send.inputs]
        transfer = RemoteTransfer(avals, src, dst, self._transport, self._offset)
        self._offset += transfer.num_keys
        return transfer

    # -- running ---------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Run one step; returns without waiting. Donated arguments are consumed. Among several
        processes a step is begun when the one before is complete here.

        Raises:
            TypeError: the arguments' structure, shapes or dtypes are not those that were traced.
        """
        if self._transport is not None:
            # A process that runs ahead of the others fills the queues of its own devices, and a
            # collective between these can then wait for ever (seen with two devices a process).
            leaves = jax.tree.leaves(args)
            jax.block_until_ready([leaves[i] for i, _, s in self._arguments if is_here(s)])
        slots = self._fill(args)
        key = self._next_key()
        for _, call, inputs, outputs in self._table:
            if call is None:
                for i in inputs:
                    slots[i] = None
                continue
            arrays = [slots[i] for i in inputs]
            results = call(key, arrays) if type(call) is RemoteTransfer else call(*arrays)
            for i, value in zip(outputs, results):  # noqa: B905 (the step's hot loop)
                slots[i] = value
        return self._results(slots)

    def profile(self, *args: Any) -> tuple[Any, StageTimes]:
        """Run one step waiting for every task: its results, and how long each stage was busy."""
        slots = self._fill(args)
        key = self._next_key()
        seconds: dict[Task, float] = {}
        busy = [0.0] * len(self.plan.stages)
        jax.block_until_ready([x for x in slots if x is not None])
        for instruction, call, inputs, outputs in self._table:
            if call is None:
                for i in inputs:
                    slots[i] = None
                continue
            arrays = [slots[i] for i in inputs]
            start = time.perf_counter()
            results = call(key, arrays) if type(call) is RemoteTransfer else call(*arrays)
            jax.block_until_ready([x for x in results if x.addressable_shards])
            taken = time.perf_counter() - start
            for i, value in zip(outputs, results, strict=True):
                slots[i] = value
            if isinstance(instruction, Run):
                task = instruction.task
                stage = task.stage if task else self.plan.mesh_of.index(instruction.mesh)
                busy[stage] += taken
                if task is not None:
                    seconds[task] = taken
        return self._results(slots), StageTimes(tuple(busy), seconds)

    def _next_key(self) -> int:
        """The first key of a call's transfers: unique to this executable and call, and the same in
        every process."""
        self._calls += 1
        return (self._namespace << 48) + self._calls * self._offset

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
        mine = [x for x in moved if x[2].is_fully_addressable]
        if mine:
            values, places, shardings = zip(*mine, strict=True)
            for slot, value in zip(places, jax.device_put(values, shardings), strict=True):
                slots[slot] = value
        for value, slot, sharding in moved:
            if not sharding.is_fully_addressable and is_here(sharding):
                slots[slot] = place(value, sharding)
        return slots

    def _results(self, slots: list[Any]) -> Any:
        flat = [
            self._fixed[i] if slot is None or i in self._fixed else slots[slot]
            for i, (slot, _, _) in enumerate(self._emitted.results)
        ]
        for i in self._shared:
            flat[i] = flat[i].copy()
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
        avals = jax.tree.leaves(shapes)
        made = [None if is_here(s) else absent(a, s) for a, s in zip(avals, shardings, strict=True)]

        def on_stage(mesh: Mesh) -> None:
            mine = [i for i, s in enumerate(shardings) if s.mesh == mesh and is_here(s)]
            if not mine:
                return

            def some(*inputs: Any) -> list[Any]:
                leaves = jax.tree.leaves(init(*inputs))
                return [leaves[i] for i in mine]

            whole = NamedSharding(mesh, PartitionSpec())
            here = jax.tree.map(lambda x: place(x, whole), args)
            values = jax.jit(some, out_shardings=[shardings[i] for i in mine])(*here)
            for i, value in zip(mine, values, strict=True):
                made[i] = value

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(on_stage, self._meshes))
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    def hlo_text(self) -> dict[str, str]:
        """The compiled programs as text, by name."""
        return {name: compiled.as_text() for name, compiled in self._compiled.items()}


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b)  # mypy cannot compare JAX's PyTreeDef
