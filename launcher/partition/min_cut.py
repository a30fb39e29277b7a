"""Choose residuals by min-cut to save the fewest bytes.

What is cheap to compute (element by element, or the same elements in another order) need not be
kept where its operands are: the backward pass computes it again, fused into what reads it. Which
values to keep is then a minimum cut of the forward pass, between what cannot be recomputed and
what is read later, each value weighing its bytes (the rule of PyTorch's min-cut partitioner,
https://dev-discuss.pytorch.org/t/467). Of equal cuts it is the latest, which computes least. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from launcher.trace import CHEAP, FUSED, REDUCTIONS, Atom, Equation, Var, is_var, nbytes

_UNITS = 1 << 29  # what all values together weigh: flows are 32-bit integers
_ENDLESS = 1 << 30


def is_cheap(eqn: Equation) -> bool:
    """Return whether an equation may be recomputed rather than its value kept."""
    return eqn.primitive.name in CHEAP


def is_fused(eqn: Equation) -> bool:
    """Return whether the compiler computes an operand of an equation where it reads it."""
    return eqn.primitive.name in FUSED | REDUCTIONS


def kept_values(
    equations: Sequence[Equation],
    given: Set[Var],
    wanted: Iterable[Atom],
    firm: Iterable[Atom] = (),
    read: Callable[[Atom], Atom] = lambda atom: atom,
) -> set[Var]:
    """Choose the values to keep, so that `wanted` can be computed from them by cheap equations.

    They are values that `equations` make or are given; any other value is at hand anyway.

    Args:
        equations: the forward pass.
        given: what the equations read and would have to be kept, too.
        wanted: what is read later.
        firm: what cannot be recomputed.
        read: returns what to read instead of an operand.
    """
    numbers = {v: k for k, v in enumerate([*given, *(v for e in equations for v in e.outvars)])}
    ends = {numbers[v] for v in wanted if is_var(v) and v in numbers}
    if not ends:
        return set()
    # A value is an edge from node 2k to 2k + 1, which weighs its bytes.
    source, sink = 2 * len(numbers), 2 * len(numbers) + 1
    starts = {numbers[v] for v in (*given, *firm) if is_var(v) and v in numbers}
    endless = [(2 * k + 1, sink) for k in ends]
    for eqn in equations:
        if not is_cheap(eqn):
            starts.update(numbers[v] for v in eqn.outvars)
            continue
        operands = {read(v) for v in eqn.invars if is_var(v)}
        at = numbers[eqn.outvars[0]]
        endless += [(2 * numbers[v] + 1, 2 * at) for v in operands if is_var(v) and v in numbers]
    endless += [(source, 2 * k) for k in starts]
    sizes = np.array([nbytes(v.aval) for v in numbers], dtype=float)
    weights = np.maximum(1, sizes * (_UNITS / max(sizes.sum(), 1.0))).astype(np.int32)
    pairs = [*((2 * k, 2 * k + 1) for k in range(len(numbers))), *endless]
    values = np.concatenate([weights, np.full(len(endless), _ENDLESS, np.int32)])
    after = _before_sink(np.array(pairs).T, values, source, sink)
    return {v for v, k in numbers.items() if 2 * k not in after and 2 * k + 1 in after}


def _before_sink(pairs: np.ndarray, values: np.ndarray, source: int, sink: int) -> set[int]:
    """Return the nodes behind the latest minimum cut, from which more could flow to the sink."""
    graph = coo_array((values, tuple(pairs)), shape=(sink + 1, sink + 1), dtype=np.int32).tocsr()
    spare = graph - maximum_flow(graph, source, sink).flow
    spare.eliminate_zeros()
    return set(breadth_first_order(spare.T.tocsr(), sink, return_predecessors=False).tolist())
