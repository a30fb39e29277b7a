"""Values of the whole batch that a loss needs, computed before the pipeline for all slices.

The denominator of a masked mean is a sum over all examples' masks, which no slice can compute.
Where a value depends on the batch alone, not on the parameters, it is computed once, on the whole
batch, and becomes an operand of the loss: replicated, or cut into slices if it has a row an
example. Random keys that the loss makes become operands, too, so that each slice draws its own
numbers for its own rows; numbers of which there are as many whatever the batch are drawn here,
once for all slices. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from launcher.trace.errors import BatchError
from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    is_var,
    needed,
    source_line,
    sub_jaxprs,
)
from launcher.trace.ir.primitive_kinds import DRAWS, KEEPS_ROWS, KEY_MAKERS, RANDOM, ROW_WISE
from launcher.trace.slicing.follow_relations import (
    follow_relations,
    matching,
    relate_equation,
    same_structure,
)
from launcher.trace.slicing.random_keys import is_typed, raw_generator
from launcher.trace.slicing.relations import (
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
class WholeBatch:
    """Results of equations of the loss that are computed on the whole batch.

    `places`: where they are made, the same in every trace of the loss with its `structure`.
    """

    places: tuple[ResultIndex, ...]
    structure: Jaxpr


def operand_axes(whole: Equation, part: Equation, num_slices: int) -> list[int | None]:
    """Return the axis of each operand of the loss along which it is cut; None: it is not.

    Raises:
        BatchError: an operand grows with the batch in another way.
    """
    axes = []
    for a, b in zip(whole.invars, part.invars, strict=True):
        try:
            axes.append(grown_axis(a.aval.shape, b.aval.shape, num_slices))
        except ValueError:
            raise BatchError(
                f"an input of the loss has shape {a.aval.shape} on the whole batch and "
                f"{b.aval.shape} on one of {num_slices} slices; it must grow along one axis in "
                "proportion to the batch"
            ) from None
    return axes


def operand_relations(axes: Iterable[int | None]) -> list[SliceRelation]:
    """Return the relations of the loss's operands, by the axes along which they are cut."""
    return [Replicated() if axis is None else Sharded(axis) for axis in axes]


def find_whole_batch(
    whole: Equation, part: Equation, num_slices: int, constants: Set[int]
) -> WholeBatch | None:
    """Return what is to be computed on the whole batch.

    Args:
        whole: the equation of the loss on the whole batch.
        part: the equation of the loss on one slice.
        num_slices: how many slices.
        constants: the operands of the loss that are captured arrays.
    """
    a, b = whole.params["jaxpr"], part.params["jaxpr"]
    if len(whole.invars) != len(part.invars) or not same_structure(a, b):
        return None
    axes = operand_axes(whole, part, num_slices)
    operands = enumerate(zip(a.invars, axes, strict=True))
    finder = _Finder(
        {
            v
            for i, (v, axis) in operands
            if i not in whole.params["wrt"]
            and (axis is not None or i in constants or _is_small(v, a.eqns))
        }
    )
    followed = follow_relations(a, b, operand_relations(axes), num_slices, finder.visit)
    made = {v: (i, j) for i, eqn in enumerate(b.eqns) for j, v in enumerate(eqn.outvars)}
    used = {v for eqn in b.eqns for v in eqn.invars if is_var(v)}  # maybe as indices into a slice
    for v, relation in zip(b.outvars, followed.outs, strict=True):
        if is_var(v) and isinstance(relation, RowNumbers) and v not in used:
            finder.found.add(made[v])
    sliced = Jaxpr(b.invars, followed.equations, b.outvars)

    def reached() -> dict[Var, ResultIndex]:
        wanted = {b.eqns[i].outvars[j] for i, j in finder.found}
        return {v: made[v] for v in _reached(sliced, wanted)}

    # What is computed on the whole batch and what slices compute see the same random numbers.
    for eqn in needed(b.eqns, reached()):
        if _draws(eqn):
            finder.found.update(made[v] for v in eqn.outvars if not is_typed(v.aval))
    return WholeBatch(tuple(sorted(reached().values())), a)


def may_need_whole_batch(eqn: Equation, batch_size: int, constants: Set[int]) -> bool:
    """Return whether `find_whole_batch` may find something, by the loss on the whole batch alone.

    It finds nothing where all that does not depend on the parameters is element-wise, or has no
    dimension that the batch size divides.
    """
    jaxpr = eqn.params["jaxpr"]

    def long(v: Atom) -> list[tuple[int, int]]:
        """Return the dimensions that may be the examples, if the value has any."""
        return [(d, n) for d, n in enumerate(v.aval.shape) if n % batch_size == 0]

    def is_plain(e: Equation) -> bool:
        if e.primitive.name in KEY_MAKERS | DRAWS or any(map(_draws, _inside(e))):
            return False
        if e.primitive.name in ROW_WISE or not any(map(long, (*e.invars, *e.outvars))):
            return True
        return e.primitive.name in KEEPS_ROWS and long(e.invars[0]) == long(e.outvars[0])

    free = {
        v
        for i, v in enumerate(jaxpr.invars)
        if i not in eqn.params["wrt"] and (long(v) or i in constants or _is_small(v, jaxpr.eqns))
    }
    for e in jaxpr.eqns:
        if all(v in free for v in e.invars if is_var(v)):
            free.update(e.outvars)
            if not is_plain(e):
                return True
    return False


def _is_small(v: Var, equations: Sequence[Equation]) -> bool:
    """Return whether an operand is a number or a key, not an array of the model's state."""
    return v.aval.size <= 1 or is_typed(v.aval) or raw_generator(v, equations) is not None


