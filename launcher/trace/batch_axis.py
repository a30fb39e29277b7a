"""Which axis of a value computed from the batch still has one example after another, in order.

An input of the loss that is computed from the batch is computed once, on the whole batch, and cut
into slices afterwards. That is what computing it slice by slice would give only while position `i`
along the cut axis belongs to example `i` (or to a run of examples, in order): after a transpose,
yes; after a reversal, no. What cannot be shown to keep the rows in order counts as not keeping
them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from launcher.trace.jaxpr import Equation, Jaxpr, Var, is_var, sub_jaxprs


@dataclass(frozen=True, eq=False)
class NoBatchAxis:
    """The value depends on the batch, and this equation left its rows without an order."""

    equation: Equation


# The axis of a value that holds the examples; None: the value does not depend on the batch.
BatchAxis: TypeAlias = int | NoBatchAxis | None

_ELEMENTWISE_NAMES = """
    abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not or population_count pow random_fold_in real reduce_precision rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_CALLS = frozenset(
    ("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2")
)


def follow_batch_axis(
    equations: Iterable[Equation], sources: Mapping[Var, BatchAxis]
) -> dict[Var, BatchAxis]:
    """Where the examples are in every value that depends on `sources` (whose axes are given)."""
    found: dict[Var, BatchAxis] = dict(sources)
    for eqn in equations:
        rows = [found.get(v) if is_var(v) else None for v in eqn.invars]
        if any(r is not None for r in rows):
            found.update(zip(eqn.outvars, _after(eqn, rows), strict=True))
    return found


def _after(eqn: Equation, rows: Sequence[BatchAxis]) -> list[BatchAxis]:
    name, params = eqn.primitive.name, eqn.params
    axes = {r for r in rows if isinstance(r, int)}
    lost = next((r for r in rows if isinstance(r, NoBatchAxis)), NoBatchAxis(eqn))
    kept: list[int | None]
    if name in _CALLS:
        (body,) = sub_jaxprs(eqn)
        return _through(body, rows)
    if name == "cond":
        branches = [_through(b, rows[1:]) for b in sub_jaxprs(eqn)]
        return [_joined(found, NoBatchAxis(eqn)) for found in zip(*branches, strict=True)]
    if not axes:
        return [lost] * len(eqn.outvars)
    if name in _JOINS:
        kept = [_JOINS[name](eqn, rows)] * len(eqn.outvars)
    elif len(axes) > 1:
        kept = [None]
    elif name in _ELEMENTWISE:
        (axis,) = axes
        like = next(v.aval.shape for v, r in zip(eqn.invars, rows, strict=True) if r == axis)
        kept = [axis if v.aval.shape[: axis + 1] == like[: axis + 1] else None for v in eqn.outvars]
    elif name == "optimization_barrier":
        return list(rows)
    elif name in _MOVES:
        (axis,) = axes
        shape = next(v.aval.shape for v, r in zip(eqn.invars, rows, strict=True) if r == axis)
        kept = [_MOVES[name](params, shape, axis)] * len(eqn.outvars)
    else:
        kept = [None]
    if len(kept) != len(eqn.outvars):
        kept = [None] * len(eqn.outvars)
    return [NoBatchAxis(eqn) if axis is None else axis for axis in kept]


def _through(body: Jaxpr, rows: Sequence[BatchAxis]) -> list[BatchAxis]:
    sources = {v: r for v, r in zip(body.invars, rows, strict=True) if r is not None}
    found = follow_batch_axis(body.eqns, sources)
    return [found.get(v) if is_var(v) else None for v in body.outvars]


def _joined(found: Sequence[BatchAxis], otherwise: NoBatchAxis) -> BatchAxis:
    known = {r for r in found if r is not None}
    return known.pop() if len(known) == 1 else otherwise if known else None


def _dot_general(eqn: Equation, rows: Sequence[BatchAxis]) -> int | None:
    contract, batch = eqn.params["dimension_numbers"]
    places = []
    free = len(batch[0])
    for side, (v, axis) in enumerate(zip(eqn.invars, rows, strict=True)):
        mine = [d for d in range(v.aval.ndim) if d not in (*contract[side], *batch[side])]
        if isinstance(axis, int):
            if axis in contract[side]:
                return None
            at_batch = axis in batch[side]
            places.append(
                list(batch[side]).index(axis) if at_batch else free + list(mine).index(axis)
            )
        free += len(mine)
    return places[0] if len(set(places)) == 1 else None


