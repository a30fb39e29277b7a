"""Attention in which a token sees those from a first one up to itself; no scores are stored.

That is causal attention within documents that share a row, within a window, or both: `first[i]`,
the first token that token i sees, is the start of its document or of its window, whichever is
later, and never falls along a row. The algorithm is that of Dao (2023, "FlashAttention-2"): blocks
of scores are made as they are needed, in the backward pass again from the logarithms of the
softmax's sums. GPUs since Ampere run Pallas kernels that skip the blocks of other documents; all
else loops over blocks of queries. Not even numbers that are not finite leave their document.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from launcher.trace import Kernel, call_kernel

_SCORES = 2**24  # float32, held at a time by the loop over blocks of queries
_LOWEST = -1e30  # a score below all, whose difference from itself is a number

# Blocks of queries' rows and their columns, then of keys' rows. At these sizes an A100 and an H100
# spill hardly a register, and an L40S has the shared memory.
_ROWS, _COLUMNS, _KEY_ROWS, _KEY_COLUMNS, _WARPS, _STAGES = 128, 32, 64, 32, 8, 2


def first_seen(positions: jax.Array, window: int = 0) -> jax.Array:
    """Return the first token that each one sees, int32 [batch, length].

    Args:
        positions: of each token in its document, int32 [batch, length].
        window: how many tokens it sees at most, its own included; 0: all before it.
    """
    back = jnp.minimum(positions, window - 1) if window else positions
    return jnp.maximum(jax.lax.broadcasted_iota(jnp.int32, positions.shape, 1) - back, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_since(
    query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, is_fused: bool
) -> jax.Array:
    """Return attention, float [batch, length, heads, size], of tokens i to those in first[i]..i.

    Args:
        query: float [batch, length, heads, size].
        key: float [batch, length, kv_heads, size]; equally many heads share each.
        value: as `key`.
        first: int32 [batch, length]; at most i, and never falling along a row.
        is_fused: whether GPUs run the kernels.
    """
    return call_kernel(_kernels(is_fused)[0], query, key, value, first)[0]


def _with_kept(*given: Any) -> tuple[jax.Array, Any]:
    *operands, is_fused = given
    out, sums = call_kernel(_kernels(is_fused)[0], *operands)
    return out, (*operands, sums, out)


def _slopes(is_fused: bool, kept: Any, slope: jax.Array) -> tuple[Any, ...]:
    *operands, out = kept
    delta = jnp.swapaxes(jnp.sum(slope.astype(jnp.float32) * out, axis=-1), 1, 2)
    return (*call_kernel(_kernels(is_fused)[1], *operands, delta, slope), None)


attend_since.defvjp(_with_kept, _slopes)


@functools.cache
def _kernels(is_fused: bool) -> tuple[Kernel, Kernel]:
    """Return the kernels of both passes.

    The first one's operands are those of `attend_since`, and its results attention and the
    logarithms of the softmax's sums, float32 [batch, heads, length]. The second one's operands are
    these, the logarithms, for each query the product of attention and its gradient (`delta`, of
    the same shape), and that gradient; its results are those of queries, keys and values.
    """
    by = "a kernel that skips other documents" if is_fused else "a loop"
    note = f"attention within documents or windows: by {by}, without an array of scores"

    def flops(products: int, operands: Sequence[Any]) -> float:
        batch, length, heads, size = operands[0].shape
        pairs = length * length / (2 if is_fused else 1)
        return float(2 * products * batch * heads * size * pairs)

    rows, heads = ((0, 0), (1, 0), (2, 0), (3, 0)), ((0, 2), (1, 2), (2, 2))
    forward = (rows, ((0, 0), (1, 0))), (heads, ((0, 2), (1, 1)))
    backward = (
        ((*rows, (4, 0), (5, 0), (6, 0)), ((0, 0), (1, 0), (2, 0))),
        ((*heads, (4, 1), (5, 1), (6, 2)), heads),
    )
    fused = (fused_forward, fused_backward) if is_fused else (None, None)
    two, five = (functools.partial(flops, count) for count in (2, 5))
    return (
        Kernel(note, plain_forward, fused[0], forward, two, 2.5, is_fused),
        Kernel(note, plain_backward, fused[1], backward, five, 2.5, is_fused),
    )


def _finite(x: jax.Array) -> jax.Array:
    """Return numbers with 0 for those that are not finite, which would survive a weight of 0."""
    return jnp.where(jnp.abs(x) < math.inf, x, 0)


def _taint(x: jax.Array) -> jax.Array:
    """Return 0 for rows [..., size] of finite numbers, and NaN for others."""
    return jnp.sum((x - x).astype(jnp.float32), axis=-1)


def _seen(query_at: jax.Array, key_at: jax.Array, first: jax.Array) -> jax.Array:
    return (key_at <= query_at) & (key_at >= first)


# ---- A loop over blocks of queries. Heads are [kv_heads, group].

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _num_blocks(query: jax.Array) -> int:
    batch, length, heads, _ = query.shape
    least = min(length, -(-batch * heads * length**2 // _SCORES))
    return next(n for n in range(least, length + 1) if length % n == 0)


def _in_blocks(x: jax.Array, count: int, groups: int) -> jax.Array:
    """Return an array of queries, or of numbers of them, with an axis of blocks in front."""
    if x.ndim == 3:  # by heads
        return jnp.moveaxis(x.reshape(len(x), groups, -1, count, x.shape[2] // count), 3, 0)
    heads = (groups, -1, x.shape[3]) if x.ndim == 4 else ()
    return jnp.moveaxis(x.reshape(len(x), count, x.shape[1] // count, *heads), 1, 0)


def _scores(
    key: jax.Array, place: jax.Array, query: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the scores [batch, kv_heads, group, block, length], and which are of keys seen."""
    own = place + jnp.arange(query.shape[1])
    seen = _seen(own[:, None], jnp.arange(key.shape[1]), first[:, :, None])
    scores = _product("bqkgh,bskh->bkgqs", query, key) * query.shape[-1] ** -0.5
    return scores, seen[:, None, None]


