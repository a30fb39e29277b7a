"""Values of a loss that are computed outside of it: before it on the whole batch, or after it.

- The denominator of a masked mean is a sum over all examples' masks, which no slice can compute.
  Where a value depends on the batch alone, not on the parameters, it is computed once, on the whole
  batch, and becomes an operand of the loss: replicated, or cut into slices if it has a row an
  example.
- For a perplexity or an F1 score a slice has only its part of the sums, to which no function can be
  applied. So the loss returns the sums in the place of such a result, and the result is computed
  from them after the pipeline.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp

from launcher.trace.errors import BatchError
from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    is_var,
    needed,
    renamed,
    source_line,
    splice,
)
from launcher.trace.ir.primitive_kinds import (
    CASES,
    EXTREMA,
    KEEPS_ROWS,
    LINEAR_IN_FIRST,
    REDUCTIONS,
    ROW_WISE,
    SAME_FOR_EXTREMA,
    SCALING,
)
from launcher.trace.slicing.draws import differs_from_one_device, is_typed, raw_generator
from launcher.trace.slicing.follow_relations import (
    follow_relations,
    matching,
    relate_equation,
    same_structure,
)
from launcher.trace.slicing.relations import (
    UNEVEN,
    InParts,
    Joined,
    Pair,
    Partial,
    Replicated,
    RowNumbers,
    Sharded,
    Sliced,
    SliceRelation,
    grown_axis,
)

# (index of an equation of the loss, index of its result)
ResultIndex: TypeAlias = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Outside:
    """What of a loss is computed before it on the whole batch, or after it.

    Attributes:
        places: where the values are made that become operands of the loss or, for what is computed
            after it, results; the same in every trace of the loss with its `structure`.
        results: the positions of the results that the loss no longer returns.
    """

    places: tuple[ResultIndex, ...]
    structure: Jaxpr
    results: tuple[int, ...] = ()

    def values(self, eqn: Equation) -> list[Var]:
        """Return the values that are made at the places, in a trace of the loss.

        Raises:
            BatchError: its program is another one than that in which they were found.
        """
        jaxpr: Jaxpr = eqn.params["jaxpr"]
        places: Sequence[ResultIndex] = self.places
        if not same_structure(jaxpr, self.structure):
            same = matching(self.structure, jaxpr)
            if any(i not in same for i, _ in places):
                raise unlike_program(eqn)
            places = [(same[i], j) for i, j in places]
        return [jaxpr.eqns[i].outvars[j] for i, j in places]


def unlike_program(eqn: Equation) -> BatchError:
    """Return the error of a loss whose program on a slice cannot be matched with the whole one."""
    return BatchError(
        f"the loss at {source_line(eqn)} has another program on a slice than on the whole batch; "
        "give each slice (microbatches × data-parallel replicas) two rows or more, or do not let "
        "the program depend on their number"
    )


def _places(jaxpr: Jaxpr) -> dict[Var, ResultIndex]:
    return {v: (i, j) for i, eqn in enumerate(jaxpr.eqns) for j, v in enumerate(eqn.outvars)}


def operand_axes(whole: Equation, part: Equation, num_slices: int) -> list[int | None]:
    """Return the axis of each operand of the loss along which it is cut; None: it is not.

    Raises:
        BatchError: an operand grows with the batch in another way.
    """
    axes = []
    for a, b in zip(whole.invars, part.invars, strict=True):
        axes.append(grown_axis(a.aval.shape, b.aval.shape, num_slices))
        if axes[-1] == UNEVEN:
            raise BatchError(
                f"an input of the loss has shape {a.aval.shape} on the whole batch and "
                f"{b.aval.shape} on one of {num_slices} slices; it must grow along one axis in "
                "proportion to the batch"
            )
    return axes


def operand_relations(axes: Iterable[int | None]) -> list[SliceRelation]:
    """Return the relations of the loss's operands, by the axes along which they are cut."""
    return [Replicated() if axis is None else Sharded(axis) for axis in axes]