def _reached(jaxpr: Jaxpr, ends: Set[Var]) -> list[Var]:
    """Return which of `ends` the results are computed from, without going behind them."""
    wanted = {v for v in jaxpr.outvars if is_var(v)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in wanted and v not in ends for v in eqn.outvars):
            wanted.update(v for v in eqn.invars if is_var(v))
    return [v for v in ends if v in wanted]


def _draws(eqn: Equation) -> bool:
    """Return whether an equation draws random numbers, itself or in a program inside it."""
    return eqn.primitive.name in RANDOM or any(map(_draws, _inside(eqn)))


def _inside(eqn: Equation) -> Iterator[Equation]:
    return (e for jaxpr in sub_jaxprs(eqn) for e in jaxpr.eqns)


class _Finder:
    """Collects, equation by equation, what no slice can compute but the whole batch can.

    Attributes:
        free: the values that depend on the batch, numbers, keys and captured arrays alone.
        found: the places of those that are to be computed on the whole batch.
    """

    def __init__(self, free: set[Var]) -> None:
        self.free = free
        self.found: set[ResultIndex] = set()
        self._place: dict[Var, ResultIndex] = {}
        self._count = 0

    def visit(self, pair: Pair, given: list[SliceRelation], sliced: Sliced) -> Sliced:
        """Return what became of an equation, with whole-batch values where slices cannot."""
        index, self._count = self._count, self._count + 1
        self._place.update((v, (index, j)) for j, v in enumerate(pair.whole.outvars))
        if not all(v in self.free for v in pair.whole.invars if is_var(v)):
            return self._with_counted_rows(pair, given, sliced)
        self.free.update(pair.whole.outvars)
        relations = list(sliced.relations)
        draws = pair.name in DRAWS or any(map(_draws, _inside(pair.whole)))
        for j, relation in enumerate(relations):
            try:
                axis = pair.growth(j)
            except ValueError:
                continue
            needed_whole = isinstance(relation, Joined | Partial) or pair.name in KEY_MAKERS
            # Numbers of no example are drawn once; some kinds are drawn in a loop.
            drawn = axis is None and draws and not is_typed(pair.whole.outvars[j].aval)
            if needed_whole or drawn:
                self.found.add((index, j))
                relations[j] = Replicated() if axis is None else Sharded(axis)
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
        self.found.update(self._place[v] for v in counted)
        return relate_equation(pair, again)


def in_words(eqn: Equation, found: WholeBatch) -> tuple[str, ...]:
    """Return what is computed on the whole batch: the primitives and their lines, without keys."""
    equations = eqn.params["jaxpr"].eqns
    made = [equations[i] for i, j in found.places if not is_typed(equations[i].outvars[j].aval)]
    return tuple(dict.fromkeys(f"{e.primitive.name} at {source_line(e)}" for e in made))


def unlike_program(eqn: Equation) -> BatchError:
    """Return the error of a loss whose program on a slice cannot be matched with the whole one."""
    return BatchError(
        f"the loss at {source_line(eqn)} has another program on a slice than on the whole batch; "
        "give each slice (microbatches × data-parallel replicas) two rows or more, or do not let "
        "the program depend on their number"
    )


def places_in(
    eqn: Equation, places: Sequence[ResultIndex], structure: Jaxpr
) -> Sequence[ResultIndex]:
    """Return where a trace of the loss makes what another one, `structure`, makes at `places`.

    Raises:
        BatchError: it is another program.
    """
    jaxpr = eqn.params["jaxpr"]
    if same_structure(jaxpr, structure):
        return places
    same = matching(structure, jaxpr)
    if any(i not in same for i, _ in places):
        raise unlike_program(eqn)
    return [(same[i], j) for i, j in places]


def with_operands(
    eqn: Equation, found: WholeBatch, operands: Sequence[Var] | None = None
) -> Equation:
    """Return the loss's equation with operands for what is computed on the whole batch.

    Args:
        eqn: the equation, on the whole batch or on a slice.
        found: what is computed on the whole batch.
        operands: the variables that hold it; by default those of the loss's own program.

    Raises:
        BatchError: the program is another one than that in which it was found.
    """
    jaxpr = eqn.params["jaxpr"]
    inner = [jaxpr.eqns[i].outvars[j] for i, j in places_in(eqn, found.places, found.structure)]
    operands = inner if operands is None else operands
    renamed = {v: Var(v.aval) for v in inner}  # what their equations make has another name
    equations = [
        e.replace(outvars=[renamed.get(v, v) for v in e.outvars])
        if any(v in renamed for v in e.outvars)
        else e
        for e in jaxpr.eqns
    ]
    closed = Jaxpr([*jaxpr.invars, *inner], equations, jaxpr.outvars)
    return eqn.replace(invars=[*eqn.invars, *operands], params={**eqn.params, "jaxpr": closed})


def whole_batch_equations(eqn: Equation, found: WholeBatch) -> tuple[list[Equation], list[Var]]:
    """Return the equations that compute `found` outside the loss, and the variables it is in."""
    jaxpr = eqn.params["jaxpr"]
    inner = [jaxpr.eqns[i].outvars[j] for i, j in found.places]
    env: dict[Var, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    equations = []
    for e in needed(jaxpr.eqns, inner):
        env.update((v, Var(v.aval)) for v in e.outvars)
        equations.append(
            e.replace(
                invars=[env[v] if is_var(v) else v for v in e.invars],
                outvars=[env[v] for v in e.outvars],
            )
        )
    return equations, [env[v] for v in inner]
