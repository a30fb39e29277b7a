"""Dimensions of operands and results that can be sharded together: one rule per primitive.

A *factor* names dimensions that run together: cut all of them the same way and each device can
compute its part alone. A factor that reaches no result is summed over, so that each device then has
a partial result. A dimension in no factor has to be whole where the equation runs. (The form is
that of Shardy's `sharding_rule`, openxla.org/shardy.) A primitive that is neither listed here nor
element-wise (`primitive_kinds`) has no factors: it is replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from launcher.trace.ir.cudnn import attention_places
from launcher.trace.ir.jaxpr import Equation
from launcher.trace.ir.primitive_kinds import ATTENTION_PRODUCTS, BARRIERS, ELEMENTWISE

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


def factors(eqn: Equation) -> tuple[Factor, ...] | None:
    """The factors of an equation without inner programs; None: the primitive is not known."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(eqn)
    if name in BARRIERS:
        ranks = [v.aval.ndim for v in eqn.invars]
        return tuple(Factor(((i, d),), ((i, d),)) for i, n in enumerate(ranks) for d in range(n))
    if name in ATTENTION_PRODUCTS:
        return tuple(Factor(*places) for places in attention_places(eqn))
    rule = _RULES.get(name) or (_reduced if name.startswith("reduce_") else None)
    return None if rule is None else rule(eqn)


def _dot(eqn: Equation) -> tuple[Factor, ...]:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in eqn.invars]
    lhs_free = [d for d in range(ranks[0]) if d not in (*lhs_sum, *lhs_batch)]
    rhs_free = [d for d in range(ranks[1]) if d not in (*rhs_sum, *rhs_batch)]
    batch = zip(lhs_batch, rhs_batch, strict=True)
    found = [Factor(((0, a), (1, b)), ((0, k),)) for k, (a, b) in enumerate(batch)]
    place = len(lhs_batch)
    found += [Factor(((0, d),), ((0, place + k),)) for k, d in enumerate(lhs_free)]
    place += len(lhs_free)
    found += [Factor(((1, d),), ((0, place + k),)) for k, d in enumerate(rhs_free)]
    summed = zip(lhs_sum, rhs_sum, strict=True)
    return (*found, *(Factor(((0, a), (1, b)), ()) for a, b in summed))


def _conv(eqn: Equation) -> tuple[Factor, ...]:
    numbers = eqn.params["dimension_numbers"]
    (n, c, *_), (o, i, *_), (out_n, out_c, *_) = (
        numbers.lhs_spec,
        numbers.rhs_spec,
        numbers.out_spec,
    )
    groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    if groups[1] != 1:
        return ()
    batch = Factor(((0, n),), ((0, out_n),))
    if groups[0] != 1:
        return (batch,)
    return (batch, Factor(((1, o),), ((0, out_c),)), Factor(((0, c), (1, i)), ()))


