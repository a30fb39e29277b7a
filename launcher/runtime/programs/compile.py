"""Compile a traced step for a plan, at once or in the background.

Its programs are compiled in parallel, from shapes alone, and equal ones once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from launcher.base import SpanRecorder
from launcher.base.jax_compat import (
    bound_to_devices,
    compiled,
    free_of_devices,
    loaded_for,
    overlap_options,
    with_barriers_kept,
)
from launcher.partition import Between
from launcher.plan import Plan, PlanError
from launcher.runtime.dispatch_table import StepServices
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Emitted, Run, Send
from launcher.runtime.executable import Executable
from launcher.runtime.programs.choices import KernelChoices
from launcher.runtime.programs.device_meshes import (
    DeviceMeshes,
    place_on_devices,
    place_without_devices,
)
from launcher.runtime.transport.servers import Servers
from launcher.runtime.transport.transport import Transport
from launcher.trace import TracedStep

_LOWERED_AS = {"gpu": "cuda"}  # the name of a platform where JAX lowers for it
_Placed = tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]  # arguments, results


def compile_step(
    step: TracedStep,
    plan: Plan,
    devices: Sequence[jax.Device],
    transport: Transport | None = None,
    servers: Servers | None = None,
) -> Executable:
    """Compile a traced step for a plan.

    If the devices belong to several processes, every process compiles the same steps in the same
    order, and each builds only the programs of its own stages. By a plan with parameter servers,
    each worker compiles its own share of the replicas.

    Args:
        step: the traced step, on the whole batch.
        plan: the plan to run it by.
        devices: the devices, numbered as the plan numbers them; by a plan with parameter servers,
            this worker's own.
        transport: what moves arrays between processes.
        servers: the parameter servers, for a plan with some.

    Raises:
        PlanError: the plan is for another program, there are fewer devices than it needs, or other
            workers.
    """
    services = StepServices(transport, servers, SpanRecorder())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return StepCompilation(step, plan, devices, services, pool).result()


class StepCompilation:
    """A step whose programs are lowered, and on their way to be compiled.

    Args:
        step: the traced step, on the whole batch.
        plan: the plan to run it by.
        devices: the devices, as for `compile_step`, which says what may be wrong with these.
        services: what its instructions use.
        pool: compiles the programs.
        ahead: what `lower_ahead` has returned for these, if it was called.

    Attributes:
        programs: the compilation of each distinct program of this process.
    """

    def __init__(
        self,
        step: TracedStep,
        plan: Plan,
        devices: Sequence[jax.Device],
        services: StepServices,
        pool: Executor,
        ahead: EmittedStep | None = None,
    ) -> None:
        self._started = time.perf_counter()
        self._plan, self._services = plan, services
        _check(step, plan, devices, services.servers)
        with jax.transfer_guard("allow"):  # of the programs' constants
            here = ahead or emit_for(step, plan, locality_of(devices, services))
            self._step, self._emitted = here.step, here.emitted
            self._placement = place_on_devices(plan, devices, self._emitted.slots)
            self._compilation = Compilation(
                self._emitted, self._placement, pool, choices=services.choices, ahead=here.lowered
            )
        self.programs: list[Future[Any]] = self._compilation.programs

    def result(self) -> Executable:
        """Wait for all programs and return the compiled step."""
        with jax.transfer_guard("allow"):
            programs = self._compilation.result()
            made = Executable(
                self._step, self._plan, self._emitted, self._placement, programs, self._services
            )
        made.compile_seconds = time.perf_counter() - self._started
        return made


def wait_for_more(programs: Sequence[Future[Any]], seen: int) -> int:
    """Wait until more than `seen` compilations are over, or all are; return how many are."""
    waiting = [each for each in programs if not each.done()]
    while waiting and len(programs) - len(waiting) <= seen:
        waiting = list(wait(waiting, return_when=FIRST_COMPLETED).not_done)
    return len(programs) - len(waiting)


@dataclass(frozen=True)
class Locality:
    """A worker's place among the processes of a plan: what its instructions depend on.

    Attributes:
        rank: its number, where parameter servers sum.
        devices: its devices, by the plan's numbers; None: all of them.
        owners: the process of each device.
        near: the processes that share memory with it, itself included; None if devices have links.
        platform: the devices' platform, as JAX names it.
    """

    rank: int
    devices: frozenset[int] | None = None
    owners: tuple[int, ...] = ()
    near: frozenset[int] | None = None
    platform: str = "cpu"

    def between(self, mesh: tuple[int, ...], replicas: int) -> Between:
        """Return the medium between so many replicas on these devices."""
        if self.near is None:
            return Between.LINKS
        rows = np.reshape([self.owners[d] for d in mesh], (replicas, -1))
        processes = set(rows.flat)
        if len(processes) == 1:
            return Between.LINKS
        whole = bool((rows == rows[:, :1]).all())  # each replica in one process
        return Between.MEMORY if whole and processes <= self.near else Between.SOCKETS


def locality_of(devices: Sequence[jax.Device], services: StepServices) -> Locality:
    """Return the locality of this worker, by the devices and services of its steps."""
    platform = devices[0].platform
    if services.servers:
        return Locality(services.servers.rank, platform=platform)
    me = jax.process_index()
    near = frozenset((me, *(services.transport.neighbours if services.transport else ())))
    owners = tuple(device.process_index for device in devices)
    own = frozenset(n for n, process in enumerate(owners) if process == me)
    return Locality(0, own, owners, near if platform == "cpu" else None, platform)


@dataclass(frozen=True)
class EmittedStep:
    """A step as a worker has it before it has devices.

    Attributes:
        step: the step, as its plan cuts it.
        emitted: what the worker runs of it.
        lowered: those of its programs that are lowered, by their names, of equal ones one. They can
            be given devices once.
    """

    step: TracedStep
    emitted: Emitted
    lowered: Mapping[str, Lowered] = field(default_factory=dict)


def emit_for(step: TracedStep, plan: Plan, locality: Locality) -> EmittedStep:
    """Cut a step as its plan says, and emit what a worker runs of it."""
    step = step.planned_as(plan.fingerprint).cut_at(plan.layer_ends)
    return EmittedStep(step, emit(step, plan, locality.rank, locality.devices, locality.between))


def lower_ahead(step: TracedStep, plan: Plan, locality: Locality) -> EmittedStep:
    """Emit a step for a worker and lower its programs on abstract meshes."""
    made = emit_for(step, plan, locality)
    owners = locality.owners or (0,) * plan.num_devices
    placement = place_without_devices(plan, owners, made.emitted.slots)
    with jax.transfer_guard("allow"):
        programs = _programs(made.emitted, placement, {}, locality.platform)
    every = [x.lowered for x in programs.values()]
    lowered = {one.name: one for one in every if not isinstance(one.program, Exception)}
    for one in lowered.values():
        free_of_devices(one.whole)
    return replace(made, lowered=lowered)


def _check(
    step: TracedStep, plan: Plan, devices: Sequence[jax.Device], servers: Servers | None
) -> None:
    """Raise PlanError if a plan is not for these."""
    step = step.planned_as(plan.fingerprint)
    if plan.fingerprint != step.fingerprint:
        raise PlanError(
            f"this plan was made for another program (fingerprint {plan.fingerprint}, this one is "
            f"{step.fingerprint}); plan again"
        )
    if len(plan.parts) != len(step.parts):
        counts = f"{len(plan.parts)} of {len(step.parts)}"
        raise PlanError(f"this plan is for {counts} losses of the step; plan again")
    workers = plan.reduction.workers
    if (servers.count if servers else 1) != workers:
        there = f"{servers.count} workers are" if servers else "this process alone is"
        raise PlanError(f"the plan is for {workers} workers with parameter servers; {there} here")
    needed = plan.num_devices // workers
    if len(devices) < needed:
        raise PlanError(f"the plan needs {needed} devices; here are {len(devices)}")


class Compilation:
    """The programs of this process: all are lowered, and a pool compiles them.

    Args:
        emitted: the step's programs and instructions.
        placement: the devices of its meshes.
        pool: compiles them.
        compile_one: what to do with each distinct program, in the pool.
        choices: XLA's for these programs, on GPUs.
        ahead: programs that `lower_ahead` has lowered.

    Attributes:
        programs: the compilation of each distinct program: what `compile_one` returns.
    """

    def __init__(
        self,
        emitted: Emitted,
        placement: DeviceMeshes,
        pool: Executor,
        compile_one: Callable[[Lowered], Any] | None = None,
        choices: KernelChoices | None = None,
        ahead: Mapping[str, Lowered] | None = None,
    ) -> None:
        self._pool, self._choices = pool, choices
        self._programs = _programs(emitted, placement, ahead or {})
        self._firsts: dict[Any, _Program] = {}  # of each kind
        for program in self._programs.values():
            self._firsts.setdefault(program.kind, program)
        firsts = [one.lowered for one in self._firsts.values()]
        if choices:
            compile_one = choices.begin(firsts, _compiled)
        self.programs = [pool.submit(compile_one or _compiled, one) for one in firsts]

    @property
    def by_names(self) -> dict[tuple[str, ...], Future[Any]]:
        """The compilation of each distinct program, by the names of those that are equal to it."""
        names: dict[Any, tuple[str, ...]] = {}
        for name, x in self._programs.items():
            names[x.kind] = (*names.get(x.kind, ()), name)
        return {names[kind]: own for kind, own in zip(self._firsts, self.programs, strict=True)}

    def result(self) -> dict[str, Any]:
        """Wait for all programs and return them by name."""
        each = zip(self._firsts, self.programs, strict=True)
        firsts = {kind: future.result() for kind, future in each}
        distinct = {(x.kind, x.placed): x for x in self._programs.values()}

        def placed(x: _Program) -> Any:
            """Load what was compiled for other devices; compile it if this JAX cannot do so."""
            executable, kept = firsts[x.kind]
            if x.placed == self._firsts[x.kind].placed:
                return executable
            if loaded := loaded_for(executable, *x.placed, kept):
                return loaded
            one = x.lower()
            return _compiled(one, self._choices.options(one) if self._choices else None)[0]

        executables = dict(zip(distinct, self._pool.map(placed, distinct.values()), strict=True))
        return {name: executables[x.kind, x.placed] for name, x in self._programs.items()}


@dataclass(frozen=True)
class Lowered:
    """A lowered program.

    Attributes:
        name: its name.
        program: the program, as it is lowered for some devices; or why it cannot be.
        mesh: these devices.
        options: the compiler's.
        types: the shapes and dtypes of its arguments.
        digest: tells it from programs of another text or other options, whatever its name.
    """

    name: str
    program: jax.stages.Lowered | Exception
    mesh: Mesh
    options: Mapping[str, Any] = field(default_factory=dict)
    types: Any = ()
    digest: str = ""

    @property
    def whole(self) -> jax.stages.Lowered:
        """The program; raises what has kept it from being lowered."""
        if isinstance(self.program, Exception):
            raise self.program
        return self.program


def _programs(
    emitted: Emitted,
    placement: DeviceMeshes,
    ahead: Mapping[str, Lowered],
    platform: str | None = None,
) -> dict[str, _Program]:
    """Lower all programs but those that are lowered ahead.

    Args:
        emitted: the step's programs and instructions.
        placement: its meshes.
        ahead: programs that were lowered for abstract meshes, by name.
        platform: that of the devices, where the meshes are abstract.
    """
    runs: dict[str, Run] = {}
    for x in emitted.instructions:
        if isinstance(x, Run):
            runs.setdefault(x.program, x)
    # What another process may not have pulled yet must not be written over.
    offered = {
        slot
        for x in emitted.instructions
        if isinstance(x, Send) and not placement.is_local(x)
        for slot in x.inputs
    }
    found: dict[str, _Program] = {}
    lowered: dict[Any, Lowered] = {}  # one for each key
    for name, run in runs.items():
        key = _same(name, run, emitted, placement, offered)
        lower = functools.partial(_lower, name, run, emitted, placement, offered, platform)
        placed = _placed(run, placement)
        if key not in lowered:
            one = ahead.get(name)
            if one and bound_to_devices(one.whole, *placed):
                lowered[key] = replace(one, mesh=placement.meshes[run.mesh])
            else:
                lowered[key] = lower()
        one = lowered[key]
        kind: Any = name
        if not (_is_shared(run, placement) or isinstance(one.program, Exception)):
            kind = _kinds(run, placement), one.types, one.digest
        found[name] = _Program(one, kind, placed, lower)
    return found


def _compiled(
    one: Lowered, more: Mapping[str, Any] | None = None
) -> tuple[jax.stages.Compiled, bytes | None]:
    return compiled(one.whole, {**one.options, **(more or {})})


@dataclass(frozen=True)
class _Program:
    """A program that is to be compiled.

    Attributes:
        lowered: the lowered program, perhaps that of a program that is alike.
        kind: a key that is equal for programs of which only one has to be compiled: those of equal
            stages, which differ in their devices alone, since the text names positions in a mesh. A
            program that runs in several processes is compiled by each of them, and shares its key
            with no other program.
        placed: the shardings of its arguments and of its results.
        lower: returns the program as it is lowered for its own devices.
    """

    lowered: Lowered
    kind: Any
    placed: _Placed
    lower: Callable[[], Lowered]


def _same(name: str, run: Run, emitted: Emitted, placement: DeviceMeshes, offered: Set[int]) -> Any:
    """Return a key that is equal for programs that differ in their devices alone.

    One of them has to be lowered.
    """
    if (key := emitted.programs[name].alike) is None:
        return name
    slots = [emitted.slots[slot] for slot in (*run.inputs, *run.outputs)]
    types = tuple((slot.aval.shape, slot.aval.dtype, slot.spec) for slot in slots)
    donated = tuple(k for k in run.donated if run.inputs[k] not in offered)
    sharding, *_ = map(placement.sharding, (*run.inputs, *run.outputs))
    where = tuple(sharding.mesh.shape.items()), _kinds(run, placement)
    mesh = run.mesh if _is_shared(run, placement) else None
    return key, where, mesh, len(run.inputs), types, donated


def _placed(run: Run, placement: DeviceMeshes) -> _Placed:
    """Return the shardings of a program's arguments and of its results."""
    return tuple(map(placement.sharding, run.inputs)), tuple(map(placement.sharding, run.outputs))


