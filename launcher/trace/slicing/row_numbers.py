"""Where counted rows may stay those of the slice: as indices into the slice's own rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from launcher.trace.ir.jaxpr import Atom
from launcher.trace.ir.primitive_kinds import SAME_FOR_EXTREMA
from launcher.trace.slicing.pairs import Pair
from launcher.trace.slicing.placements import Joined, Placement, Replicated, RowNumbers, Sharded


def of_row_numbers(pair: Pair, given: Sequence[Placement]) -> Placement:
    """Return what becomes of row numbers: they may only look up the rows that they count.

    That is `values[jnp.arange(rows), labels]`: a comparison with 0, a choice, columns side by side,
    and a gather.
    """
    at, rows = next((i, p) for i, p in enumerate(given) if isinstance(p, RowNumbers))
    eqn = pair.whole
    try:
        grown = pair.growth(0)
    except ValueError:
        return Joined(pair.part)
    if pair.name == "lt" and at == 0 and given[1] == Replicated(zero=True):
        return Replicated(zero=True)  # none is negative
    if pair.name == "gather" and at == 1:
        return _looked_up(pair, given[0], rows)
    if grown is None:
        return Joined(pair.part)
    if pair.name == "concatenate":
        last = eqn.outvars[0].aval.ndim - 1
        widths = [v.aval.shape[-1] for v in eqn.invars]
        if eqn.params["dimension"] == last != rows.axis and widths[at] == 1:
            return RowNumbers(grown, sum(widths[:at]))
    if pair.name == "reshape" and _without_ones(eqn.invars[at]) != _without_ones(eqn.outvars[0]):
        return Joined(pair.part)  # pairs of rows, or rows by turns
    integer = jnp.issubdtype(pair.part.outvars[0].aval.dtype, jnp.integer)
    if pair.name in SAME_FOR_EXTREMA | {"convert_element_type"} and integer:
        return (
            RowNumbers(grown) if rows.column is None and pair.name != "rev" else Joined(pair.part)
        )
    return Joined(pair.part)


def _without_ones(atom: Atom) -> list[int]:
    return [d for d in atom.aval.shape if d != 1]


def _looked_up(pair: Pair, operand: Placement, rows: RowNumbers) -> Placement:
    """Return the placement of `operand[rows, ...]`."""
    numbers = pair.whole.params["dimension_numbers"]
    column = 0 if rows.column is None else rows.column
    along = numbers.start_index_map[column]
    result = pair.whole.outvars[0].aval.ndim
    batch = [d for d in range(result) if d not in numbers.offset_dims]
    counts = pair.whole.invars[1].aval.shape[rows.axis]  # all rows, not those of the first half
    if pair.whole.invars[0].aval.shape[along] != counts:
        return Joined(pair.part)
    alone = rows.column is not None or pair.whole.invars[1].aval.shape[-1] == 1
    if alone and operand == Sharded(along) and along in numbers.collapsed_slice_dims:
        return Sharded(batch[rows.axis])
    return Joined(pair.part)