def _reduced(eqn: Equation) -> tuple[Factor, ...]:
    """Every operand is reduced along the same axes."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    kept = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in axes]
    ins, outs = range(len(eqn.outvars)), range(len(eqn.outvars))
    found = [
        Factor(tuple((i, d) for i in ins), tuple((j, k) for j in outs)) for k, d in enumerate(kept)
    ]
    if eqn.primitive.name in ("reduce_sum", "reduce_max", "reduce_min"):
        found += [Factor(((0, d),), ()) for d in axes]
    return tuple(found)


def _along(*names: str) -> Callable[[Equation], tuple[Factor, ...]]:
    """All operands and results alike, but for the dimensions that these parameters name."""

    def rule(eqn: Equation) -> tuple[Factor, ...]:
        whole: set[int] = set()
        for name in names:
            value = eqn.params[name]
            whole.update(value if isinstance(value, (tuple, list)) else (value,))
        ranks = tuple(len(v.aval.shape) for v in eqn.invars)
        return _alike(ranks, len(eqn.outvars[0].aval.shape), len(eqn.outvars), frozenset(whole))

    return rule


@functools.lru_cache(maxsize=1024)
def _alike(
    ranks: tuple[int, ...], rank: int, num_results: int, whole: frozenset[int]
) -> tuple[Factor, ...]:
    """Return the factors of operands and results of that rank, but for the dimensions `whole`."""
    ins = [i for i, of in enumerate(ranks) if of == rank]
    outs = range(num_results)
    return tuple(
        Factor(tuple((i, d) for i in ins), tuple((j, d) for j in outs))
        for d in range(rank)
        if d not in whole
    )


_elementwise = _along()  # single numbers beside arrays do not matter


def _same_size(eqn: Equation) -> tuple[Factor, ...]:
    """Operands and results alike where all are equally long; single numbers do not matter."""
    rank = len(eqn.outvars[0].aval.shape)
    ins = [i for i, v in enumerate(eqn.invars) if len(v.aval.shape) == rank]
    shapes = [*(eqn.invars[i].aval.shape for i in ins), *(v.aval.shape for v in eqn.outvars)]
    outs = range(len(eqn.outvars))
    return tuple(
        Factor(tuple((i, d) for i in ins), tuple((j, d) for j in outs))
        for d in range(rank)
        if len({shape[d] for shape in shapes}) == 1
    )


def _broadcast(eqn: Equation) -> tuple[Factor, ...]:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    pairs = enumerate(eqn.params["broadcast_dimensions"])
    return tuple(Factor(((0, d),), ((0, to),)) for d, to in pairs if before[d] == after[to])


def _transpose(eqn: Equation) -> tuple[Factor, ...]:
    pairs = enumerate(eqn.params["permutation"])
    return tuple(Factor(((0, d),), ((0, k),)) for k, d in pairs)


def _squeeze(eqn: Equation) -> tuple[Factor, ...]:
    rank = len(eqn.invars[0].aval.shape)
    kept = [d for d in range(rank) if d not in eqn.params["dimensions"]]
    return tuple(Factor(((0, d),), ((0, k),)) for k, d in enumerate(kept))


def _reshape(eqn: Equation) -> tuple[Factor, ...]:
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
            found.append(Factor(((0, i),), ((0, j),)))
            left, right, i, j = before[i], after[j], i + 1, j + 1
            while left != right:
                if left < right:
                    left, i = left * before[i], i + 1
                else:
                    right, j = right * after[j], j + 1
    return tuple(found)


def _concatenate(eqn: Equation) -> tuple[Factor, ...]:
    ins = range(len(eqn.invars))
    rank, along = len(eqn.outvars[0].aval.shape), eqn.params["dimension"]
    return tuple(Factor(tuple((i, d) for i in ins), ((0, d),)) for d in range(rank) if d != along)


def _stack(eqn: Equation) -> tuple[Factor, ...]:
    ins, axis = range(len(eqn.invars)), eqn.params["axis"]
    rank = len(eqn.invars[0].aval.shape)
    return tuple(Factor(tuple((i, d) for i in ins), ((0, d + (d >= axis)),)) for d in range(rank))


def _unstack(eqn: Equation) -> tuple[Factor, ...]:
    outs, axis = range(len(eqn.outvars)), eqn.params["axis"]
    kept = [d for d in range(len(eqn.invars[0].aval.shape)) if d != axis]
    return tuple(Factor(((0, d),), tuple((j, k) for j in outs)) for k, d in enumerate(kept))


def _gather(eqn: Equation) -> tuple[Factor, ...]:
    """Return the factors of a gather.

    Window dimensions that are taken whole run with the operand's; a looked-up dimension is summed
    over (each device looks into its part, the others add zeros); the rest run with the indices.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = (v.aval.shape for v in eqn.invars)
    out_rank = len(eqn.outvars[0].aval.shape)
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(operand)) if d not in dropped]
    found = [
        Factor(((0, d),), ((0, to),))
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


def _scatter(eqn: Equation) -> tuple[Factor, ...]:
    """The gather's transpose. What the indices run over is summed, if the scatter is a sum."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (v.aval.shape for v in eqn.invars)
    window = [
        d
        for d in range(len(operand))
        if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    found = []
    for d, of in zip(window, numbers.update_window_dims, strict=True):
        if operand[d] == updates[of]:
            found.append(Factor(((0, d), (2, of)), ((0, d),)))
    found += [Factor(((0, d),), ((0, d),), indexed=True) for d in numbers.inserted_window_dims]
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    paired = zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    partner = dict(paired)
    for i, of in zip(range(len(indices) - 1), batch, strict=True):
        if i in partner:
            found.append(Factor(((1, i), (2, of), (0, partner[i])), ((0, partner[i]),)))
        elif eqn.primitive.name in ("scatter-add", "scatter_add"):
            found.append(Factor(((1, i), (2, of)), ()))
    return tuple(found)


def _window(eqn: Equation) -> tuple[Factor, ...]:
    """Pooling: dimensions over which the window does not move, and that are not padded."""
    names = "window_dimensions", "window_strides", "padding"
    spans = zip(*(eqn.params[name] for name in names), strict=True)
    still = [
        d
        for d, (size, stride, padding) in enumerate(spans)
        if size == stride == 1 and tuple(padding) == (0, 0)
    ]
    return tuple(factor for factor in _same_size(eqn) if factor.results[0][1] in still)


def _pad(eqn: Equation) -> tuple[Factor, ...]:
    pairs = enumerate(eqn.params["padding_config"])
    return tuple(Factor(((0, d),), ((0, d),)) for d, config in pairs if tuple(config) == (0, 0, 0))


def _nothing(eqn: Equation) -> tuple[Factor, ...]:
    """No operand matters: each device can make any part of the result."""
    return ()


_RULES: dict[str, Callable[[Equation], tuple[Factor, ...]]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _same_size,
    "dynamic_slice": _same_size,
    "dynamic_update_slice": _same_size,
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _same_size,
    "split": _along("axis"),
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "top_k": _along("axis"),
    "cumsum": _along("axis"),
    "cumprod": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumlogsumexp": _along("axis"),
    "argmax": _reduced,
    "argmin": _reduced,
    "gather": _gather,
    "scatter-add": _scatter,
    "scatter": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
    "reduce_window_sum": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window": _window,
    "select_and_scatter_add": _window,
    "select_and_gather_add": _window,
    "iota": _nothing,
    "random_bits": _nothing,
    "random_wrap": _nothing,
    "random_unwrap": _nothing,
    "random_fold_in": _nothing,
    "random_split": _nothing,
    "random_seed": _nothing,
    "rng_bit_generator": _nothing,
}