def _gather(eqn: Equation, rows: Sequence[BatchAxis]) -> int | None:
    """A look-up in a table by rows of indices, or of the same places in every row."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = rows
    in_result = [d for d in range(eqn.outvars[0].aval.ndim) if d not in numbers.offset_dims]
    by_index = by_operand = None
    if isinstance(indices, int) and indices < len(in_result):
        by_index = in_result[indices]
    if isinstance(operand, int):
        shape = eqn.invars[0].aval.shape
        batching = list(numbers.operand_batching_dims)
        if operand in batching:
            by_operand = in_result[numbers.start_indices_batching_dims[batching.index(operand)]]
        elif operand not in numbers.collapsed_slice_dims and sizes[operand] == shape[operand]:
            dropped = {*numbers.collapsed_slice_dims, *batching}
            window = [d for d in range(len(shape)) if d not in dropped]
            by_operand = numbers.offset_dims[window.index(operand)]
    if isinstance(operand, int) and isinstance(indices, int):
        return by_index if by_index == by_operand else None
    return by_index if isinstance(indices, int) else by_operand


def _scatter(eqn: Equation, rows: Sequence[BatchAxis]) -> int | None:
    """Places replaced in every row alike."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = rows
    fixed = {*numbers.inserted_window_dims, *numbers.scatter_dims_to_operand_dims}
    if not isinstance(operand, int) or isinstance(indices, int) or operand in fixed:
        return None
    shape, new = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(shape)) if d not in dropped]
    if operand not in window:
        return None
    there = numbers.update_window_dims[window.index(operand)]
    agree = not isinstance(updates, int) or updates == there
    return operand if agree and new[there] == shape[operand] else None


def _dynamic_update_slice(eqn: Equation, rows: Sequence[BatchAxis]) -> int | None:
    axes = {r for r in rows[:2] if isinstance(r, int)}
    sizes = {v.aval.shape[axis] for v in eqn.invars[:2] for axis in axes}
    return axes.pop() if len(axes) == len(sizes) == 1 else None


def _scan(eqn: Equation, rows: Sequence[BatchAxis]) -> int | None:
    """A loop over the examples that hands nothing on from one to the next (`jax.lax.map`)."""
    consts = rows[: eqn.params["num_consts"]]
    axes = {r for r in rows if isinstance(r, int)}
    alone = eqn.params["num_carry"] == 0 and not any(isinstance(r, int) for r in consts)
    return 0 if alone and axes == {0} else None


_JOINS: dict[str, Callable[[Equation, Sequence[BatchAxis]], int | None]] = {
    "dot_general": _dot_general,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scan": _scan,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-mul": _scatter,
}


# How an equation with one array that has rows moves their axis: (parameters, shape, axis) -> axis.
_Move: TypeAlias = Callable[[Mapping[str, Any], Sequence[int], int], int | None]


def _reshape(params: Mapping[str, Any], shape: Sequence[int], axis: int) -> int | None:
    """The examples stay in order in the first axis that begins where theirs began."""
    if params.get("dimensions") is not None:
        return None
    before, new = math.prod(shape[:axis]), params["new_sizes"]
    starts = [k for k in range(len(new)) if math.prod(new[:k]) == before]
    return next((k for k in starts if new[k] != 1), starts[0] if starts else None)


def _without(name: str) -> _Move:
    def move(params: Mapping[str, Any], shape: Sequence[int], axis: int) -> int | None:
        gone = params[name]
        return None if axis in gone else axis - sum(d < axis for d in gone)

    return move


def _unless(name: str) -> _Move:
    def move(params: Mapping[str, Any], shape: Sequence[int], axis: int) -> int | None:
        touched = params[name]
        return None if axis in (touched if isinstance(touched, tuple) else (touched,)) else axis

    return move


def _slice(params: Mapping[str, Any], shape: Sequence[int], axis: int) -> int | None:
    strides = params["strides"] or [1] * len(shape)
    whole = (params["start_indices"][axis], params["limit_indices"][axis], strides[axis])
    return axis if whole == (0, shape[axis], 1) else None


def _conv(params: Mapping[str, Any], shape: Sequence[int], axis: int) -> int | None:
    numbers = params["dimension_numbers"]
    alone = params["batch_group_count"] == 1 and axis == numbers.lhs_spec[0]
    return int(numbers.out_spec[0]) if alone else None


def _window(params: Mapping[str, Any], shape: Sequence[int], axis: int) -> int | None:
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    alone = all(params[name][axis] == 1 for name in ones) and params["padding"][axis] == (0, 0)
    return axis if alone else None


_MOVES: dict[str, _Move] = {
    "reshape": _reshape,
    "transpose": lambda params, shape, axis: params["permutation"].index(axis),
    "broadcast_in_dim": lambda params, shape, axis: params["broadcast_dimensions"][axis],
    "squeeze": _without("dimensions"),
    "slice": _slice,
    "dynamic_slice": lambda params, shape, axis: (
        axis if params["slice_sizes"][axis] == shape[axis] else None
    ),
    "pad": lambda params, shape, axis: axis if params["padding_config"][axis] == (0,) * 3 else None,
    "conv_general_dilated": _conv,
    "fft": lambda params, shape, axis: (
        axis if axis < len(shape) - len(params["fft_lengths"]) else None
    ),
    "top_k": lambda params, shape, axis: (
        axis if axis != params.get("axis", -1) % len(shape) else None
    ),
    **{f"reduce_window_{name}": _window for name in ("max", "min", "sum")},
    **{name: _unless("dimension") for name in ("concatenate", "sort")},
    **{name: _unless("axis") for name in ("cumsum", "cumprod", "cummax", "cummin", "split")},
    "cumlogsumexp": _unless("axis"),
    "rev": _unless("dimensions"),
    **{
        f"reduce_{name}": _without("axes")
        for name in ("sum", "max", "min", "prod", "and", "or", "xor")
    },
    **{name: _without("axes") for name in ("argmax", "argmin")},
}
