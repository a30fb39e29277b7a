"""Dimensions of operands and results that can be sharded together: one rule per primitive.

A *factor* names dimensions that run together: cut all of them the same way and each device can
compute its part alone. A factor that reaches no result is summed over, so that each device then has
a partial result. A dimension in no factor has to be whole where the equation runs. (The form is
that of Shardy's `sharding_rule`, openxla.org/shardy.) A primitive that is neither listed here nor
element-wise (`primitive_kinds`) has no factors: it is replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from launcher.trace.ir.cudnn import attention_places
from launcher.trace.ir.jaxpr import Equation
from launcher.trace.ir.primitive_kinds import ATTENTION_PRODUCTS, BARRIERS, ELEMENTWISE, OWN_KERNELS

Place = tuple[int, int]  # (operand or result, its dimension)


@dataclass(frozen=True)
class Factor:
    """Dimensions of operands and of results that run together.

    Attributes:
        operands, results: their places. A factor without results is summed over.
        indexed: whether the equation's indices count along the first operand's dimension, so that
            each device counts from where its part begins.
    """

    operands: tuple[Place, ...]
    results: tuple[Place, ...]
    indexed: bool = False


Factors: TypeAlias = tuple[Factor, ...]


def factors(eqn: Equation) -> Factors | None:
    """The factors of an equation without inner programs; None: the primitive is not known."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _alike(eqn, frozenset())  # single numbers beside arrays do not matter
    if name in BARRIERS:
        ranks = [v.aval.ndim for v in eqn.invars]
        return tuple(_pair((i, d), (i, d)) for i, n in enumerate(ranks) for d in range(n))
    if name in ATTENTION_PRODUCTS:
        return tuple(Factor(*places) for places in attention_places(eqn))
    if name in OWN_KERNELS:
        return tuple(Factor(*places) for places in eqn.params["of"].places)
    rule = _RULES.get(name) or (_reduced if name.startswith("reduce_") else None)
    return None if rule is None else rule(eqn)


def _pair(operand: Place, result: Place) -> Factor:
    return Factor((operand,), (result,))


def _mapped(eqn: Equation, dims: Iterable[tuple[int, int]]) -> Factors:
    """Return factors of dimensions of the operands, all alike, and of the results, all alike.

    Args:
        eqn: the equation. An operand of another rank than the first, such as the number that pads
            an array, does not matter.
        dims: a dimension of the operands and that of the results, for each factor.
    """
    rank = eqn.invars[0].aval.ndim
    ins = [i for i, v in enumerate(eqn.invars) if v.aval.ndim == rank]
    outs = range(len(eqn.outvars))
    return tuple(Factor(tuple((i, d) for i in ins), tuple((j, k) for j in outs)) for d, k in dims)


def _kept(eqn: Equation, dropped: Container[int]) -> Iterator[tuple[int, int]]:
    """Return the operands' dimensions but for some, each with its place among those left."""
    left = (d for d in range(eqn.invars[0].aval.ndim) if d not in dropped)
    return ((d, k) for k, d in enumerate(left))


def _dot(eqn: Equation) -> Factors:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (range(v.aval.ndim) for v in eqn.invars)
    free = [(0, d) for d in lhs if d not in (*lhs_sum, *lhs_batch)]
    free += [(1, d) for d in rhs if d not in (*rhs_sum, *rhs_batch)]
    batch = enumerate(zip(lhs_batch, rhs_batch, strict=True))
    summed = zip(lhs_sum, rhs_sum, strict=True)
    return (
        *(Factor(((0, a), (1, b)), ((0, k),)) for k, (a, b) in batch),
        *(_pair(place, (0, k)) for k, place in enumerate(free, len(lhs_batch))),
        *(Factor(((0, a), (1, b)), ()) for a, b in summed),
    )


def _conv(eqn: Equation) -> Factors:
    numbers = eqn.params["dimension_numbers"]
    (n, c, *_), (o, i, *_) = numbers.lhs_spec, numbers.rhs_spec
    (out_n, out_c, *_) = numbers.out_spec
    if eqn.params["batch_group_count"] != 1:
        return ()
    batch = _pair((0, n), (0, out_n))
    if eqn.params["feature_group_count"] != 1:
        return (batch,)
    return (batch, _pair((1, o), (0, out_c)), Factor(((0, c), (1, i)), ()))


