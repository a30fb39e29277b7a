"""The compilation of a run's steps in a worker, as it goes on in the background."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from launcher.base.spans import SpanRecorder
from launcher.plan import Plan, make_forward_plan
from launcher.runtime import Executable, StepCompilation, StepServices, wait_for_more
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
