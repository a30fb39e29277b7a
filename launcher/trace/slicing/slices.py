"""The loss on one slice of the batch, cut into layers at the user's marks.

The step is traced again on a slice. Comparing that trace with the one on the whole batch shows
which inputs of the loss are cut and where (`operand_axes`), and what its results are
(`follow_relations`). Before the loss runs what the batch alone decides, after it functions of sums
over the examples (`outside_loss`).

A *layer* is the run of equations between two `mark_pipeline_boundary()` calls. Equations that
depend on no operand at all (an iota, a mask made of literals) belong to no layer: whoever needs
one computes it, so that a constant never crosses a stage boundary. Random numbers are none: they
are drawn once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from launcher.trace.errors import BatchError, BoundaryError, TraceError
from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    dependents,
    free_vars,
    is_var,
    make_jaxpr,
    needed,
    source_line,
    splice,
    walk,
)
from launcher.trace.ir.primitive_kinds import CONSTRAINTS, KERNELS, SAME_ELEMENTS
from launcher.trace.primitives import boundary_p
from launcher.trace.slicing.draws import draws
from launcher.trace.slicing.follow_relations import (
    Followed,
    follow_relations,
    matching,
    relate_equation,
    same_structure,
)
from launcher.trace.slicing.outside_loss import (
    Outside,
    find_finish,
    find_whole_batch,
    finishing_equations,
    in_words,
    may_finish,
    may_need_whole_batch,
    operand_axes,
    operand_relations,
    unlike_program,
    whole_batch_equations,
    with_operands,
    with_results,
)
from launcher.trace.slicing.reductions import check_same_results, reductions
from launcher.trace.slicing.relations import Pair, Sliced, SliceRelation, differ, joined_among
from launcher.trace.slicing.rows_in_parts import follows_parts

ANY_LAYER = -1


def cut_layers(jaxpr: Jaxpr) -> tuple[list[Equation], list[int], int]:
    """Return the needed equations of a flattened forward pass, the layer of each, and their number.

    Returns:
        `(equations, layers, num_layers)`; `layers[i]` is `ANY_LAYER` for an equation that depends
        on no input and no draw. Layers that hold no equation are kept: marks and layers agree.

    Raises:
        BoundaryError: a mark stands inside a loop, a branch or a checkpointed function.
        TraceError: an equation has a side effect, or says how a value is sharded.
    """
    layer, layer_of = 0, {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is boundary_p:
            layer += 1
            continue
        _refuse_uncuttable(eqn)
        layer_of[id(eqn)] = layer
    equations = needed([e for e in jaxpr.eqns if e.primitive is not boundary_p], jaxpr.outvars)
    drawn = [v for eqn in equations if draws([eqn]) for v in eqn.outvars]
    from_inputs = dependents(equations, [*jaxpr.invars, *drawn])
    layers = [
        layer_of[id(eqn)] if any(v in from_inputs for v in eqn.outvars) else ANY_LAYER
        for eqn in equations
    ]
    return equations, layers, layer + 1


def _refuse_uncuttable(eqn: Equation) -> None:
    for inner in walk([eqn], lambda e: e.primitive.name not in KERNELS):
        name = inner.primitive.name
        if name not in KERNELS and (name.endswith("_callback") or inner.effects):
            raise TraceError(
                f"{name} at {source_line(inner)} has a side effect; a loss that runs in pipeline "
                "stages must be pure. Remove the callback or print, or return the value as aux"
            )
        if name in CONSTRAINTS:
            raise TraceError(
                f"{name.replace('sharding', 'with_sharding')} at {source_line(inner)}: the plan "
                "decides how a parallelized step is sharded, on meshes of its own. Remove it"
            )
        if inner.primitive is boundary_p:
            raise BoundaryError(
                f"mark_pipeline_boundary() inside {eqn.primitive.name} at {source_line(eqn)}: a "
                "layer cannot end inside a loop, a branch or a checkpointed function. Mark "
                "outside it"
            )


@dataclass(frozen=True, eq=False)
class Loss:
    """The forward pass on one of `num_slices` equal slices of the batch.

    Attributes:
        invars: one variable an operand of the loss equation, in its order.
        outvars: the loss first (where something is differentiated), then the other results.
        equations, layers: the program and the layer of each equation (`ANY_LAYER`: of none).
        slice_axes: an operand's axis that is cut into slices, or None: every slice gets it whole.
        wrt: the operands that are differentiated. reduce: how each result is combined.
        from_whole_batch: the equations of the loss whose results are computed on the whole batch,
            each in words.
    """

    num_slices: int
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    layers: tuple[int, ...]
    num_layers: int
    slice_axes: tuple[int | None, ...]
    wrt: tuple[int, ...]
    reduce: tuple[str, ...]
    from_whole_batch: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """The loss in words: how it is combined, and what of it is computed on the whole batch."""
        words = {"mean": "mean over the examples", "sum": "sum over the examples"}
        kind = (
            words[self.reduce[0]] if self.wrt and self.num_slices > 1 else "the whole batch at once"
        )
        values = self.from_whole_batch
        if not values:
            return kind
        return f"{kind}; computed on the whole batch: {', '.join(values)}"


TwoTraces: TypeAlias = tuple[Equation, Equation, int]


@dataclass(frozen=True, eq=False)
class Traces:
    """The equation of the loss, as traced on the whole batch and on slices of it.

    Attributes:
        whole: on the whole batch. batch_size: its rows.
        part: called with a number of slices; returns the equation on one of them.
        from_whole_batch: the equations whose results are computed on the whole batch, in words.
        numbered: whether the first operand is the numbers of the rows in the batch.
        reference: returns the equation on many rows and on fewer, but several, and how many times
            fewer; None where it cannot be traced.
    """

    whole: Equation
    batch_size: int
    part: Callable[[int], Equation]
    reference: Callable[[], TwoTraces | None]
    from_whole_batch: tuple[str, ...] = ()
    numbered: bool = False

    def rewritten(
        self, whole: Equation, rewrite: Callable[[Equation], Equation], words: tuple[str, ...] = ()
    ) -> Traces:
        """Return the traces of the loss after it was rewritten.

        Args:
            whole: the equation on the whole batch.
            rewrite: called with any other trace of the equation; returns its replacement.
            words: see `from_whole_batch`.
        """

        def reference() -> TwoTraces | None:
            pair = self.reference()
            return pair and (rewrite(pair[0]), rewrite(pair[1]), pair[2])

        return Traces(
            whole,
            self.batch_size,
            lambda num_slices: rewrite(self.part(num_slices)),
            functools.cache(reference),
            self.from_whole_batch + words,
            self.numbered,
        )


def slice_loss(traces: Traces, num_slices: int) -> Loss:
    """Return the loss on one of `num_slices` equal slices of the batch.

    Raises:
        BatchError: the batch does not divide, or slices cannot compute what the loss means.
    """
    _check_divides(traces.batch_size, num_slices)
    eqn = traces.whole
    axes: list[int | None] = [None] * len(eqn.invars)
    jaxpr, words = eqn.params["jaxpr"], eqn.params["reduce"]
    counting: Sequence[Equation] = ()
    number: Var | None = None
    if num_slices > 1:
        eqn = traces.part(num_slices)
        check_same_results(traces.whole, eqn)
        axes = operand_axes(traces.whole, eqn, num_slices)
        if any(axes[i] is not None for i in eqn.params["wrt"]):
            raise BatchError(
                "the loss is differentiated with respect to the batch, of which a microbatch sees "
                "only a part; take that gradient inside the loss that uses it, or without "
                "microbatches and replicas"
            )
        counting, number = _slice_number(traces, eqn)
        found = _follow(traces, eqn, axes, num_slices, number)
        words = reductions(traces.whole, eqn, found.outs, num_slices)
        jaxpr = found.program(eqn.params["jaxpr"])
    equations, layers, num_layers = cut_layers(jaxpr)
    if number in free_vars(equations):  # whoever needs it computes it
        equations, layers = [*counting, *equations], [*(ANY_LAYER for _ in counting), *layers]
    return Loss(
        num_slices=num_slices,
        invars=tuple(jaxpr.invars),
        outvars=tuple(jaxpr.outvars),
        equations=tuple(equations),
        layers=tuple(layers),
        num_layers=num_layers,
        slice_axes=tuple(axes),
        wrt=eqn.params["wrt"],
        reduce=words,
        from_whole_batch=traces.from_whole_batch,
    )


def with_row_numbers(eqn: Equation, rows: int) -> Equation:
    """Return the loss's equation with the numbers of its rows in the batch as first operand."""
    numbers = jax.ShapeDtypeStruct((rows,), jnp.uint32)
    outer, inner = make_jaxpr(lambda x, y: [x, y], numbers, numbers).invars
    jaxpr: Jaxpr = eqn.params["jaxpr"]
    params = {
        "jaxpr": replace(jaxpr, invars=[inner, *jaxpr.invars]),
        "wrt": tuple(i + 1 for i in eqn.params["wrt"]),
    }
    return eqn.replace(invars=[outer, *eqn.invars], params={**eqn.params, **params})


