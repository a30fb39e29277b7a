"""Derivative rules that a program writes itself (`custom_vjp`, `custom_jvp`), seen from a slice.

The loss holds the computation of such a function; its rule runs only in the backward pass, and may
join examples though the function does not. So the rule is traced, on the whole batch and on a
slice, and followed like any other program. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    has_tangent,
    inline_calls,
    is_var,
    jaxpr_as_fun,
    make_jaxpr,
    needed,
)
from launcher.trace.ir.primitive_kinds import CASES, LINEAR_IN_FIRST, SCALING
from launcher.trace.slicing.relations import (
    Joined,
    Pair,
    Partial,
    PerSlice,
    Replicated,
    Sharded,
    SliceRelation,
    differ,
)


class _Followed(Protocol):
    """See `follow_relations.Followed`."""

    @property
    def outs(self) -> Sequence[SliceRelation]:
        """The relations of the results."""

    @property
    def changed(self) -> bool:
        """Whether a slice's program would have to be another one."""


# Follows a program on the whole batch and on a slice; None: they are not the same program.
Follow: TypeAlias = Callable[[Jaxpr, Jaxpr, Sequence[SliceRelation]], _Followed | None]
# Called with a function, its arguments and what comes in; returns the derivatives.
Derive: TypeAlias = Callable[[Callable[..., list[Any]], list[Any], list[Any]], Sequence[Any]]

_FORWARD = "custom_jvp_call"
RULES = frozenset((_FORWARD, "custom_vjp_call"))


@dataclass(frozen=True, eq=False)
class _Call:
    """The call of a function with a rule of its own.

    Attributes:
        pair: the call. given: the relation of each operand.
        moving, results: the operands and results that have derivatives. outs: the relations of
            these results.
    """

    pair: Pair
    given: Sequence[SliceRelation]
    moving: Sequence[int]
    results: Sequence[int]
    outs: Sequence[SliceRelation]

    def derivatives(self, derive: Derive) -> tuple[Jaxpr, Jaxpr]:
        """Return the programs of a derivative on the whole batch and on a slice."""
        ways = derive, tuple(self.moving), tuple(self.results)
        whole, part = (_Function(eqn) for eqn in (self.pair.whole, self.pair.part))
        return _derivative(whole, *ways), _derivative(part, *ways)


@dataclass(frozen=True, eq=False)
class _Function:
    """A function with a rule of its own: equal for calls of the same one with alike arrays.

    Equal layers of a model call the same one.
    """

    eqn: Equation

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        params = tuple((key, id(self.eqn.params[key])) for key in sorted(self.eqn.params))
        return params, *(v.aval for v in (*self.eqn.invars, *self.eqn.outvars))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self.key == other.key


