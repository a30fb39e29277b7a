"""Results of a loss that are computed after it: functions of sums, and random keys.

For a perplexity or an F1 score a slice has only its part of the sums, to which no function can be
applied. So the loss returns the sums in the place of such a result, and the result is computed from
them after the pipeline. A key that the loss returns, to be used in the next step, would be that of
a slice. It is computed from the key that comes in. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from launcher.trace.ir.jaxpr import Equation, Jaxpr, Var, dependents, is_var, make_jaxpr
from launcher.trace.ir.primitive_kinds import (
    CASES,
    EXTREMA,
    LINEAR_IN_FIRST,
    REDUCTIONS,
    SAME_FOR_EXTREMA,
    SCALING,
)
from launcher.trace.slicing.follow_relations import follow_relations, same_structure
from launcher.trace.slicing.random_keys import is_typed, raw_generator
from launcher.trace.slicing.relations import (
    Joined,
    Pair,
    Partial,
    Replicated,
    Sliced,
    SliceRelation,
)
from launcher.trace.slicing.whole_batch import (
    ResultIndex,
    operand_axes,
    operand_relations,
    places_in,
)


@dataclass(frozen=True, eq=False)
class Finish:
    """Results of the loss that are computed after it.

    Attributes:
        results: the positions of those that the loss returns no longer.
        ends: where the values are made of which they are functions; the loss returns these after
            the results that it keeps.
        structure: the program of the loss.
    """

    results: tuple[int, ...]
    ends: tuple[ResultIndex, ...]
    structure: Jaxpr


def may_finish(eqn: Equation, batch_size: int) -> bool:
    """Return whether `find_finish` may find something, by the loss on the whole batch alone."""
    if set(_candidates(eqn).values()) & _keyed(eqn):
        return True
    makers = {v: e for e in eqn.params["jaxpr"].eqns for v in e.outvars}

    def may_have_rows(v: Var) -> bool:
        return any(n % batch_size == 0 for n in v.aval.shape)

    waiting = [(v, True) for v in _candidates(eqn).values()]
    seen: set[Var] = set()
    while waiting:
        v, moved = waiting.pop()  # moved: nothing but the shape has changed since
        made = makers.get(v)
        if v in seen or made is None or may_have_rows(v):
            continue
        seen.add(v)
        name, operands = made.primitive.name, [x for x in made.invars if is_var(x)]
        if name in REDUCTIONS and any(map(may_have_rows, operands)):
            if name in EXTREMA and not moved:
                return True
            continue
        scales = name in SCALING and len(operands) == 1
        if not scales and name not in LINEAR_IN_FIRST | CASES:
            return True
        waiting += [(x, moved and name in SAME_FOR_EXTREMA) for x in operands]
    return False


def find_finish(whole: Equation, part: Equation, num_slices: int) -> Finish | None:
    """Return the results that are functions of partial results and of what slices share.

    Args:
        whole: the equation of the loss on the whole batch.
        part: the equation of the loss on one slice.
        num_slices: how many slices.
    """
    a, b = whole.params["jaxpr"], part.params["jaxpr"]
    if not same_structure(a, b):
        return None
    given = operand_relations(operand_axes(whole, part, num_slices))
    sliced: dict[Var, SliceRelation] = dict(zip(a.invars, given, strict=True))

    def note(pair: Pair, operands: list[SliceRelation], made: Sliced) -> Sliced:
        del operands
        sliced.update(zip(pair.whole.outvars, made.relations, strict=True))
        return made

    follow_relations(a, b, given, num_slices, note)
    places = {v: (i, j) for i, eqn in enumerate(a.eqns) for j, v in enumerate(eqn.outvars)}
    found: dict[int, set[Var]] = {}
    keyed = _keyed(whole)
    for i, v in _candidates(whole).items():
        ends = None
        if isinstance(sliced[v], Joined):
            ends = _ends(v, a, places, sliced)
        elif isinstance(sliced[v], Replicated) and v in keyed:
            ends = _ends(v, a, places, sliced, keyed)
        if ends is not None:
            found[i] = ends
    if not found:
        return None
    ends = {v for each in found.values() for v in each if v in places}
    return Finish(tuple(found), tuple(sorted(places[v] for v in ends)), a)


def _candidates(eqn: Equation) -> dict[int, Var]:
    """Return the results without a `reduce` of the user's that are not differentiated."""
    outs = enumerate(zip(eqn.params["jaxpr"].outvars, eqn.params["reduce"], strict=True))
    first = 1 if eqn.params["wrt"] else 0
    return {i: v for i, (v, said) in outs if i >= first and said == "infer" and is_var(v)}


