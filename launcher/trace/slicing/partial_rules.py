"""What becomes of partial results: linear functions of them are partial results again. Pure.

Where a sum meets what all slices share, or a mean, the slice's program is changed so that nothing
is counted more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from launcher.trace.ir.jaxpr import Atom, Equation, Literal, Var, is_var, make_jaxpr
from launcher.trace.ir.primitive_kinds import CASES, LINEAR_IN_FIRST, SAME_FOR_EXTREMA
from launcher.trace.slicing.pairs import Pair, Placed
from launcher.trace.slicing.placements import (
    Joined,
    Partial,
    PerSlice,
    Placement,
    Replicated,
    Sharded,
)


def of_partial(pair: Pair, given: Sequence[Placement]) -> Placed:
    """Return what becomes of partial results: they stay so under linear functions."""
    partial = [(i, p) for i, p in enumerate(given) if isinstance(p, Partial)]
    first = partial[0][1]
    lost = Placed([Joined(pair.part)] * len(pair.part.outvars), [pair.part])
    own = any(isinstance(p, Sharded | PerSlice) for p in given)
    if own and not _adds_own(pair, given):
        return lost
    if not first.linear:
        same = {p.op for _, p in partial} == {first.op}
        known = SAME_FOR_EXTREMA | ({first.op} if len(given) > 1 else set())
        return (
            Placed([first] * len(pair.part.outvars), [pair.part])
            if (same and pair.name in known)
            else lost
        )
    if any(not jnp.issubdtype(v.aval.dtype, jnp.number) for v in pair.part.outvars):
        return lost
    if pair.name in CASES:
        return _aligned(pair, given) or lost
    if pair.name == "dot_general" and len(partial) == 1:
        return Placed([replace(first, scaled=True)], [pair.part])
    if pair.name in LINEAR_IN_FIRST and [i for i, _ in partial] == [0]:
        floats = [
            jnp.issubdtype(v.aval.dtype, jnp.inexact)
            for v in (pair.part.invars[0], pair.part.outvars[0])
        ]
        rounds = floats[0] and not floats[1]
        pads = pair.name == "pad" and given[1] != Replicated(zero=True)
        return (
            lost
            if rounds or pads or fills(pair.part)
            else Placed([first] * len(pair.part.outvars), [pair.part])
        )
    return lost


def fills(eqn: Equation) -> bool:
    """Return whether a look-up puts a number of its own where an index is out of bounds."""
    return bool(eqn.params.get("fill_value"))


def _adds_own(pair: Pair, given: Sequence[Placement]) -> bool:
    """Return whether a partial result and a slice's own value are added: a mean of the latter."""
    return pair.name in ("add", "sub") and not any(isinstance(p, Sharded) for p in given)


def scaled(pair: Pair, given: Sequence[Placement]) -> Placed | None:
    """Return a partial result times, or over, a value that all slices share."""
    whole, part = pair.whole, pair.part
    at = 0 if isinstance(given[0], Partial) else 1
    partial, other = given[at], given[1 - at]
    inexact = jnp.issubdtype(part.outvars[0].aval.dtype, jnp.inexact)
    if not isinstance(other, Replicated) or (pair.name == "div" and (at or not inexact)):
        return None
    assert isinstance(partial, Partial)
    if not partial.linear:
        return None  # a negative factor makes the smallest of the largest
    kept = replace(partial, scaled=True)
    if not pair.differs(1 - at):
        return Placed([kept], [part])
    a, b = whole.invars[1 - at], part.invars[1 - at]
    assert isinstance(a, Literal)
    assert isinstance(b, Literal)
    large, small = (a.val, b.val) if pair.name == "div" else (b.val, a.val)
    share = pair.num_slices * float(small)
    if partial.op == "sum" and np.isclose(float(large), share, rtol=1e-6, atol=0):
        return Placed([replace(kept, op="mean")], [part])  # divided by the number of its examples
    return Placed([kept], [pair.with_whole_numbers().part], changed=True)


def _aligned(pair: Pair, given: Sequence[Placement]) -> Placed | None:
    """Return a sum, or one of several cases, with its operands made the same kind of partial.

    Beside a mean, a sum counts as often as there are slices; beside a sum, what all slices share
    counts once if each adds its share of it.
    """
    cases = range(1 if pair.name == "select_n" else 0, len(given))
    if pair.name == "select_n" and not isinstance(given[0], Replicated):
        return None
    mean = any(given[i] == Partial("mean", pair.part) or given[i] == PerSlice() for i in cases)
    invars: list[Atom] = list(pair.part.invars)
    extra: list[Equation] = []
    for i in cases:
        own = given[i]
        if isinstance(own, Partial) and not own.linear:
            return None
        is_sum = isinstance(own, Partial) and own.op == "sum"
        if own == Replicated(zero=True) or is_sum != mean:
            continue
        if not jnp.issubdtype(invars[i].aval.dtype, jnp.inexact):
            return None
        factor = float(pair.num_slices) if mean else 1.0 / pair.num_slices
        eqn = _times(pair.part, invars[i], factor)
        extra.append(eqn)
        invars[i] = eqn.outvars[0]
    sums = [p for p in given if isinstance(p, Partial)]
    kind = Partial("mean" if mean else "sum", sums[0].equation, any(p.scaled for p in sums))
    return Placed([kind], [*extra, pair.part.replace(invars=invars)], changed=bool(extra))


def _times(eqn: Equation, atom: Atom, factor: float) -> Equation:
    """Return the equation that scales an operand of `eqn`."""
    value = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    closed = make_jaxpr(lambda x: x * np.asarray(factor, x.dtype), value)
    made = closed.eqns[0]
    renamed = [atom if is_var(v) else v for v in made.invars]
    out = Var(made.outvars[0].aval)
    return made.replace(invars=renamed, outvars=[out], source_info=eqn.source_info)
