"""Follow the relations of a loss's values from its operands to its results.

The loss is read as traced on the whole batch and as traced on one slice, equation by equation,
through loops, branches and calls. What comes out is the relation of each result, and the slice's
program with the changes that make its results combine to the whole batch's: numbers that the batch
size decides are the whole batch's, and what all slices share is counted once. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.trace.ir.bodies import alternatives
from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    read_jaxpr,
    rewritten_as,
    scan_counts,
    source_line,
    sub_jaxprs,
    while_counts,
)
from launcher.trace.ir.primitive_kinds import CALLS
from launcher.trace.ir.structure_text import structure_text
from launcher.trace.primitives import is_per_slice
from launcher.trace.slicing.derivative_rules import RULES, follow_rule
from launcher.trace.slicing.relation_rules import own_value, relate
from launcher.trace.slicing.relations import (
    Joined,
    Pair,
    PerSlice,
    Replicated,
    RowNumbers,
    Sharded,
    Sliced,
    SliceRelation,
    common,
    differ,
    joined_among,
)

# Called with each pair of equations and what became of it; may return something else.
Visit = Callable[[Pair, list[SliceRelation], Sliced], Sliced]


@dataclass(frozen=True, eq=False)
class Followed:
    """The relations of a program's results, and what computes them in a slice.

    Attributes:
        outs: of each result.
        equations, outvars: the slice's program. changed: whether it is other than the traced one.
    """

    outs: list[SliceRelation]
    equations: list[Equation]
    outvars: list[Atom]
    changed: bool

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return the slice's program in the place of the traced one."""
        return dataclasses.replace(jaxpr, eqns=self.equations, outvars=self.outvars)


def same_structure(whole: Jaxpr, part: Jaxpr) -> bool:
    """Return whether two programs have the same equations, but for shapes and numbers."""
    if len(whole.eqns) != len(part.eqns):
        return False
    for a, b in zip(whole.eqns, part.eqns, strict=True):
        if a.primitive is not b.primitive:
            return False
        if len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
            return False
        inner = list(sub_jaxprs(a)), list(sub_jaxprs(b))
        if len(inner[0]) != len(inner[1]):
            return False
        if not all(map(same_structure, *inner)):
            return False
    return True


def matching(reference: Jaxpr, other: Jaxpr) -> dict[int, int]:
    """Return which equation of another trace of a function each one of `reference` is.

    On a single row JAX leaves out what repeats rows, and looks up in another way. What is on the
    same source line, in the same order, is the same equation, if there are as many on both sides.
    """

    def by_line(jaxpr: Jaxpr) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            found.setdefault((eqn.primitive.name, source_line(eqn)), []).append(i)
        return found

    theirs = by_line(other)
    pairs = [(own, theirs.get(line, [])) for line, own in by_line(reference).items()]
    return {i: j for a, b in pairs if len(a) == len(b) for i, j in zip(a, b, strict=True)}


def follow_relations(
    whole: Jaxpr,
    part: Jaxpr,
    given: Sequence[SliceRelation],
    num_slices: int,
    visit: Visit | None = None,
    in_rule: bool = False,
) -> Followed:
    """Return the relations of a program's results.

    Args:
        whole: the program on the whole batch.
        part: the program on a slice, of the same structure.
        given: the relations of its inputs.
        num_slices: how many slices make the batch.
        visit: sees every equation of the program itself, not those in its loops and branches.
        in_rule: whether the program is part of a derivative rule.
    """
    env: dict[Var, SliceRelation] = dict(zip(whole.invars, given, strict=True))
    env.update((v, Replicated()) for v in whole.constvars)
    equations: list[Equation] = []
    changed = False
    for a, b in zip(whole.eqns, part.eqns, strict=True):
        pair, operands = Pair(a, b, num_slices, in_rule), [_of(v, env) for v in a.invars]
        sliced = relate_equation(pair, operands)
        if visit is not None:
            sliced = visit(pair, operands, sliced)
        env.update(zip(a.outvars, sliced.relations, strict=True))
        equations += sliced.equations
        changed |= sliced.changed
    outvars = [a if differ(a, b) else b for a, b in zip(whole.outvars, part.outvars, strict=True)]
    changed |= outvars != list(part.outvars)
    return Followed([_of(v, env) for v in whole.outvars], equations, outvars, changed)


def _of(atom: Atom, env: dict[Var, SliceRelation]) -> SliceRelation:
    if isinstance(atom, Literal):
        return Replicated(zero=not np.any(atom.val))
    return env[atom]


