"""Follow the relations of a loss's values from its operands to its results.

The loss is read as traced on the whole batch and as traced on one slice, equation by equation,
through loops, branches and calls. What comes out is the relation of each result, and the slice's
program with the changes that make its results combine to the whole batch's: numbers that the batch
size decides are the whole batch's, and what all slices share is counted once.

The derivative rule that a function brings (`custom_vjp`, `custom_jvp`) runs only in the backward
pass, and may join examples though the function does not. So the rule is traced, on the whole batch
and on a slice, and followed like any other program. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    alternatives,
    bodies,
    free_vars,
    has_tangent,
    inline_calls,
    is_var,
    jaxpr_as_fun,
    make_jaxpr,
    needed,
    read_jaxpr,
    replace_bodies,
    scan_counts,
    source_line,
    structure_text,
    sub_jaxprs,
    while_counts,
    with_captured,
)
from launcher.trace.ir.primitive_kinds import CASES, DRAWN_BY_PLACE, LINEAR_IN_FIRST, SCALING
from launcher.trace.primitives import is_per_slice
from launcher.trace.slicing.draws import draw_rows, draws_rows, key_operands, with_own_keys
from launcher.trace.slicing.relations import (
    InParts,
    Joined,
    Pair,
    Partial,
    PerSlice,
    Replicated,
    RowNumbers,
    Sharded,
    Sliced,
    SliceRelation,
    common,
    differ,
    joined_among,
    literal_value,
    mark_unordered,
    relate,
)
from launcher.trace.slicing.rows_in_parts import join_rows, with_parts

# Called with each pair of equations and what became of it; may return something else.
Visit = Callable[[Pair, list[SliceRelation], Sliced], Sliced]
# Called with a function, its arguments and what comes in; returns the derivatives.
Derive = Callable[[Callable[..., list[Any]], list[Any], list[Any]], Any]

_FORWARD = "custom_jvp_call"
_WITH_RULES = frozenset((_FORWARD, "custom_vjp_call"))


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
        return replace(jaxpr, eqns=self.equations, outvars=self.outvars)


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
    number: Var | None = None,
) -> Followed:
    """Return the relations of a program's results.

    Args:
        whole: the program on the whole batch.
        part: the program on a slice, of the same structure.
        given: the relations of its inputs.
        num_slices: how many slices make the batch.
        visit: sees every equation of the program itself, not those in its loops and branches.
        in_rule: whether the program is part of a derivative rule.
        number: the slice's number, which its program may read; None: its program is of no interest.
    """
    env: dict[Var, SliceRelation] = dict(zip(whole.invars, given, strict=True))
    env.update((v, Replicated()) for v in whole.constvars)

    def relation(atom: Atom) -> SliceRelation:
        return env[atom] if is_var(atom) else Replicated(zero=not np.any(atom.val))

    equations: list[Equation] = []
    changed = False
    for a, b in zip(whole.eqns, part.eqns, strict=True):
        pair = Pair(a, b, num_slices, in_rule, number)
        operands = [relation(v) for v in a.invars]
        sliced = relate_equation(pair, operands)
        if visit is not None:
            sliced = visit(pair, operands, sliced)
        env.update(zip(a.outvars, sliced.relations, strict=True))
        equations += sliced.equations
        changed |= sliced.changed
    outvars = [a if differ(a, b) else b for a, b in zip(whole.outvars, part.outvars, strict=True)]
    changed |= outvars != list(part.outvars)
    return Followed([relation(v) for v in whole.outvars], equations, outvars, changed)


def relate_equation(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the relations of the results of any equation."""
    if pair.number is not None and (drawn := _drawn(pair, pair.number, given)):
        return drawn
    lost = joined_among(given)
    if is_per_slice(pair.part):
        return pair.all(lost) if lost else with_parts(pair, given, _own_values)
    plain = pair.name.startswith(("reduce", "scatter", "cum", "custom_lin"))
    if plain or not any(sub_jaxprs(pair.part)):
        return join_rows(pair, given) or with_parts(pair, given, relate)
    if lost is not None:
        return pair.all(lost)
    if any(isinstance(p, RowNumbers) for p in given):
        return pair.joined()
    if pair.name == "scan":
        return _scan(pair, given)
    if pair.name == "while":
        return _while(pair, given)
    return _alternatives(pair, given) if alternatives(pair.part) else relate(pair, given)