def _keyed(eqn: Equation) -> set[Var]:
    """Return what depends on a random key that the loss is given, the key itself included."""
    jaxpr = eqn.params["jaxpr"]
    keys = [v for v in jaxpr.invars if is_typed(v.aval) or raw_generator(v, jaxpr.eqns)]
    return dependents(jaxpr.eqns, keys) if keys else set()


def _ends(
    result: Var,
    jaxpr: Jaxpr,
    places: Mapping[Var, ResultIndex],
    sliced: Mapping[Var, SliceRelation],
    inside: Set[Var] = frozenset(),
) -> set[Var] | None:
    """Return of which partial and shared values a result is a function; None: of others, too.

    No value of `inside` is returned, but what it is made of, down to what the loss is given.
    """
    ends: set[Var] = set()
    waiting, seen = [result], set()
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        if isinstance(sliced[v], Partial | Replicated) and not (v in inside and v in places):
            ends.add(v)
        elif isinstance(sliced[v], Partial | Replicated | Joined):
            waiting += [x for x in jaxpr.eqns[places[v][0]].invars if is_var(x)]
        else:
            return None
    return ends


def with_results(eqn: Equation, finish: Finish, outvars: Sequence[Var] | None = None) -> Equation:
    """Return the loss's equation with what `finish` needs for the results that it computes.

    Args:
        eqn: the equation, on the whole batch or on a slice.
        finish: what is computed after the loss.
        outvars: the variables for what it needs; by default those of the loss's own program.

    Raises:
        BatchError: the program is another one than that in which it was found.
    """
    jaxpr = eqn.params["jaxpr"]
    ends = [jaxpr.eqns[i].outvars[j] for i, j in places_in(eqn, finish.ends, finish.structure)]
    said, count = eqn.params["reduce"], len(jaxpr.outvars)
    kept = [i for i in range(count) if i not in finish.results]
    closed = Jaxpr(jaxpr.invars, jaxpr.eqns, [*(jaxpr.outvars[i] for i in kept), *ends])
    words = (*(said[i] for i in kept), *("infer" for _ in ends))
    return eqn.replace(
        params={**eqn.params, "jaxpr": closed, "reduce": words},
        outvars=[*(eqn.outvars[i] for i in kept), *(outvars or ends), *eqn.outvars[count:]],
    )


def finishing_equations(eqn: Equation, finish: Finish) -> tuple[list[Equation], list[Var]]:
    """Return the equations that compute the results after the loss, and the variables of the ends.

    Args:
        eqn: the loss's equation on the whole batch, with all its results.
        finish: what is computed after it.
    """
    jaxpr = eqn.params["jaxpr"]
    ends = [jaxpr.eqns[i].outvars[j] for i, j in finish.ends]
    names = [Var(v.aval) for v in ends]
    equations: list[Equation] = []
    for i in finish.results:
        env: dict[Var, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
        env.update(zip(ends, names, strict=True))
        result = jaxpr.outvars[i]
        if result in env:  # an operand, as it is
            copy = make_jaxpr(jnp.copy, jax.ShapeDtypeStruct(result.aval.shape, result.aval.dtype))
            (eqn_of_copy,) = copy.eqns
            equations.append(eqn_of_copy.replace(invars=[env[result]], outvars=[eqn.outvars[i]]))
            continue
        made = _between(jaxpr.eqns, result, {*env})
        env.update((v, Var(v.aval)) for e in made for v in e.outvars if v not in env)
        env[result] = eqn.outvars[i]
        equations += [
            e.replace(
                invars=[env[v] if is_var(v) else v for v in e.invars],
                outvars=[env[v] for v in e.outvars],
            )
            for e in made
        ]
    return equations, names


def _between(equations: Iterable[Equation], result: Var, ends: set[Var]) -> list[Equation]:
    """Return the equations that compute a result from `ends`."""
    wanted, kept = {result}, []
    for eqn in reversed(list(equations)):
        if any(v in wanted and v not in ends for v in eqn.outvars):
            wanted.update(v for v in eqn.invars if is_var(v))
            kept.append(eqn)
    return kept[::-1]