def find_whole_batch(
    whole: Equation,
    part: Equation,
    num_slices: int,
    constants: Set[int],
    fewer_than: int | None = None,
) -> Outside | None:
    """Return what is to be computed on the whole batch.

    Arrays joined along the examples are, unless that joins examples in more results than if they
    stay in parts: labels beside real and fake examples are in the same parts as these.

    Args:
        whole: the equation of the loss on the whole batch.
        part: the equation of the loss on one slice.
        num_slices: how many slices.
        constants: the operands of the loss that are captured arrays.
        fewer_than: if given, arrays stay in parts, and None is returned unless fewer results join.
    """
    a, b = whole.params["jaxpr"], part.params["jaxpr"]
    if len(whole.invars) != len(part.invars) or not same_structure(a, b):
        return None
    axes = operand_axes(whole, part, num_slices)
    cut = {i for i, axis in enumerate(axes) if axis is not None}
    finder = _Finder(_free(whole, cut | constants), _places(a), fewer_than is not None)
    followed = follow_relations(a, b, operand_relations(axes), num_slices, finder.visit)
    made = _places(b)
    used = {v for eqn in b.eqns for v in eqn.invars if is_var(v)}  # maybe as indices into a slice
    for v, relation in zip(b.outvars, followed.outs, strict=True):
        if is_var(v) and isinstance(relation, RowNumbers) and v not in used:
            finder.found.add(made[v])

    def reached() -> set[Var]:
        """Return which of the values found the results are computed from, and not one another."""
        ends = {b.eqns[i].outvars[j] for i, j in finder.found}
        live = needed(followed.equations, b.outvars, ends)
        read = (v for atoms in (b.outvars, *(e.invars for e in live)) for v in atoms if is_var(v))
        return ends.intersection(read)

    # What is computed on the whole batch and what slices compute see the same random numbers.
    for eqn in needed(b.eqns, reached()):
        if differs_from_one_device(eqn):
            finder.found.update(made[v] for v in eqn.outvars if not is_typed(v.aval))
    found = Outside(tuple(sorted(made[v] for v in reached())), a)
    lost = sum(isinstance(p, Joined) for p in followed.outs)
    if fewer_than is not None:
        return found if lost < fewer_than else None
    return (find_whole_batch(whole, part, num_slices, constants, lost) if lost else None) or found


def may_need_whole_batch(eqn: Equation, batch_size: int, constants: Set[int]) -> bool:
    """Return whether `find_whole_batch` may find something, by the loss on the whole batch alone.

    It finds nothing where all that does not depend on the parameters is element-wise, or has no
    dimension that the batch size divides.
    """
    jaxpr: Jaxpr = eqn.params["jaxpr"]

    def long(v: Atom) -> list[tuple[int, int]]:
        """Return the dimensions that may be the examples, if the value has any."""
        return [(d, n) for d, n in enumerate(v.aval.shape) if n % batch_size == 0]

    def is_plain(e: Equation) -> bool:
        if e.primitive.name in ROW_WISE or not any(map(long, (*e.invars, *e.outvars))):
            return True
        return e.primitive.name in KEEPS_ROWS and long(e.invars[0]) == long(e.outvars[0])

    free = _free(eqn, {i for i, v in enumerate(jaxpr.invars) if long(v)} | constants)
    for e in jaxpr.eqns:
        if all(v in free for v in e.invars if is_var(v)):
            free.update(e.outvars)
            if not is_plain(e):
                return True
    return False


def _free(eqn: Equation, known: Set[int]) -> set[Var]:
    """Return the operands that are no parameters: `known` ones, numbers and keys."""
    jaxpr, wrt = eqn.params["jaxpr"], eqn.params["wrt"]

    def is_small(v: Var) -> bool:  # not an array of the model's state
        return v.aval.size <= 1 or is_typed(v.aval) or raw_generator(v, jaxpr.eqns) is not None

    operands = [(i, v) for i, v in enumerate(jaxpr.invars) if i not in wrt]
    return {v for i, v in operands if i in known or is_small(v)}