def _reduced(eqn: Equation) -> Factors:
    """Every operand is reduced along the same axes."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    found = _mapped(eqn, _kept(eqn, axes))
    if eqn.primitive.name in ("reduce_sum", "reduce_max", "reduce_min"):
        return (*found, *(Factor(((0, d),), ()) for d in axes))
    return found


def _along(name: str) -> Callable[[Equation], Factors]:
    """All operands and results alike, but for the dimensions that a parameter names."""

    def rule(eqn: Equation) -> Factors:
        value = eqn.params[name]
        return _alike(eqn, frozenset(value if isinstance(value, (tuple, list)) else (value,)))

    return rule


def _alike(eqn: Equation, whole: frozenset[int]) -> Factors:
    """Return the factors of operands and results alike, but for the dimensions `whole`."""
    ranks = tuple(len(v.aval.shape) for v in eqn.invars)
    return _of_ranks(ranks, len(eqn.outvars[0].aval.shape), len(eqn.outvars), whole)


@functools.lru_cache(maxsize=1024)
def _of_ranks(
    ranks: tuple[int, ...], rank: int, num_results: int, whole: frozenset[int]
) -> Factors:
    ins = [i for i, own in enumerate(ranks) if own == rank]
    outs = range(num_results)
    return tuple(
        Factor(tuple((i, d) for i in ins), tuple((j, d) for j in outs))
        for d in range(rank)
        if d not in whole
    )


def _same_size(eqn: Equation) -> Factors:
    """Operands and results alike where all are equally long; single numbers do not matter."""
    rank = eqn.outvars[0].aval.ndim
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars) if v.aval.ndim == rank]
    lengths = enumerate(zip(*shapes, strict=True))
    return _alike(eqn, frozenset(d for d, own in lengths if len(set(own)) > 1))


def _window(eqn: Equation) -> Factors:
    """Pooling: dimensions over which the window does not move, and that are not padded."""
    names = "window_dimensions", "window_strides", "padding"
    spans = zip(*(eqn.params[name] for name in names), strict=True)
    still = [size == stride == 1 and tuple(pad) == (0, 0) for size, stride, pad in spans]
    return tuple(factor for factor in _same_size(eqn) if still[factor.results[0][1]])


def _broadcast(eqn: Equation) -> Factors:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    pairs = enumerate(eqn.params["broadcast_dimensions"])
    return tuple(_pair((0, d), (0, to)) for d, to in pairs if before[d] == after[to])


def _transpose(eqn: Equation) -> Factors:
    return _mapped(eqn, ((d, k) for k, d in enumerate(eqn.params["permutation"])))


def _squeeze(eqn: Equation) -> Factors:
    return _mapped(eqn, _kept(eqn, eqn.params["dimensions"]))


def _reshape(eqn: Equation) -> Factors:
    """Return the kept dimensions, and the slowest one of every split or merged group."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if 0 in before or eqn.params.get("dimensions") is not None:  # which transposes first
        return ()
    found, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        if before[i] == 1 and after[j] != 1:
            i += 1
        elif after[j] == 1 and before[i] != 1:
            j += 1
        else:
            found.append(_pair((0, i), (0, j)))
            left, right, i, j = before[i], after[j], i + 1, j + 1
            while left != right:
                if left < right:
                    left, i = left * before[i], i + 1
                else:
                    right, j = right * after[j], j + 1
    return tuple(found)


def _stack(eqn: Equation) -> Factors:
    axis = eqn.params["axis"]
    return _mapped(eqn, ((d, d + (d >= axis)) for d in range(eqn.invars[0].aval.ndim)))


def _unstack(eqn: Equation) -> Factors:
    return _mapped(eqn, _kept(eqn, (eqn.params["axis"],)))


def _gather(eqn: Equation) -> Factors:
    """Return the factors of a gather.

    Window dimensions that are taken whole run with the operand's; a looked-up dimension is summed
    over (each device looks into its part, the others add zeros); the rest run with the indices.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = (v.aval.shape for v in eqn.invars)
    out_rank = eqn.outvars[0].aval.ndim
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(operand)) if d not in dropped]
    found = [
        _pair((0, d), (0, to))
        for d, to in zip(window, numbers.offset_dims, strict=True)
        if sizes[d] == operand[d]
    ]
    found += [
        Factor(((0, d),), (), indexed=True)
        for d in numbers.start_index_map
        if d in numbers.collapsed_slice_dims
    ]
    batch = [d for d in range(out_rank) if d not in numbers.offset_dims]
    paired = zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    partner = {i: ((0, o),) for i, o in paired}
    for i, to in zip(range(len(indices) - 1), batch, strict=True):
        found.append(Factor(((1, i), *partner.get(i, ())), ((0, to),)))
    return tuple(found)


def _scatter(eqn: Equation) -> Factors:
    """The gather's transpose. What the indices run over is summed, if the scatter is a sum."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (v.aval.shape for v in eqn.invars)
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(operand)) if d not in dropped]
    found = [
        Factor(((0, d), (2, own)), ((0, d),))
        for d, own in zip(window, numbers.update_window_dims, strict=True)
        if operand[d] == updates[own]
    ]
    found += [Factor(((0, d),), ((0, d),), indexed=True) for d in numbers.inserted_window_dims]
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    paired = zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    partner = dict(paired)
    for i, own in zip(range(len(indices) - 1), batch, strict=True):
        if i in partner:
            found.append(Factor(((1, i), (2, own), (0, partner[i])), ((0, partner[i]),)))
        elif eqn.primitive.name in ("scatter-add", "scatter_add"):
            found.append(Factor(((1, i), (2, own)), ()))
    return tuple(found)


def _pad(eqn: Equation) -> Factors:
    configs = enumerate(eqn.params["padding_config"])
    return tuple(_pair((0, d), (0, d)) for d, config in configs if tuple(config) == (0, 0, 0))


def _nothing(eqn: Equation) -> Factors:
    """No operand matters: each device can make any part of the result."""
    return ()


# fmt: off
_RULES: dict[str, Callable[[Equation], Factors]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "pad": _pad,
    "stack": _stack,
    "unstack": _unstack,
    "gather": _gather,
    "rev": _along("dimensions"),
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _along("axis")),
    **dict.fromkeys(("split", "top_k"), _along("axis")),
    **dict.fromkeys(("argmax", "argmin"), _reduced),
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice", "tile"), _same_size),
    **dict.fromkeys(
        ("scatter-add", "scatter", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum",
         "select_and_gather_add", "select_and_scatter_add"), _window),
    **dict.fromkeys(
        ("iota", "random_bits", "random_fold_in", "random_seed", "random_split", "random_unwrap",
         "random_wrap", "rng_bit_generator"), _nothing),
}
# fmt: on