def _slice_number(traces: Traces, part: Equation) -> tuple[Sequence[Equation], Var | None]:
    """Return the number of the slice that has these rows, and the equations that compute it."""
    if not traces.numbered:
        return (), None
    numbers: Var = part.params["jaxpr"].invars[0]

    def of_rows(rows: Any) -> Any:
        first = jax.lax.squeeze(jax.lax.slice_in_dim(rows, 0, 1), [0])
        return jax.lax.div(first, jnp.uint32(len(rows)))

    equations, (number,) = splice(of_rows, [numbers])
    assert is_var(number)
    return equations, number


def _follow(
    traces: Traces,
    part: Equation,
    axes: Iterable[int | None],
    num_slices: int,
    number: Var | None,
) -> Followed:
    """Follow the relations through the loss.

    A slice of one row may have another program than the whole batch (`matching`). There the
    relations are those of the reference, and what is changed in it is changed in the equations
    that match.
    """
    whole: Jaxpr = traces.whole.params["jaxpr"]
    own: Jaxpr = part.params["jaxpr"]
    reference = traces.reference() if traces.batch_size == num_slices else None
    if reference is None:
        if not same_structure(whole, own):
            raise unlike_program(part)
        return follow_relations(whole, own, operand_relations(axes), num_slices, number=number)
    large, small, count = reference
    more, fewer = large.params["jaxpr"], small.params["jaxpr"]
    if not same_structure(more, fewer):
        raise unlike_program(part)
    same, equations = matching(whole, own), list(own.eqns)
    replaced: dict[int, Sequence[Equation]] = {}
    index = itertools.count()

    def visit(pair: Pair, given: list[SliceRelation], sliced: Sliced) -> Sliced:
        i = next(index)
        if sliced.changed or follows_parts(given, sliced.relations):
            if i not in same or len(equations[same[i]].invars) != len(pair.part.invars):
                raise unlike_program(part)
            own_pair = Pair(whole.eqns[i], equations[same[i]], num_slices, number=number)
            again = relate_equation(own_pair, given)
            if list(again.relations) != list(sliced.relations):
                raise unlike_program(part)
            replaced[same[i]] = again.equations
        return sliced

    given = operand_relations(operand_axes(large, small, count))
    found = follow_relations(more, fewer, given, count, visit, number=number)
    if joined_among(found.outs) is None:
        _check_one_row(traces, reference, part, same)
    changed = [e for i, eqn in enumerate(equations) for e in replaced.get(i, [eqn])]
    outvars = [a if differ(a, b) else b for a, b in zip(whole.outvars, own.outvars, strict=True)]
    return Followed(found.outs, changed, outvars, bool(replaced))