class _Finder:
    """Collects, equation by equation, what no slice can compute but the whole batch can.

    Attributes:
        free: the values that depend on the batch, numbers, keys and captured arrays alone.
        places: where each value is made.
        found: the places of the free ones that are to be computed on the whole batch.
        outside: the relations of those; that of arrays joined along the examples, unless they are
            to stay `in_parts`, is one of them.
    """

    def __init__(self, free: set[Var], places: Mapping[Var, ResultIndex], in_parts: bool) -> None:
        self.free, self.places = free, places
        self.found: set[ResultIndex] = set()
        self.outside = Joined | Partial if in_parts else Joined | Partial | InParts

    def visit(self, pair: Pair, given: list[SliceRelation], sliced: Sliced) -> Sliced:
        """Return what became of an equation, with whole-batch values where slices cannot."""
        if not all(v in self.free for v in pair.whole.invars if is_var(v)):
            return self._with_counted_rows(pair, given, sliced)
        self.free.update(pair.whole.outvars)
        relations = list(sliced.relations)
        for j, v in enumerate(pair.whole.outvars):
            shape = pair.by_shape(j)
            if isinstance(relations[j], self.outside) and not isinstance(shape, Joined):
                self.found.add(self.places[v])
                relations[j] = shape
        return Sliced(relations, sliced.equations, sliced.changed)

    def _with_counted_rows(self, pair: Pair, given: list[SliceRelation], sliced: Sliced) -> Sliced:
        """Take the whole batch's row numbers where they are more than indices into a slice."""
        counted = [
            v
            for v, p in zip(pair.whole.invars, given, strict=True)
            if is_var(v) and isinstance(p, RowNumbers) and p.column is None
        ]
        if not counted or not any(isinstance(p, Joined) for p in sliced.relations):
            return sliced
        again = [Sharded(p.axis) if isinstance(p, RowNumbers) else p for p in given]
        self.found.update(self.places[v] for v in counted)
        return relate_equation(pair, again)


def in_words(eqn: Equation, found: Outside) -> tuple[str, ...]:
    """Return what is computed on the whole batch: the primitives and their lines, without keys."""
    equations = eqn.params["jaxpr"].eqns
    made = [equations[i] for i, j in found.places if not is_typed(equations[i].outvars[j].aval)]
    return tuple(dict.fromkeys(f"{e.primitive.name} at {source_line(e)}" for e in made))


def with_operands(eqn: Equation, found: Outside, operands: Sequence[Var] | None = None) -> Equation:
    """Return the loss's equation with operands for what is computed on the whole batch.

    Args:
        eqn: the equation, on the whole batch or on a slice.
        found: what is computed on the whole batch.
        operands: the variables that hold it; by default those of the loss's own program.

    Raises:
        BatchError: the program is another one than that in which it was found.
    """
    jaxpr, inner = eqn.params["jaxpr"], found.values(eqn)
    renamed = {v: Var(v.aval) for v in inner}  # what their equations make has another name
    equations = [
        e.replace(outvars=[renamed.get(v, v) for v in e.outvars])
        if any(v in renamed for v in e.outvars)
        else e
        for e in jaxpr.eqns
    ]
    closed = Jaxpr([*jaxpr.invars, *inner], equations, jaxpr.outvars)
    invars = [*eqn.invars, *(operands or inner)]
    return eqn.replace(invars=invars, params={**eqn.params, "jaxpr": closed})