def _own_values(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the results of an equation that is meant of the slice alone (`per_slice`)."""
    alike = all(isinstance(p, Replicated) for p in given)
    own = [pair.own_value(j) for j in pair.results]
    same = [Replicated() if alike and p == PerSlice() else p for p in own]
    return _with_own_draws(pair, given, Sliced(mark_unordered(pair, given, same), [pair.part]))


def _drawn(pair: Pair, number: Var, given: Sequence[SliceRelation]) -> Sliced | None:
    """Return the rows that a slice draws from keys that all share; None: it draws no such."""
    if pair.name not in DRAWN_BY_PLACE or not isinstance(given[0], Replicated):
        return None
    shape = pair.by_shape(0)
    if isinstance(shape, Sharded):
        rows = pair.whole.outvars[0].aval.shape[shape.axis]
        made = draw_rows(pair.part, shape.axis, rows, number)
        return Sliced([replace(shape, unordered=True)], [made], changed=True)
    if isinstance(shape, Joined) and is_per_slice(pair.part):  # as many as a capacity, say
        return Sliced([PerSlice()], [with_own_keys(pair.part, [0], number)], changed=True)
    return None


def _with_own_draws(pair: Pair, given: Sequence[SliceRelation], sliced: Sliced) -> Sliced:
    """Return the results with numbers of the slice's own where programs inside stay as they are."""
    if pair.number is None or not draws_rows(pair.whole, pair.part):
        return sliced
    if not key_operands(pair.part):  # it makes a key, the same in each slice
        return pair.joined()
    shared = {i for i, p in enumerate(given) if isinstance(p, Replicated)}
    if shared.isdisjoint(key_operands(pair.part)):
        return sliced
    return replace(sliced, equations=[with_own_keys(pair.part, shared, pair.number)], changed=True)


def _alternatives(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the relations of the results of a called function, or of a conditional."""
    programs = list(zip(alternatives(pair.whole), alternatives(pair.part), strict=True))
    own = len(given) - len(programs[0][0].invars)
    if not all(isinstance(p, Replicated) for p in given[:own]):  # the index of the branch
        return pair.joined()
    found = [_inside(pair, a, b, given[own:]) for a, b in programs]
    outs = [common(each, pair.part) for each in zip(*(f.outs for f in found), strict=True)]
    if not any(f.changed for f in found):
        joins = None if joined_among(outs) else _follow_rule(pair, given, outs)
        sliced = Sliced([joins or out for out in outs], [pair.part])
        return _with_own_draws(pair, given, sliced)
    if pair.name != "cond" and "jaxpr" not in pair.part.params:
        return pair.joined()  # its rule for derivatives is for the function as it is
    return _rewritten(pair, outs, [f.program(b) for (_, b), f in zip(programs, found, strict=True)])


def _inside(pair: Pair, whole: Jaxpr, part: Jaxpr, given: Sequence[SliceRelation]) -> Followed:
    """Follow a program inside an equation."""
    number = None if pair.name in _WITH_RULES else pair.number
    return follow_relations(
        whole, part, given, pair.num_slices, in_rule=pair.in_rule, number=number
    )


def _scan(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the relations of a loop's carry and of what its iterations leave, stacked.

    A loop over the examples is a function of each, if nothing goes from one iteration to the next.
    """
    consts, carry = scan_counts(pair.part)
    a, b = (read_jaxpr(eqn.params["jaxpr"]) for eqn in (pair.whole, pair.part))
    xs = given[consts + carry :]
    if Sharded(0) in xs:
        alone = carry == 0 and all(isinstance(p, Replicated) for p in given[:consts])
        alone &= all(p == Sharded(0) for p in xs)
        if not alone or structure_text(a) != structure_text(b):
            return pair.joined()
        return Sliced([pair.own_value(j) for j in pair.results], [pair.part])
    if pair.whole.params["length"] != pair.part.params["length"]:
        return pair.joined()
    rows = [_behind(p, -1) for p in xs]

    def body(state: list[SliceRelation]) -> Followed:
        return _inside(pair, a, b, [*given[:consts], *state, *rows])

    state, found = _fixed_point(given[consts : consts + carry], body, pair.part)
    stacked = [_behind(p, 1) for p in found.outs[carry:]]
    outs = [*state, *(Joined(pair.part) if isinstance(p, RowNumbers) else p for p in stacked)]
    return _rewritten(pair, outs, [found.program(b)], found.changed)


def _behind(relation: SliceRelation, count: int) -> SliceRelation:
    """Return the relation of a value that stands behind so many more axes."""
    if isinstance(relation, Sharded | InParts):
        return replace(relation, axis=relation.axis + count)
    return relation


def _while(pair: Pair, given: Sequence[SliceRelation]) -> Sliced:
    """Return the relations of a loop's state, if the test is the same in every slice."""
    tests, consts = while_counts(pair.part)
    (c, a), (d, b) = ([body.jaxpr for body in bodies(eqn)] for eqn in (pair.whole, pair.part))

    def body(state: list[SliceRelation]) -> Followed:
        return _inside(pair, a, b, [*given[tests : tests + consts], *state])

    state, found = _fixed_point(given[tests + consts :], body, pair.part)
    test = _inside(pair, c, d, [*given[:tests], *state])
    if not isinstance(test.outs[0], Replicated):
        return pair.joined()
    changed = found.changed or test.changed
    return _rewritten(pair, state, [test.program(d), found.program(b)], changed)


def _fixed_point(
    initial: Sequence[SliceRelation], body: Callable[[list[SliceRelation]], Followed], eqn: Equation
) -> tuple[list[SliceRelation], Followed]:
    """Return the relations that a loop's state keeps from one iteration to the next."""
    state = [_ordered(p) for p in initial]
    while True:
        found = body(state)
        after = zip(state, found.outs[: len(state)], strict=True)
        new = [common(each, eqn) for each in after]
        if new == state:
            return state, found
        state = new


def _rewritten(
    pair: Pair, outs: Sequence[SliceRelation], programs: Sequence[Jaxpr], changed: bool = True
) -> Sliced:
    """Return the equation with other programs inside, in the order of `bodies`."""
    if not changed:
        return Sliced(outs, [pair.part])
    if any(pair.number in free_vars(program.eqns) for program in programs):
        assert pair.number is not None
        return Sliced(outs, [with_captured(pair.part, programs, pair.number)], changed=True)
    following = iter(programs)
    return Sliced(outs, [replace_bodies(pair.part, lambda _: next(following))], changed=True)


@dataclass(frozen=True)
class _Function:
    """A function with a rule of its own: equal for calls of the same one with alike arrays.

    Equal layers of a model call the same one.
    """

    eqn: Equation = field(compare=False)
    key: tuple[Any, ...]

    @classmethod
    def of(cls, eqn: Equation) -> _Function:
        """Return the function that an equation calls."""
        params = tuple((key, id(eqn.params[key])) for key in sorted(eqn.params))
        return cls(eqn, (params, *(v.aval for v in (*eqn.invars, *eqn.outvars))))


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

    incoming = [eqn.invars[i] for i in moving] if derive is _tangents else outs
    return inline_calls(
        make_jaxpr(derived, [v.aval for v in eqn.invars], [v.aval for v in incoming])
    )


def _tangents(fun: Callable[..., list[Any]], at: list[Any], rates: list[Any]) -> Any:
    return jax.jvp(fun, at, rates)[1]


def _cotangents(fun: Callable[..., list[Any]], at: list[Any], seeds: list[Any]) -> Any:
    return jax.vjp(fun, *at)[1](seeds)


def _follow_rule(
    pair: Pair, given: Sequence[SliceRelation], outs: Sequence[SliceRelation]
) -> Joined | None:
    """Return where the derivative rule of a called function joins examples; None: it does not.

    A rule within the rule is not looked at again.

    Args:
        pair: the call of the function.
        given: the relation of each operand.
        outs: the relation of each result.
    """
    if pair.in_rule or pair.name not in _WITH_RULES or any(isinstance(p, PerSlice) for p in outs):
        return None
    moving = tuple(i for i, v in enumerate(pair.part.invars) if is_var(v) and has_tangent(v.aval))
    results = tuple(j for j, v in enumerate(pair.part.outvars) if has_tangent(v.aval))
    if not moving or not results:
        return None
    moved = [outs[j] for j in results]
    derive: Derive = _tangents if pair.name == _FORWARD else _cotangents
    incoming = [_of_seed(p, pair) for p in moved]
    if derive is _tangents:
        incoming = [_without_zero(given[i]) for i in moving]
    whole, part = (
        _derivative(_Function.of(eqn), derive, moving, results) for eqn in (pair.whole, pair.part)
    )
    if same_structure(whole, part):
        found = follow_relations(whole, part, [*given, *incoming], pair.num_slices, in_rule=True)
        if derive is _tangents:
            kept = _keeps_tangents(found, moved)
        else:
            kept = _keeps_cotangents(pair, (whole, part), found, [given[i] for i in moving], moved)
        if kept:
            return None
    return Joined(pair.part, in_rule=True)


def _keeps_tangents(found: Followed, outs: Sequence[SliceRelation]) -> bool:
    """Return whether a result's tangent has the relation of the result, or is zero."""
    pairs = zip(found.outs, outs, strict=True)
    return not found.changed and all(p in (out, Replicated(zero=True)) for p, out in pairs)


def _keeps_cotangents(
    pair: Pair,
    rules: tuple[Jaxpr, Jaxpr],
    found: Followed,
    given: Sequence[SliceRelation],
    outs: Sequence[SliceRelation],
) -> bool:
    """Return whether a row's cotangent is the row's own, and those of what is shared are added up.

    Args:
        pair: the call.
        rules: its rule, on the whole batch and on a slice.
        found: the relations of the cotangents that it makes.
        given: the relations of the operands that they belong to.
        outs: the relations of the results that have cotangents.
    """
    of_mean = all(isinstance(p, Partial) and p.op == "mean" for p in outs)
    if not of_mean and found.changed:
        return False
    whole, ops = rules[0], ("sum", "mean") if of_mean else ("sum",)
    for j, (operand, relation) in enumerate(zip(given, found.outs, strict=True)):
        if relation == Replicated(zero=True) or _is_zero(whole.outvars[j], whole.eqns):
            continue
        own = isinstance(operand, Sharded | InParts) and relation == operand
        added = isinstance(relation, Partial) and relation.op in ops
        if not (own or added):
            return False
        if of_mean and not _divides_once(*rules, j, len(outs), pair.num_slices):
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
            numbers = [literal_value(atom) for atom in changed[0]]
            large, small = numbers if name == "div" else numbers[::-1]
            if not np.isclose(large, num_slices * small, rtol=1e-6):
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


def _is_zero(atom: Atom, equations: Sequence[Equation] = ()) -> bool:
    """Return whether a value is a zero, or made of one by repeating it."""
    if not is_var(atom):
        return not np.any(atom.val)
    made = next((e for e in equations if atom in e.outvars), None)
    if made is None or made.primitive.name != "broadcast_in_dim":
        return False
    return _is_zero(made.invars[0])


def _of_seed(out: SliceRelation, pair: Pair) -> SliceRelation:
    """Return the relation of a result's cotangent."""
    if isinstance(out, Replicated):
        return Partial("sum", pair.part)  # each slice has the part of its own rows
    return Replicated() if isinstance(out, Partial) else _ordered(out)


def _ordered(relation: SliceRelation) -> SliceRelation:
    return Sharded(relation.axis) if isinstance(relation, Sharded) else relation


def _without_zero(relation: SliceRelation) -> SliceRelation:
    return Replicated() if isinstance(relation, Replicated) else relation
