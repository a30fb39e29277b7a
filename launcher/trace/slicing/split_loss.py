"""What of a loss is computed once for the whole batch: before it, and after it.

Before: what the batch alone decides (`whole_batch`). After: functions of sums over the examples
(`finish`). Both are found by comparing two traces of the loss.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from launcher.trace.errors import BatchError, TraceError
from launcher.trace.ir.jaxpr import Equation, Var
from launcher.trace.slicing.finish import find_finish, finishing_equations, may_finish, with_results
from launcher.trace.slicing.slices import Traces, TwoTraces
from launcher.trace.slicing.whole_batch import (
    find_whole_batch,
    in_words,
    may_need_whole_batch,
    whole_batch_equations,
    with_operands,
)


@dataclass(frozen=True, eq=False)
class SplitLoss:
    """A loss, and what is computed around it.

    Attributes:
        traces: the loss that remains, on the whole batch and on slices.
        before: the equations that compute its further operands.
        after: the equations that compute the results that it no longer returns.
    """

    traces: Traces
    before: Sequence[Equation]
    after: Sequence[Equation]


def split_loss(
    eqn: Equation, batch_size: int, retrace: Callable[[int], Equation], constants: Set[Var]
) -> SplitLoss:
    """Take out of the loss what is computed on the whole batch.

    Args:
        eqn: the equation of the loss on the whole batch.
        batch_size: the rows of the batch.
        retrace: called with a number of rows; returns the equation on so many.
        constants: the variables of captured arrays.
    """

    def part(num_slices: int) -> Equation:
        return retrace(batch_size // num_slices)

    @functools.cache
    def reference() -> TwoTraces | None:
        with contextlib.suppress(TraceError):  # said where slices are asked for
            return _two_traces(eqn, batch_size, retrace)
        return None

    traces = Traces(eqn, batch_size, part, reference)
    traces, before = _with_operands(traces, {i for i, v in enumerate(eqn.invars) if v in constants})
    traces, after = _with_results(traces)
    return SplitLoss(traces, before, after)


def _with_operands(traces: Traces, captured: Set[int]) -> tuple[Traces, Sequence[Equation]]:
    """Take out what is computed before the loss."""
    eqn, found = traces.whole, None
    if may_need_whole_batch(eqn, traces.batch_size, captured) and (pair := traces.reference()):
        with contextlib.suppress(BatchError):
            found = find_whole_batch(*pair, captured)
    if found is None or not found.places:
        return traces, ()
    equations, operands = whole_batch_equations(eqn, found)
    whole = with_operands(eqn, found, operands)
    return traces.rewritten(
        whole, lambda each: with_operands(each, found), in_words(eqn, found)
    ), equations


def _with_results(traces: Traces) -> tuple[Traces, Sequence[Equation]]:
    """Take out what is computed after the loss."""
    eqn, found = traces.whole, None
    if may_finish(eqn, traces.batch_size) and (pair := traces.reference()):
        with contextlib.suppress(BatchError):
            found = find_finish(*pair)
    if found is None:
        return traces, ()
    equations, ends = finishing_equations(eqn, found)
    whole = with_results(eqn, found, ends)
    return traces.rewritten(whole, lambda each: with_results(each, found)), equations


def _two_traces(
    eqn: Equation, batch_size: int, retrace: Callable[[int], Equation]
) -> TwoTraces | None:
    """Return the loss on many rows and on fewer, at least two, and how many times fewer.

    On one row a program may be another one.
    """
    counts = (n for n in range(2, batch_size // 2 + 1) if batch_size % n == 0)
    count = next(counts, None)
    if count is not None:
        return eqn, retrace(batch_size // count), count
    return None if batch_size == 1 else (retrace(2 * batch_size), eqn, 2)