def whole_batch_equations(eqn: Equation, found: Outside) -> tuple[list[Equation], list[Var]]:
    """Return the equations that compute `found` outside the loss, and the variables it is in."""
    jaxpr, inner = eqn.params["jaxpr"], found.values(eqn)
    env: dict[Var, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    equations = renamed(needed(jaxpr.eqns, inner), env)
    return equations, [env[v] for v in inner]


def may_finish(eqn: Equation, batch_size: int) -> bool:
    """Return whether `find_finish` may find something, by the loss on the whole batch alone."""
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


def find_finish(whole: Equation, part: Equation, num_slices: int) -> Outside | None:
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
    relations: dict[Var, SliceRelation] = dict(zip(a.invars, given, strict=True))

    def note(pair: Pair, operands: list[SliceRelation], made: Sliced) -> Sliced:
        del operands
        relations.update(zip(pair.whole.outvars, made.relations, strict=True))
        return made

    follow_relations(a, b, given, num_slices, note)
    places = _places(a)
    ends: set[Var] = set()
    results = []
    for i, v in _candidates(whole).items():
        if isinstance(relations[v], Joined):
            found = _ends(v, a, places, relations)
            if found is not None:
                results.append(i)
                ends |= found
    if not results:
        return None
    return Outside(tuple(sorted(places[v] for v in ends if v in places)), a, tuple(results))


def _candidates(eqn: Equation) -> dict[int, Var]:
    """Return the results without a `reduce` of the user's that are not differentiated."""
    outs = enumerate(zip(eqn.params["jaxpr"].outvars, eqn.params["reduce"], strict=True))
    first = 1 if eqn.params["wrt"] else 0
    return {i: v for i, (v, said) in outs if i >= first and said == "infer" and is_var(v)}


def _ends(
    result: Var,
    jaxpr: Jaxpr,
    places: Mapping[Var, ResultIndex],
    relations: Mapping[Var, SliceRelation],
) -> set[Var] | None:
    """Return of which partial and shared values a result is a function; None: of others, too."""
    ends: set[Var] = set()
    waiting, seen = [result], set()
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        if isinstance(relations[v], Partial | Replicated):
            ends.add(v)
        elif isinstance(relations[v], Joined):
            waiting += [x for x in jaxpr.eqns[places[v][0]].invars if is_var(x)]
        else:
            return None
    return ends


def with_results(eqn: Equation, found: Outside, outvars: Sequence[Var] | None = None) -> Equation:
    """Return the loss's equation with what is needed for the results that are computed after it.

    Args:
        eqn: the equation, on the whole batch or on a slice.
        found: what is computed after the loss.
        outvars: the variables for what it needs; by default those of the loss's own program.

    Raises:
        BatchError: the program is another one than that in which it was found.
    """
    jaxpr, ends = eqn.params["jaxpr"], found.values(eqn)
    said, count = eqn.params["reduce"], len(jaxpr.outvars)
    kept = [i for i in range(count) if i not in found.results]
    closed = Jaxpr(jaxpr.invars, jaxpr.eqns, [*(jaxpr.outvars[i] for i in kept), *ends])
    words = (*(said[i] for i in kept), *("infer" for _ in ends))
    return eqn.replace(
        params={**eqn.params, "jaxpr": closed, "reduce": words},
        outvars=[*(eqn.outvars[i] for i in kept), *(outvars or ends), *eqn.outvars[count:]],
    )


def finishing_equations(eqn: Equation, found: Outside) -> tuple[list[Equation], list[Var]]:
    """Return the equations that compute the results after the loss, and the variables of the ends.

    Args:
        eqn: the loss's equation on the whole batch, with all its results.
        found: what is computed after it.
    """
    jaxpr, ends = eqn.params["jaxpr"], found.values(eqn)
    names = [Var(v.aval) for v in ends]
    equations: list[Equation] = []
    for i in found.results:
        env: dict[Var, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
        env.update(zip(ends, names, strict=True))
        result = jaxpr.outvars[i]
        if result in env:  # an operand, as it is
            (copy,), _ = splice(lambda x: [jnp.copy(x)], [env[result]])
            equations.append(copy.replace(outvars=[eqn.outvars[i]]))
            continue
        made = needed(jaxpr.eqns, [result], env)
        env[result] = eqn.outvars[i]
        equations += renamed(made, env)
    return equations, names
