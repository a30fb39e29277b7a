"""An evaluation: the means of a model's metrics over held-out rows, each counted once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from launcher.recipes import InputError
from launcher.runtime import Executable
from launcher.train.feed import filled
from launcher.train.program import Program
from launcher.train.step_result import fetched_values


class Evaluator:
    """Evaluates a model batch by batch.

    Args:
        step: the compiled evaluation step.
        program: the run's program, with what is held out.
    """

    def __init__(self, step: Executable, program: Program) -> None:
        self._step, self._program = step, program
        self._rows = step.batch_rows()
        self._evaluated: list[tuple[int, dict[str, jax.Array]]] = []

    def run(self, model: dict[str, Any], batch: int) -> dict[str, float] | None:
        """Evaluate on one batch of held-out data; batches are given in order, from 0.

        Args:
            model: `TrainState.model`.
            batch: the number of the batch, below `Program.eval_batches`.

        Returns:
            After the last batch, the means over all rows of the metrics that this process knows;
            before, None.

        Raises:
            launcher.recipes.InputError: there are no rows.
        """
        held_out = self._program.dataset.validation
        assert held_out is not None
        if batch == 0:
            self._evaluated = []
        for count, part in filled(held_out, batch, self._program.batch, self._rows):
            self._evaluated.append((count, self._step(model, part)))
            if len(self._evaluated) > 1:  # wait for the one before while this one runs
                fetched_values(self._evaluated[-2][1])
        if batch + 1 != self._program.eval_batches:
            return None
        if not self._evaluated:
            raise InputError("the first batch of held-out data has no rows; hold some out")
        fetched = [(count, fetched_values(metrics)) for count, metrics in self._evaluated]
        return {name: _mean([(n, values[name]) for n, values in fetched]) for name in fetched[0][1]}


def _mean(found: list[tuple[int, np.ndarray]]) -> float:
    """Return the mean over full batches, each with the number of rows that it stands for.

    Each holds a value or, of a model that gives weights, the value and the batch's weight
    (`make_eval_step`), which grows with the repetition of rows.
    """
    pairs = [(n, *np.ravel(value).astype(float)) for n, value in found]
    weights = [n * weight for n, _, *weights in pairs for weight in weights or [1.0]]
    return float(np.average([value for _, value, *_ in pairs], weights=weights))
