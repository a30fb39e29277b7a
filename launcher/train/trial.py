"""A plan that is run for some steps on a state of its own, to see how long a step takes."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import jax

from launcher.plan import Plan
from launcher.runtime import compile_step
from launcher.train.rows import own_rows

if TYPE_CHECKING:
    from launcher.runtime import Transport
    from launcher.train.program import Program


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
        """Return the seconds of a step, over so many one after the other.

        All workers call it together, with the same number.
        """
        began = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._step(self._state, self._batch)
        arrays = jax.tree.leaves((self._state, metrics))
        jax.block_until_ready([array for array in arrays if array.addressable_shards])
        return (time.perf_counter() - began) / steps