def plain_forward(*operands: jax.Array) -> list[jax.Array]:
    """Return what the first of `_kernels` does, by a loop."""
    query, key, value, first = operands
    tainted = jnp.swapaxes(_taint(value), 1, 2)[:, :, None, None]
    count = _num_blocks(query)

    def of_block(of: Any) -> Any:
        scores, seen = _scores(key, *of)
        scores = jnp.where(seen, scores + tainted, -jnp.inf)
        sums = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - sums), 0).astype(value.dtype)
        return _product("bkgqs,bskh->bqkgh", weights, _finite(value)), sums[..., 0]

    blocks = (_in_blocks(x, count, key.shape[2]) for x in (query, first))
    places = jnp.arange(count) * (query.shape[1] // count)
    out, sums = jax.lax.map(of_block, (places, *blocks))
    out = jnp.moveaxis(out, 0, 1).reshape(query.shape).astype(query.dtype)
    return [out, jnp.moveaxis(sums, 0, 3).reshape(len(query), query.shape[2], -1)]


def plain_backward(*operands: jax.Array) -> list[jax.Array]:
    """Return what the second of `_kernels` does, by a loop."""
    query, key, value, *more = operands
    count, scale, dtype = _num_blocks(query), query.shape[-1] ** -0.5, query.dtype

    def of_block(sums_of: Any, of: Any) -> Any:
        place, query, first, sums, delta, slope = of
        scores, seen = _scores(key, place, query, first)
        sums, delta = (sums + delta - delta)[..., None], delta[..., None]  # NaN where delta is
        weights = jnp.where(seen, jnp.exp(scores - sums), 0)
        of_weights = _product("bqkgh,bskh->bkgqs", slope, value) - delta
        of_scores = jnp.where(seen, weights * of_weights * scale, 0).astype(dtype)
        parts = (
            _product("bkgqs,bqkgh->bskh", of_scores, _finite(query)),
            _product("bkgqs,bqkgh->bskh", weights.astype(dtype), _finite(slope)),
        )
        query_slope = _product("bkgqs,bskh->bqkgh", of_scores, _finite(key)).astype(dtype)
        return jax.tree.map(jnp.add, sums_of, parts), query_slope

    blocks = (_in_blocks(x, count, key.shape[2]) for x in (query, *more))
    places = jnp.arange(count) * (query.shape[1] // count)
    zeros = jnp.zeros(key.shape, jnp.float32)
    slopes, query_slope = jax.lax.scan(of_block, (zeros, zeros), (places, *blocks))
    query_slope = jnp.moveaxis(query_slope, 0, 1).reshape(query.shape)
    return [query_slope, *(x.astype(key.dtype) for x in slopes)]


# ---- Kernels. Each program of a grid holds a block of rows, and loops over blocks of columns.


def _dot(a: jax.Array, b: jax.Array, over: int) -> jax.Array:
    """Return the product of two matrices in float32, over the rows' (0) or columns (1) of `b`."""
    dims = (((1,), (over,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _forward_kernel(*refs: Any, scale: float) -> None:
    query_ref, key_ref, value_ref, first_ref, out_ref, sums_ref = refs
    rows, size = query_ref.shape
    begin, query, first = pl.program_id(0) * rows, query_ref[...], first_ref[...]
    own = begin + jnp.arange(rows)

    def of_columns(number: jax.Array, carry: Any) -> Any:
        out, largest, total = carry
        at = pl.ds(number * _COLUMNS, _COLUMNS)
        value, other = value_ref[at, :], number * _COLUMNS + jnp.arange(_COLUMNS)
        seen = _seen(own[:, None], other[None], first[:, None])
        scores = _dot(query, key_ref[at, :], 1) * scale + _taint(value)[None]
        scores = jnp.where(seen, scores, _LOWEST)
        now = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.where(seen, jnp.exp(scores - now[:, None]), 0)
        shrunk = jnp.exp(largest - now)
        out = out * shrunk[:, None] + _dot(weights.astype(value.dtype), _finite(value), 0)
        return out, now, total * shrunk + jnp.sum(weights, axis=1)

    empty = jnp.zeros((rows, size)), jnp.full((rows,), _LOWEST), jnp.zeros((rows,))
    ends = jnp.min(first) // _COLUMNS, (begin + rows) // _COLUMNS
    out, largest, total = jax.lax.fori_loop(*ends, of_columns, empty)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[...] = largest + jnp.log(total)


def _query_kernel(*refs: Any, scale: float) -> None:
    query_ref, key_ref, value_ref, *number_refs, slope_ref, out_ref = refs
    rows = query_ref.shape[0]
    begin, query, slope = pl.program_id(0) * rows, query_ref[...], slope_ref[...]
    own = (begin + jnp.arange(rows))[:, None]
    first, sums, delta = (ref[...][:, None] for ref in number_refs)

    def of_columns(number: jax.Array, out: jax.Array) -> jax.Array:
        at = pl.ds(number * _COLUMNS, _COLUMNS)
        key, other = key_ref[at, :], number * _COLUMNS + jnp.arange(_COLUMNS)
        weights = jnp.exp(_dot(query, key, 1) * scale - sums)
        of_scores = weights * (_dot(slope, value_ref[at, :], 1) - delta) * scale
        of_scores = jnp.where(_seen(own, other[None], first), of_scores, 0)
        return out + _dot(of_scores.astype(key.dtype), _finite(key), 0)

    ends = jnp.min(first) // _COLUMNS, (begin + rows) // _COLUMNS
    out = jax.lax.fori_loop(*ends, of_columns, jnp.zeros(query.shape))
    out_ref[...] = out.astype(out_ref.dtype)


def _key_kernel(*refs: Any, scale: float) -> None:
    query_ref, key_ref, value_ref, first_ref, sums_ref, delta_ref, slope_ref, *others = refs
    end_ref, *out_refs = others
    begin, key, value = pl.program_id(0) * len(key_ref), key_ref[...], value_ref[...]
    own = (begin + jnp.arange(len(key)))[:, None]
    columns, end = _KEY_COLUMNS, end_ref[pl.program_id(0)]

    def of_columns(head: Any, number: jax.Array, slopes: Any) -> Any:
        at = pl.ds(number * columns, columns)
        query, slope = query_ref[at, head, :], slope_ref[at, head, :]
        sums, delta, first = sums_ref[head, at][None], delta_ref[head, at][None], first_ref[at]
        seen = _seen(number * columns + jnp.arange(columns)[None], own, first[None])
        scores = _dot(key, query, 1) * scale
        weights = jnp.where(seen, jnp.exp(scores - sums - (delta - delta)), 0)
        of_scores = jnp.where(seen, weights * (_dot(value, slope, 1) - delta) * scale, 0)
        of_key = _dot(of_scores.astype(query.dtype), _finite(query), 0)
        return slopes[0] + of_key, slopes[1] + _dot(weights.astype(key.dtype), _finite(slope), 0)

    def of_head(head: Any, slopes: Any) -> Any:
        ends = begin // columns, (end + columns - 1) // columns
        return jax.lax.fori_loop(*ends, functools.partial(of_columns, head), slopes)

    zeros = jnp.zeros(key.shape)
    slopes = jax.lax.fori_loop(0, query_ref.shape[1], of_head, (zeros, zeros))
    for ref, slope in zip(out_refs, slopes, strict=True):
        ref[...] = slope.astype(ref.dtype)


def _padded(
    fun: Callable[..., list[jax.Array]], query: jax.Array, *others: jax.Array
) -> list[jax.Array]:
    """Call a kernel for lengths that are whole blocks, and heads of a power of two.

    What is added sees itself alone, and nothing else sees it.
    """
    key, value, first, *more = others
    length, size = query.shape[1], query.shape[3]
    longer, larger = -length % _ROWS, max(16, pl.next_power_of_2(size)) - size

    def pad(x: jax.Array) -> jax.Array:
        by_head = ((0, 0), (0, 0), (0, longer))
        return jnp.pad(x, by_head if x.ndim == 3 else ((0, 0), (0, longer), (0, 0), (0, larger)))

    own = jnp.broadcast_to(jnp.arange(length, length + longer), (len(first), longer))
    first = jnp.concatenate([first, own.astype(first.dtype)], axis=1)
    made = fun(size**-0.5, pad(query), pad(key), pad(value), first, *map(pad, more))
    return [x[:, :length, :, :size] if x.ndim == 4 else x[..., :length] for x in made]


def _launched(
    kernel: Callable[..., None], products: int, given: Any, grid: Any, ins: Any, outs: Any
) -> list[jax.Array]:
    """Return the results of a kernel that makes so many products for each pair of tokens.

    `ins` are the blocks of its operands; `outs` are pairs of the blocks and the types of results.
    """
    (batch, length, heads, size), types = given[0].shape, [x for _, x in outs]
    pairs = batch * heads * length * length // 2
    moved = sum(x.size * x.dtype.itemsize for x in (*given, *types))
    call = pl.pallas_call(
        kernel,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types],
        grid=grid,
        in_specs=ins,
        out_specs=[spec for spec, _ in outs],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        cost_estimate=pl.CostEstimate(2 * products * pairs * size, pairs, moved),
    )
    made: list[jax.Array] = call(*given)
    return made


def _by_rows(query: jax.Array, key: jax.Array) -> tuple[tuple[int, ...], list[Any]]:
    """Return a grid over rows of queries, heads and examples, and its blocks.

    They are of queries, keys, first tokens, and numbers of queries.
    """
    batch, length, heads, size = query.shape
    group = heads // key.shape[2]
    return (length // _ROWS, heads, batch), [
        pl.BlockSpec((None, _ROWS, None, size), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, length, None, size), lambda i, n, b: (b, 0, n // group, 0)),
        pl.BlockSpec((None, _ROWS), lambda i, n, b: (b, i)),
        pl.BlockSpec((None, None, _ROWS), lambda i, n, b: (b, n, i)),
    ]


def _by_key_rows(query: jax.Array, key: jax.Array) -> tuple[tuple[int, ...], list[Any]]:
    """Return a grid over rows of keys, their heads and examples, and the same blocks."""
    batch, length, heads, size = query.shape
    group = heads // key.shape[2]
    return (length // _KEY_ROWS, key.shape[2], batch), [
        pl.BlockSpec((None, length, group, size), lambda i, n, b: (b, 0, n, 0)),
        pl.BlockSpec((None, _KEY_ROWS, None, size), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, length), lambda i, n, b: (b, 0)),
        pl.BlockSpec((None, group, length), lambda i, n, b: (b, n, 0)),
    ]


def fused_forward(*operands: jax.Array) -> list[jax.Array]:
    """Return what the first of `_kernels` does, by a Pallas kernel."""

    def launched(scale: float, *given: jax.Array) -> list[jax.Array]:
        query, key, *_ = given
        grid, (queries, keys, firsts, numbers) = _by_rows(query, key)
        kernel = functools.partial(_forward_kernel, scale=scale)
        sums = jax.ShapeDtypeStruct((len(query), query.shape[2], query.shape[1]), jnp.float32)
        outs = (queries, query), (numbers, sums)
        return _launched(kernel, 2, given, grid, [queries, keys, keys, firsts], outs)

    return _padded(launched, *operands)


def fused_backward(*operands: jax.Array) -> list[jax.Array]:
    """Return what the second of `_kernels` does, by two Pallas kernels."""

    def launched(scale: float, *given: jax.Array) -> list[jax.Array]:
        query, key, value, first, *_ = given
        grid, (queries, keys, firsts, numbers) = _by_rows(query, key)
        ins = [queries, keys, keys, firsts, numbers, numbers, queries]
        kernel = functools.partial(_query_kernel, scale=scale)
        query_slope = _launched(kernel, 3, given, grid, ins, [(queries, query)])

        last = jnp.arange(_KEY_ROWS - 1, query.shape[1], _KEY_ROWS)
        ends = jnp.sum(first[:, None] <= last[:, None], axis=-1, dtype=jnp.int32)
        end = pl.BlockSpec((None, len(last)), lambda i, n, b: (b, 0))
        grid, (queries, keys, firsts, numbers) = _by_key_rows(query, key)
        ins = [queries, keys, keys, firsts, numbers, numbers, queries, end]
        kernel, outs = functools.partial(_key_kernel, scale=scale), [(keys, key), (keys, value)]
        return query_slope + _launched(kernel, 4, (*given, ends), grid, ins, outs)

    return _padded(launched, *operands)