def _check_one_row(
    traces: Traces, reference: TwoTraces, part: Equation, same: Mapping[int, int]
) -> None:
    """Refuse a slice of one row that computes something else than larger ones do.

    Only what moves elements may be another equation, and what matches has the elements of one row.
    """
    large, small, _ = reference
    whole, own, more, fewer = (e.params["jaxpr"] for e in (traces.whole, part, large, small))
    live = {id(e) for jaxpr in (whole, own) for e in needed(jaxpr.eqns, jaxpr.outvars)}
    rest = [e for i, e in enumerate(whole.eqns) if i not in same]
    matched = set(same.values())
    rest += [e for j, e in enumerate(own.eqns) if j not in matched]
    if any(id(e) in live and e.primitive.name not in SAME_ELEMENTS for e in rest):
        raise unlike_program(part)
    for i, j in same.items():
        sizes = zip(*(e.outvars for e in (more.eqns[i], fewer.eqns[i])), strict=True)
        grows = [a.aval.size != b.aval.size for a, b in sizes]
        results = zip(whole.eqns[i].outvars, own.eqns[j].outvars, grows, strict=True)
        if id(own.eqns[j]) in live and any(
            b.aval.size * (traces.batch_size if grown else 1) != a.aval.size
            for a, b, grown in results
        ):
            raise unlike_program(part)


