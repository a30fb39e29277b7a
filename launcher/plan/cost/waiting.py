"""Gradients that a backward pass makes later than it could. Pure.

XLA:GPU puts off products of gradients, to run them under collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from launcher.trace import PRODUCTS, Atom, Equation, Var, is_var


class PutOff(NamedTuple):
    """Gradients of products that are made when all of them can be.

    Attributes:
        gradients: the gradients.
        ties: values after which the rest of the pass waits for them.
    """

    gradients: Set[Var]
    ties: Sequence[Var] = ()


def put_off(
    equations: Sequence[Equation],
    outs: Iterable[Atom],
    gradients: Iterable[Atom],
    waits: Sequence[PutOff],
) -> list[Equation]:
    """Return the equations, those for each set of gradients together where XLA:GPU runs them.

    They are those from which nothing but one gradient of the set follows. They run when all that
    they read is made, and the set's ties are, but not before equations that stand before the first
    of them. If there are ties, products for gradients of no set run with the next set.

    Args:
        equations: the program, in order.
        outs: its results, but for gradients.
        gradients: the other results.
        waits: the sets.
    """
    number = {v: k for k, of in enumerate(waits) for v in of.gradients}
    # The one gradient that follows from a value; None: several do, or something else.
    reach: dict[Var, Var | None] = {v: v for v in gradients if is_var(v)}
    reach.update((v, None) for v in outs if is_var(v))
    tied = any(of.ties for of in waits)
    of_set: dict[int, list[Equation]] = {}
    after: dict[int, int] = {}  # how many of the rest stand after the first of a set
    alone: list[Equation] = []
    rest: list[Equation] = []
    for eqn in reversed(equations):
        own = {reach[v] for v in eqn.outvars if v in reach}
        gradient = own.pop() if len(own) == 1 else None
        for v in eqn.invars:
            if is_var(v):
                reach[v] = gradient if reach.get(v, gradient) is gradient else None
        if gradient in number:
            of_set.setdefault(number[gradient], []).append(eqn)
            after[number[gradient]] = len(rest)
        else:
            (alone if gradient and tied else rest).append(eqn)
    made = {v: place for place, eqn in enumerate(reversed(rest), 1) for v in eqn.outvars}
    at: dict[int, list[Equation]] = {}
    for k, of in of_set.items():
        place = _ready((*(v for eqn in of for v in eqn.invars), *waits[k].ties), made)
        at.setdefault(max(place, len(rest) - after[k]), []).extend(reversed(of))
    sets, moved = sorted(at), set[Atom]()
    for eqn in reversed(alone):
        place = _ready(eqn.invars, made)
        if eqn.primitive.name in PRODUCTS or any(v in moved for v in eqn.invars if is_var(v)):
            moved.update(eqn.outvars)
            place = next((one for one in sets if one >= place), place)
        made.update(dict.fromkeys(eqn.outvars, place))
        at.setdefault(place, []).append(eqn)
    found = at.get(0, [])
    for place, eqn in enumerate(reversed(rest), 1):
        found += [eqn, *at.get(place, ())]
    return found


def _ready(reads: Iterable[Atom], made: Mapping[Var, int]) -> int:
    return max((made.get(v, 0) for v in reads if is_var(v)), default=0)