def _kinds(run: Run, placement: DeviceMeshes) -> tuple[str, ...]:
    """Return the kinds of the devices that a program runs on; none of an abstract mesh."""
    mesh = placement.meshes[run.mesh]
    here = [] if isinstance(mesh, AbstractMesh) else mesh.devices.flat
    return tuple(device.device_kind for device in here)


def _is_shared(run: Run, placement: DeviceMeshes) -> bool:
    """Return whether a program runs in several processes."""
    if isinstance(placement.meshes[run.mesh], AbstractMesh):
        return len(placement.owners[run.mesh]) > 1
    return not placement.whole(run.mesh).is_fully_addressable


def _lower(
    name: str,
    run: Run,
    emitted: Emitted,
    placement: DeviceMeshes,
    offered: Set[int],
    platform: str | None = None,
) -> Lowered:
    arguments, results = _placed(run, placement)
    made = emitted.programs[name]

    def program(*flat: Any) -> tuple[Any, ...]:
        return tuple(made.fun(*flat))

    program.__name__ = name  # by which profilers show it
    jitted = jax.jit(
        program,
        donate_argnums=[k for k in run.donated if run.inputs[k] not in offered],
        out_shardings=results,
        keep_unused=True,
    )
    avals = [placement.slots[slot].aval for slot in run.inputs]
    mesh = placement.meshes[run.mesh]
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(avals, arguments, strict=True)
    ]
    try:
        names = (_LOWERED_AS.get(platform, platform),) if platform else None
        lowered = jitted.trace(*given).lower(lowering_platforms=names)
    except Exception as error:  # a kernel that these devices cannot run, say
        return Lowered(name, error, mesh, digest=name)
    text = lowered.as_text()
    platform = platform or mesh.devices.flat[0].platform
    options = {}
    if made.buckets:
        largest = max(bucket.nbytes for bucket in made.buckets)
        options = overlap_options(platform, largest, len(made.buckets) > 1)
    if "optimization_barrier" in text:
        options = with_barriers_kept(platform, options)
    told = text.replace(f"@jit_{name}", "@jit", 1), sorted(options.items())
    digest = hashlib.sha256(repr(told).encode()).hexdigest()
    types = tuple((v.shape, v.dtype) for v in jax.tree.leaves(lowered.in_avals))
    return Lowered(name, lowered, mesh, options, types, digest)