def relate_equation(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the relations of the results of any equation."""
    count = len(pair.part.outvars)
    if is_per_slice(pair.part):
        lost = joined_among(given)
        alike = all(isinstance(p, Replicated) for p in given)
        own = [lost or own_value(pair, j) for j in range(count)]
        same = [Replicated() if alike and p == PerSlice() else p for p in own]
        return Sliced(same, [pair.part])
    programs = list(sub_jaxprs(pair.part))
    if not programs or pair.name.startswith(("reduce", "scatter", "cum", "custom_lin")):
        return relate(pair, given)
    lost = joined_among(given)
    if lost is None and any(isinstance(p, RowNumbers) for p in given):
        lost = Joined(pair.part)
    if lost is not None:
        return Sliced([lost] * count, [pair.part])
    if pair.name == "scan":
        return _scan(pair, list(given))
    if pair.name == "while":
        return _while(pair, list(given))
    if alternatives(pair.part):
        return _alternatives(pair, list(given))
    return relate(pair, given)


def _alternatives(pair: Pair, given: list[SliceRelation]) -> Sliced:
    """Return the relations of the results of a called function, or of a conditional."""
    programs = list(zip(alternatives(pair.whole), alternatives(pair.part), strict=True))
    lost = Sliced([Joined(pair.part)] * len(pair.part.outvars), [pair.part])
    inner = len(programs[0][0].invars)
    if not all(isinstance(p, Replicated) for p in given[: len(given) - inner]):
        return lost  # the index of the branch
    found = [_inside(pair, a, b, given[len(given) - inner :]) for a, b in programs]
    outs = [common(each, pair.part) for each in zip(*(f.outs for f in found), strict=True)]
    if not any(f.changed for f in found):
        joins = None if joined_among(outs) else _follow_rule(pair, given, outs)
        return Sliced([joins or out for out in outs], [pair.part])
    if pair.name != "cond" and pair.name not in CALLS and "jaxpr" not in pair.part.params:
        return lost  # its rule for derivatives is for the function as it is
    bodies = [f.program(b) for (_, b), f in zip(programs, found, strict=True)]
    key = "branches" if pair.name == "cond" else "jaxpr"
    old = pair.part.params[key]
    new: Any = (
        rewritten_as(old[0], bodies[0]),
        *(rewritten_as(o, b) for o, b in zip(old[1:], bodies[1:], strict=True)),
    )
    return _replaced(pair, outs, {key: new})


def _inside(pair: Pair, whole: Jaxpr, part: Jaxpr, given: Sequence[SliceRelation]) -> Followed:
    """Follow a program inside an equation."""
    return follow_relations(whole, part, given, pair.num_slices, in_rule=pair.in_rule)


def _follow_rule(
    pair: Pair, given: Sequence[SliceRelation], outs: Sequence[SliceRelation]
) -> Joined | None:
    """Return where the derivative rule of a called function, if it has one, joins examples."""
    if pair.in_rule or pair.name not in RULES:
        return None

    def follow(whole: Jaxpr, part: Jaxpr, operands: Sequence[SliceRelation]) -> Followed | None:
        if not same_structure(whole, part):
            return None
        return follow_relations(whole, part, operands, pair.num_slices, in_rule=True)

    return follow_rule(pair, given, outs, follow)


def _scan(pair: Pair, given: list[SliceRelation]) -> Sliced:
    """Return the relations of a loop's carry and of what its iterations leave, stacked.

    A loop over the examples is a function of each, if nothing goes from one iteration to the next.
    """
    whole, part = pair.whole.params, pair.part.params
    consts, carry = scan_counts(pair.part)
    lost = Sliced([Joined(pair.part)] * len(pair.part.outvars), [pair.part])
    a, b = read_jaxpr(whole["jaxpr"]), read_jaxpr(part["jaxpr"])
    xs = given[consts + carry :]
    if Sharded(0) in xs:
        alone = carry == 0 and all(isinstance(p, Replicated) for p in given[:consts])
        alone &= all(p == Sharded(0) for p in xs)
        if not alone or structure_text(a) != structure_text(b):
            return lost
        return Sliced([own_value(pair, j) for j in range(len(pair.part.outvars))], [pair.part])
    if whole["length"] != part["length"]:
        return lost
    rows = [Sharded(p.axis - 1) if isinstance(p, Sharded) else p for p in xs]

    def body(state: list[SliceRelation]) -> Followed:
        return _inside(pair, a, b, [*given[:consts], *state, *rows])

    state, found = _fixed_point(given[consts : consts + carry], body, pair.part)
    stacked = [Sharded(p.axis + 1) if isinstance(p, Sharded) else p for p in found.outs[carry:]]
    outs = [*state, *(Joined(pair.part) if isinstance(p, RowNumbers) else p for p in stacked)]
    if not found.changed:
        return Sliced(outs, [pair.part])
    return _replaced(pair, outs, {"jaxpr": rewritten_as(part["jaxpr"], found.program(b))})


def _while(pair: Pair, given: list[SliceRelation]) -> Sliced:
    """Return the relations of a loop's state, if the test is the same in every slice."""
    whole, part = pair.whole.params, pair.part.params
    tests, consts = while_counts(pair.part)
    a, b = (read_jaxpr(params["body_jaxpr"]) for params in (whole, part))
    c, d = (read_jaxpr(params["cond_jaxpr"]) for params in (whole, part))

    def body(state: list[SliceRelation]) -> Followed:
        return _inside(pair, a, b, [*given[tests : tests + consts], *state])

    state, found = _fixed_point(given[tests + consts :], body, pair.part)
    test = _inside(pair, c, d, [*given[:tests], *state])
    if not isinstance(test.outs[0], Replicated):
        return Sliced([Joined(pair.part)] * len(pair.part.outvars), [pair.part])
    if not found.changed and not test.changed:
        return Sliced(state, [pair.part])
    params = {
        "body_jaxpr": rewritten_as(part["body_jaxpr"], found.program(b)),
        "cond_jaxpr": rewritten_as(part["cond_jaxpr"], test.program(d)),
    }
    return _replaced(pair, state, params)


def _fixed_point(
    initial: Sequence[SliceRelation], body: Callable[[list[SliceRelation]], Followed], eqn: Equation
) -> tuple[list[SliceRelation], Followed]:
    """Return the relations that a loop's state keeps from one iteration to the next."""
    state = list(initial)
    while True:
        found = body(state)
        after = zip(state, found.outs[: len(state)], strict=True)
        new = [common(each, eqn) for each in after]
        if new == state:
            return state, found
        state = new


def _replaced(pair: Pair, outs: Sequence[SliceRelation], params: dict[str, Any]) -> Sliced:
    eqn = pair.part.replace(params={**pair.part.params, **params})
    return Sliced(outs, [eqn], changed=True)
