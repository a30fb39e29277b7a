"""Compile the steps of a plan in a worker in the background, or a plan on trial."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax

from launcher.base import SpanRecorder
from launcher.plan import Plan, make_forward_plan
from launcher.runtime import Executable, StepCompilation, StepServices, compile_step, wait_for_more
from launcher.train.feed import own_rows
from launcher.train.program import Program

if TYPE_CHECKING:
    from launcher.runtime import Transport
    from launcher.train.program import Program


class Compiling:
    """The train step and the evaluation step of a plan, lowered, and on their way.

    Args:
        program: the run's program.
        plan: the plan of the train step; evaluation follows it.
        services: what instructions use.

    Raises:
        PlanError: the program differs from the one that was planned.
    """

    def __init__(self, program: Program, plan: Plan, services: StepServices) -> None:
        self._started, devices = time.perf_counter(), jax.devices()
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compiler")
        self._train = StepCompilation(program.train, plan, devices, services, self._pool)
        self._evaluate = None
        if program.evaluate:
            forward = make_forward_plan(program.evaluate, like=plan)
            silent = StepServices(
                services.transport, services.servers, SpanRecorder()
            )  # a recorded step holds no evaluation
            self._evaluate = StepCompilation(program.evaluate, forward, devices, silent, self._pool)

    @property
    def programs(self) -> int:
        """The number of distinct programs."""
        return len(self._all)

    def wait(self, seen: int) -> int:
        """Wait until more than `seen` programs are compiled, or all; return how many are."""
        return wait_for_more(self._all, seen)

    def result(self) -> tuple[Executable, Executable | None, float]:
        """Wait for all; return the train step, the evaluation step, and the seconds it took."""
        with self._pool:
            train = self._train.result()
            evaluate = self._evaluate.result() if self._evaluate else None
        return train, evaluate, time.perf_counter() - self._started

    @property
    def _all(self) -> list[Future[Any]]:
        return [*self._train.programs, *(self._evaluate.programs if self._evaluate else [])]


class TriedPlan:
    """A plan's step, compiled, with a first state and a batch; nothing of it stays.

    Args:
        program: the run's program.
        plan: the plan to try.
        transport: moves arrays between processes.

    Raises:
        Exception: the plan cannot be compiled, or its state does not fit.
    """

    def __init__(self, program: Program, plan: Plan, transport: Transport | None) -> None:
        gc.collect()  # what the trial before has held
        self._step = compile_step(program.train, plan, jax.devices(), transport=transport)
        self._state = self._step.create(program.init, program.seed)
        rows = self._step.batch_rows()
        self._batch: Any = own_rows(program.dataset.train, program.batch, rows)(0)

    def run(self, steps: int) -> float:
        """Return the mean seconds of a step over `steps` consecutive steps.

        All workers call it together, with the same number.
        """
        began = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._step(self._state, self._batch)
        arrays = jax.tree.leaves((self._state, metrics))
        jax.block_until_ready([array for array in arrays if array.addressable_shards])
        return (time.perf_counter() - began) / steps