@functools.lru_cache(maxsize=16)
def _derivative(
    function: _Function, derive: Derive, moving: tuple[int, ...], results: tuple[int, ...]
) -> Jaxpr:
    """Return the program of a derivative.

    Its inputs are the operands, then the tangents of those that move, or the cotangents of the
    results.

    Args:
        function: the function, on the whole batch or on a slice.
        derive: `_tangents` or `_cotangents`.
        moving: the operands that have derivatives.
        results: the results that have.
    """
    eqn = function.eqn
    names = [Var(v.aval) for v in eqn.invars]  # an operand may be given twice
    outs = [eqn.outvars[j] for j in results]
    fun = jaxpr_as_fun(Jaxpr(names, [eqn.replace(invars=names)], outs))

    def derived(operands: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        def of_moving(*moved: Any) -> list[Any]:
            full = dict(enumerate(operands)) | dict(zip(moving, moved, strict=True))
            return list(fun(*full.values()))

        return list(derive(of_moving, [operands[i] for i in moving], list(values)))

    of = [eqn.invars[i] for i in moving] if derive is _tangents else outs
    closed = make_jaxpr(derived, [v.aval for v in eqn.invars], [v.aval for v in of])
    return inline_calls(closed)


def _tangents(fun: Callable[..., list[Any]], at: list[Any], rates: list[Any]) -> Any:
    return jax.jvp(fun, at, rates)[1]


def _cotangents(fun: Callable[..., list[Any]], at: list[Any], seeds: list[Any]) -> Any:
    return jax.vjp(fun, *at)[1](seeds)


def follow_rule(
    pair: Pair, given: Sequence[SliceRelation], outs: Sequence[SliceRelation], follow: Follow
) -> Joined | None:
    """Return where the derivative rule of a function joins examples; None: it does not.

    Args:
        pair: the call of the function.
        given: the relation of each operand.
        outs: the relation of each result.
        follow: follows a program; a rule within the rule is not looked at again.
    """
    if any(isinstance(p, PerSlice) for p in outs):
        return None
    moving = [i for i, v in enumerate(pair.part.invars) if is_var(v) and has_tangent(v.aval)]
    results = [j for j, v in enumerate(pair.part.outvars) if has_tangent(v.aval)]
    if not moving or not results:
        return None
    call = _Call(pair, given, moving, results, [outs[j] for j in results])
    kept = _keeps_tangents if pair.name == _FORWARD else _keeps_cotangents
    return None if kept(call, follow) else Joined(pair.part, in_rule=True)


def _keeps_tangents(call: _Call, follow: Follow) -> bool:
    """Follow tangents: a result's has the relation of the result, as an operand's has its own."""
    whole, part = call.derivatives(_tangents)
    rates = [_without_zero(call.given[i]) for i in call.moving]
    found = follow(whole, part, [*call.given, *rates])
    if found is None or found.changed:
        return False
    pairs = zip(found.outs, call.outs, strict=True)
    return all(p in (out, Replicated(zero=True)) for p, out in pairs)


def _keeps_cotangents(call: _Call, follow: Follow) -> bool:
    """Follow cotangents: a row's is the row's own, and those of what is shared are added up."""
    pair, given = call.pair, call.given
    seeds = [_of_seed(p, pair) for p in call.outs]
    whole, part = call.derivatives(_cotangents)
    found = follow(whole, part, [*given, *seeds])
    if found is None:
        return False
    of_mean = all(isinstance(p, Partial) and p.op == "mean" for p in call.outs)
    if not of_mean and found.changed:
        return False
    ops = ("sum", "mean") if of_mean else ("sum",)
    for j, (i, relation) in enumerate(zip(call.moving, found.outs, strict=True)):
        if relation == Replicated(zero=True) or _is_zero(whole.outvars[j], whole.eqns):
            continue
        own = isinstance(given[i], Sharded) and relation == given[i]
        added = isinstance(relation, Partial) and relation.op in ops
        if not (own or added):
            return False
        if of_mean and not _divides_once(whole, part, j, len(seeds), pair.num_slices):
            return False
    return True


def _divides_once(whole: Jaxpr, part: Jaxpr, result: int, num_seeds: int, num_slices: int) -> bool:
    """Return whether a rule is linear in the seeds, its last operands, and divides by the rows.

    The seed of a slice's mean is its share of the whole batch's, and the rows of the slice are as
    many times fewer.
    """
    varying: set[Var] = set(whole.invars[len(whole.invars) - num_seeds :])
    divided = 0
    out = whole.outvars[result]
    needs = {id(e) for e in needed(whole.eqns, [out])}
    for a, b in zip(whole.eqns, part.eqns, strict=True):
        if id(a) not in needs:
            continue
        name, pairs = a.primitive.name, list(zip(a.invars, b.invars, strict=True))
        changed = [(x, y) for x, y in pairs if differ(x, y)]
        if changed:
            if len(changed) > 1 or name not in SCALING:
                return False
            (numbers,) = changed
            large, small = numbers if name == "div" else numbers[::-1]
            if not np.isclose(_number(large), num_slices * _number(small), rtol=1e-6):
                return False
            divided += 1
        moved = [k for k, v in enumerate(a.invars) if is_var(v) and v in varying]
        if not moved:
            continue
        of_one = name in LINEAR_IN_FIRST or name == "div"
        once = name in ("mul", "dot_general") and len(moved) == 1
        cases = name in CASES and all(k in moved or _is_zero(v) for k, v in enumerate(a.invars))
        if not (once or cases or (of_one and moved == [0])):
            return False
        varying.update(a.outvars)
    return divided == 1


def _number(atom: Atom) -> float:
    assert isinstance(atom, Literal)
    return float(atom.val)


def _is_zero(atom: Atom, equations: Sequence[Equation] = ()) -> bool:
    """Return whether a value is a zero, or made of one by repeating it."""
    if isinstance(atom, Literal):
        return not np.any(atom.val)
    made = next((e for e in equations if atom in e.outvars), None)
    if made is None or made.primitive.name != "broadcast_in_dim":
        return False
    return _is_zero(made.invars[0])


def _of_seed(out: SliceRelation, pair: Pair) -> SliceRelation:
    """Return the relation of a result's cotangent."""
    if isinstance(out, Replicated):
        return Partial("sum", pair.part)  # each slice has the part of its own rows
    return Replicated() if isinstance(out, Partial) else out


def _without_zero(relation: SliceRelation) -> SliceRelation:
    return Replicated() if isinstance(relation, Replicated) else relation
