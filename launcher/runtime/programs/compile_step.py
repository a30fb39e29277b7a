"""Compile a traced step for a plan, at once or in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from launcher.base import SpanRecorder
from launcher.plan import Plan, PlanError
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.listing import Emitted
from launcher.runtime.execute.executable import Executable, StepServices
from launcher.runtime.programs.compile import Compilation
from launcher.runtime.programs.device_meshes import place_on_devices
from launcher.runtime.transport.servers import Servers
from launcher.runtime.transport.transport import Transport
from launcher.trace import TracedStep


def compile_step(
    step: TracedStep,
    plan: Plan,
    devices: Sequence[jax.Device],
    transport: Transport | None = None,
    servers: Servers | None = None,
    spans: SpanRecorder | None = None,
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
        spans: takes what runs while it records; by default one of the executable's own.

    Raises:
        PlanError: the plan is for another program, there are fewer devices than it needs, or other
            workers.
    """
    services = StepServices(transport, servers, spans or SpanRecorder())
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
    ) -> None:
        self._started = time.perf_counter()
        self._plan, self._services = plan, services
        step = _checked(step, plan, devices, services.servers)
        with jax.transfer_guard("allow"):  # of the programs' constants
            self._step = step.cut_at(plan.layer_ends)
            self._emitted = _emitted(self._step, plan, devices, services.servers)
            self._placement = place_on_devices(plan, devices, self._emitted.slots)
            self._compilation = Compilation(self._emitted, self._placement, pool)
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


def _emitted(
    step: TracedStep, plan: Plan, devices: Sequence[jax.Device], servers: Servers | None
) -> Emitted:
    """Return the instructions of this process."""
    if servers:
        return emit(step, plan, servers.rank)
    own = {n for n, device in enumerate(devices) if device.process_index == jax.process_index()}
    return emit(step, plan, devices=own)


def _checked(
    step: TracedStep, plan: Plan, devices: Sequence[jax.Device], servers: Servers | None
) -> TracedStep:
    """Return the step as the plan means it; raise PlanError if it is not for these."""
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
    return step
