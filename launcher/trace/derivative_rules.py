"""Derivative rules that a program writes itself (`custom_vjp`, `custom_jvp`), seen from a slice.

The loss holds such a function by what it computes; its rule runs only in the backward pass, and may
join examples though the function does not. So the rule is traced, on the whole batch and on a
slice, and followed like any other program. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from launcher.trace.jaxpr import (
    Aval,
    Equation,
    Jaxpr,
    Var,
    inline_calls,
    is_var,
    jaxpr_as_fun,
    make_jaxpr,
    program,
)
from launcher.trace.pairs import Pair
from launcher.trace.placements import Joined, Partial, PerSlice, Placement, Replicated, Sharded


class _Followed(Protocol):
    """See `follow_placements.Followed`."""

    @property
    def outs(self) -> Sequence[Placement]:
        """The placements of the results."""

    @property
    def changed(self) -> bool:
        """Whether a slice's program would have to be another one."""


# Follows a program on the whole batch and on a slice; None: they are not the same program.
Follow: TypeAlias = Callable[[Jaxpr, Jaxpr, Sequence[Placement]], _Followed | None]

_FORWARD = "custom_jvp_call"
RULES = frozenset((_FORWARD, "custom_vjp_call"))


def follow_rule(
    pair: Pair, given: Sequence[Placement], outs: Sequence[Placement], follow: Follow
) -> Joined | None:
    """Return where the derivative rule of a function joins examples; None: it does not.

    Args:
        pair: the call of the function.
        given: the placement of each operand.
        outs: the placement of each result.
        follow: follows a program; a rule within the rule is not looked at again.
    """
    if any(isinstance(p, PerSlice) for p in outs):
        return None
    moving = [i for i, v in enumerate(pair.part.invars) if is_var(v) and _is_inexact(v.aval)]
    results = [j for j, v in enumerate(pair.part.outvars) if _is_inexact(v.aval)]
    if not moving or not results:
        return None
    of_rule = _of_jvp if pair.name == _FORWARD else _of_vjp
    kept = of_rule(pair, given, [outs[j] for j in results], moving, results, follow)
    return None if kept else Joined(pair.part, in_rule=True)


def _of_jvp(
    pair: Pair,
    given: Sequence[Placement],
    outs: Sequence[Placement],
    moving: Sequence[int],
    results: Sequence[int],
    follow: Follow,
) -> bool:
    """Follow tangents: a result's has the placement of the result, as an operand's has its own."""

    def rule(eqn: Equation) -> Jaxpr:
        avals = [v.aval for v in eqn.invars]

        def tangents(operands: Sequence[Any], rates: Sequence[Any]) -> list[Any]:
            fun = _of_some(eqn, operands, moving, results)
            _, changes = jax.jvp(fun, [operands[i] for i in moving], rates)
            return list(changes)

        return inline_calls(make_jaxpr(tangents, avals, [avals[i] for i in moving])).jaxpr

    found = follow(
        rule(pair.whole),
        rule(pair.part),
        [*given, *(_without_zero(given[i]) for i in moving)],
    )
    if found is None or found.changed:
        return False
    pairs = zip(found.outs, outs, strict=True)
    return all(p in (out, Replicated(zero=True)) for p, out in pairs)


def _of_vjp(
    pair: Pair,
    given: Sequence[Placement],
    outs: Sequence[Placement],
    moving: Sequence[int],
    results: Sequence[int],
    follow: Follow,
) -> bool:
    """Follow cotangents: a row's is the row's own, and those of what is shared are added up."""

    def rule(eqn: Equation) -> Jaxpr:
        avals = [v.aval for v in eqn.invars]

        def cotangents(operands: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
            fun = _of_some(eqn, operands, moving, results)
            _, vjp = jax.vjp(fun, *(operands[i] for i in moving))
            return list(vjp(list(seeds)))

        seeds = [eqn.outvars[j].aval for j in results]
        return inline_calls(make_jaxpr(cotangents, avals, seeds)).jaxpr

    seeds = [_of_seed(p, pair) for p in outs]
    found = follow(rule(pair.whole), rule(pair.part), [*given, *seeds])
    # Of a mean the rule divides by the slice's rows, and the whole batch's by all: so do the seeds.
    of_mean = all(isinstance(p, Partial) and p.op == "mean" for p in outs)
    if found is None or (found.changed and not of_mean):
        return False
    op = "mean" if of_mean else "sum"
    for i, placement in zip(moving, found.outs, strict=True):
        own = isinstance(given[i], Sharded) and placement == given[i]
        added = isinstance(placement, Partial) and placement.op == op
        if not (own or added or placement == Replicated(zero=True)):
            return False
    return True


def _of_seed(out: Placement, pair: Pair) -> Placement:
    """Return the placement of a result's cotangent."""
    if isinstance(out, Replicated):
        return Partial("sum", pair.part)  # each slice has the part of its own rows
    return Replicated() if isinstance(out, Partial) else out


def _of_some(
    eqn: Equation, operands: Sequence[Any], moving: Sequence[int], results: Sequence[int]
) -> Callable[..., list[Any]]:
    """Return an equation as a function of some operands, with some of its results."""
    names = [Var(v.aval) for v in eqn.invars]  # an operand may be given twice
    closed = program(names, [eqn.replace(invars=names)], [eqn.outvars[j] for j in results])
    fun = jaxpr_as_fun(closed)

    def of_moving(*values: Any) -> list[Any]:
        full = list(operands)
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        return list(fun(*full))

    return of_moving


def _without_zero(placement: Placement) -> Placement:
    return Replicated() if isinstance(placement, Replicated) else placement


def _is_inexact(aval: Aval) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))