def _check_divides(batch_size: int, num_slices: int) -> None:
    if num_slices < 1:
        raise BatchError(
            f"the batch is to be cut into {num_slices} slices (microbatches × data-parallel "
            "replicas); the number of microbatches must be at least 1"
        )
    if batch_size % num_slices:
        raise BatchError(
            f"a batch of {batch_size} does not divide into {num_slices} equal slices "
            "(microbatches × data-parallel replicas); change the batch size or either number"
        )


@dataclass(frozen=True, eq=False)
class SplitLoss:
    """A loss, and what is computed around it.

    Attributes:
        traces: the loss that remains, on the whole batch and on slices.
        before: the equations that compute its further operands.
        after: the equations that compute the results that it no longer returns.
    """

    traces: Traces
    before: Sequence[Equation]
    after: Sequence[Equation]


def split_loss(
    eqn: Equation, batch_size: int, retrace: Callable[[int], Equation], constants: Set[Var]
) -> SplitLoss:
    """Take out of the loss what is computed on the whole batch.

    Args:
        eqn: the equation of the loss on the whole batch.
        batch_size: the rows of the batch.
        retrace: called with a number of rows; returns the equation on so many.
        constants: the variables of captured arrays.
    """
    before: list[Equation] = []
    after: list[Equation] = []
    if numbered := draws(eqn.params["jaxpr"].eqns):
        eqn = with_row_numbers(eqn, batch_size)
        (counts,), _ = splice(lambda: [jnp.arange(batch_size, dtype=jnp.uint32)], ())
        before = [counts.replace(outvars=[eqn.invars[0]])]

    def on_rows(rows: int) -> Equation:
        return with_row_numbers(retrace(rows), rows) if numbered else retrace(rows)

    def part(num_slices: int) -> Equation:
        return on_rows(batch_size // num_slices)

    @functools.cache
    def reference() -> TwoTraces | None:
        with contextlib.suppress(TraceError):  # raised again where slices are requested
            return _two_traces(eqn, batch_size, on_rows)
        return None

    traces = Traces(eqn, batch_size, part, reference, numbered=numbered)
    captured = {i for i, v in enumerate(eqn.invars) if v in constants}
    if may_need_whole_batch(eqn, batch_size, captured):
        found = _search(traces, functools.partial(find_whole_batch, constants=captured))
        if found is not None and found.places:
            more, operands = whole_batch_equations(eqn, found)
            before += more
            rewrite = functools.partial(with_operands, found=found)
            whole = rewrite(eqn, operands=operands)
            traces = traces.rewritten(whole, rewrite, in_words(eqn, found))
    eqn = traces.whole
    if may_finish(eqn, batch_size):
        found = _search(traces, find_finish)
        if found is not None:
            after, ends = finishing_equations(eqn, found)
            rewrite = functools.partial(with_results, found=found)
            traces = traces.rewritten(rewrite(eqn, outvars=ends), rewrite)
    return SplitLoss(traces, before, after)


def _search(traces: Traces, find: Callable[..., Outside | None]) -> Outside | None:
    """Return what is found in the traces on many rows and on fewer; None where there are none."""
    pair = traces.reference()
    with contextlib.suppress(BatchError):
        return find(*pair) if pair else None
    return None


def _two_traces(
    eqn: Equation, batch_size: int, retrace: Callable[[int], Equation]
) -> TwoTraces | None:
    """Return the loss on many rows and on fewer, at least two, and how many times fewer.

    On one row a program may be another one.
    """
    counts = (n for n in range(2, batch_size // 2 + 1) if batch_size % n == 0)
    count = next(counts, None)
    if count is not None:
        return eqn, retrace(batch_size // count), count
    return None if batch_size == 1 else (retrace(2 * batch_size), eqn, 2)
