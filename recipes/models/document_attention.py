"""Attention in which a token sees those from a first one up to itself; no scores are stored.

That is causal attention within documents that share a row, within a window, or both: `first[i]`,
the first token that token i sees, is the start of its document or of its window, whichever is
later, and never falls along a row. The algorithm is that of Dao (2023, "FlashAttention-2"): blocks
of scores are made as they are needed, in the backward pass again from the logarithms of the
softmax's sums. GPUs since Ampere run Pallas kernels that skip the blocks of other documents; all
else loops over blocks of queries. Not even numbers that are not finite leave their document.

The sizes of kernels' blocks are those at which hardly a register is spilt on an A100 or an H100,
and an L40S has the shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from launcher.trace import Kernel, call_kernel

_SCORES = 2**24  # float32, held at a time by the loop over blocks of queries
_LOWEST = -1e30  # a score below all, whose difference from itself is a number


def attend_since(
    query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, is_fused: bool
) -> jax.Array:
    """Return attention, float [batch, length, heads, size], of tokens i to those in first[i]..i.

    Args:
        query: float [batch, length, heads, size].
        key: float [batch, length, kv_heads, size]; equally many heads share each.
        value: as `key`.
        first: int32 [batch, length]; at most i, and never falling along a row.
        is_fused: whether GPUs run the kernels, which compute in 16 bits.
    """
    out: jax.Array = _attend(is_fused, query, key, value, first)
    return out


def first_seen(positions: jax.Array, window: int = 0) -> jax.Array:
    """Return the first token that each one sees, int32 [batch, length].

    Args:
        positions: of each token in its document, int32 [batch, length].
        window: how many tokens it sees at most, its own included; 0: all before it.
    """
    back = jnp.minimum(positions, window - 1) if window else positions
    return jnp.maximum(jax.lax.broadcasted_iota(jnp.int32, positions.shape, 1) - back, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(is_fused: bool, *operands: jax.Array) -> jax.Array:
    return call_kernel(Forward(is_fused), *operands)[0]


def _attend_forward(is_fused: bool, *operands: jax.Array) -> tuple[jax.Array, Any]:
    out, sums = call_kernel(Forward(is_fused), *operands)
    return out, (*operands, out, sums)


def _attend_backward(is_fused: bool, kept: Any, slope: jax.Array) -> tuple[Any, ...]:
    *operands, out, sums = kept
    delta = jnp.sum(slope.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta = jnp.swapaxes(delta, 1, 2)
    return (*call_kernel(Backward(is_fused), *operands, sums, delta, slope), None)


_attend.defvjp(_attend_forward, _attend_backward)

_EXAMPLES = (((0, 0), (1, 0), (2, 0), (3, 0)), ((0, 0), (1, 0)))
_HEADS = (((0, 2), (1, 2), (2, 2)), ((0, 2), (1, 1)))


@dataclasses.dataclass(frozen=True)
class Forward(Kernel):
    """Attention's result and the logarithms of the softmax's sums, float32 [batch, heads, length].

    Its operands are those of `attend_since`. `interpret`: see `pallas_call`; for tests.
    """

    interpret: bool = False
    products: ClassVar[int] = 2
    backward_share = 2.5
    places = _EXAMPLES, _HEADS

    def note(self) -> str:
        """Return what computes it."""
        by = "a kernel that skips other documents" if self.is_fused else "a loop"
        return f"attention within documents or windows: by {by}, without an array of scores"

    def flops(self, operands: Sequence[Any]) -> float:
        """Return its operations: of a kernel for the pairs up to the diagonal, else for all."""
        batch, length, heads, size = operands[0].shape
        pairs = length * (length / 2 if self.is_fused else length)
        return float(2 * self.products * batch * heads * size * pairs)

    def plain(self, *operands: jax.Array) -> list[jax.Array]:
        """Return its results by a loop over blocks of queries."""
        return _plain_forward(*operands)

    def fused(self, *operands: jax.Array) -> list[jax.Array]:
        """Return its results by a kernel."""
        return _padded(functools.partial(_fused_forward, self.interpret), *operands)


@dataclasses.dataclass(frozen=True)
class Backward(Forward):
    """Attention's gradients, of queries, keys and values.

    Its operands are those of `Forward`, then the logarithms; for each query the product of the
    result and its gradient, summed over the head, float32 as these; and that gradient.
    """

    products: ClassVar[int] = 5
    places = (
        ((*_EXAMPLES[0], (4, 0), (5, 0), (6, 0)), ((0, 0), (1, 0), (2, 0))),
        ((*_HEADS[0], (4, 1), (5, 1), (6, 2)), ((0, 2), (1, 2), (2, 2))),
    )

    def plain(self, *operands: jax.Array) -> list[jax.Array]:
        """Return its results by a loop over blocks of queries."""
        return _plain_backward(*operands)

    def fused(self, *operands: jax.Array) -> list[jax.Array]:
        """Return its results by two kernels."""
        return _padded(functools.partial(_fused_backward, self.interpret), *operands)


def _finite(x: jax.Array) -> jax.Array:
    """Return numbers with 0 for those that are not finite, which would survive a weight of 0."""
    return jnp.where(jnp.abs(x) < math.inf, x, 0)


def _taint(x: jax.Array) -> jax.Array:
    """Return 0 for rows [..., size] of finite numbers, and NaN for others."""
    return jnp.sum((x - x).astype(jnp.float32), axis=-1)


def _in_blocks(block: int, x: jax.Array, axis: int) -> jax.Array:
    """Return an axis of `x` cut into blocks, [blocks, …], padded with zeros."""
    count = -(-x.shape[axis] // block)
    edges = [(0, 0)] * x.ndim
    edges[axis] = 0, count * block - x.shape[axis]
    shape = (*x.shape[:axis], count, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, edges).reshape(shape), axis, 0)


def _joined(x: jax.Array, length: int, axis: int) -> jax.Array:
    """Return what `_in_blocks` was given."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _block_of(query: jax.Array) -> int:
    batch, length, heads, _ = query.shape
    return min(length, max(16, _SCORES // (batch * heads * length)))


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _seen_scores(
    query: jax.Array, key: jax.Array, first: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the scores of a block of queries, and which are of keys that they see.

    Both are [batch, kv_heads, group, block, length].
    """
    scores = _product("bqkgh,bskh->bkgqs", query, key) * query.shape[-1] ** -0.5
    other = jnp.arange(key.shape[1])
    own = place + jnp.arange(query.shape[1])
    seen = (other <= own[:, None]) & (other >= first[:, :, None])
    return scores, seen[:, None, None]


def _grouped(x: jax.Array, groups: int, axis: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])


def _plain_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array
) -> list[jax.Array]:
    length, block = query.shape[1], _block_of(query)
    tainted = jnp.swapaxes(_taint(value), 1, 2)[:, :, None, None]
    values = _finite(value)

    def of_block(place: jax.Array, of: tuple[jax.Array, jax.Array]) -> Any:
        scores, seen = _seen_scores(of[0], key, of[1], place)
        scores = jnp.where(seen, scores + tainted, -jnp.inf)
        sums = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.where(seen, jnp.exp(scores - sums[..., None]), 0).astype(value.dtype)
        return place + block, (_product("bkgqs,bskh->bqkgh", weights, values), sums)

    queries = _grouped(query, key.shape[2], 2)
    blocks = _in_blocks(block, queries, 1), _in_blocks(block, first, 1)
    _, (out, sums) = jax.lax.scan(of_block, jnp.int32(0), blocks)
    sums = _joined(sums, length, 3).reshape(*query.shape[:1], query.shape[2], length)
    return [_joined(out, length, 1).reshape(query.shape).astype(query.dtype), sums]


def _plain_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first: jax.Array,
    sums: jax.Array,
    delta: jax.Array,
    slope: jax.Array,
) -> list[jax.Array]:
    length, block, groups = query.shape[1], _block_of(query), key.shape[2]
    scale, keys, dtype = query.shape[-1] ** -0.5, _finite(key), query.dtype

    def of_block(carry: Any, of: tuple[jax.Array, ...]) -> Any:
        place, key_slope, value_slope = carry
        query, first, sums, delta, slope = of
        scores, seen = _seen_scores(query, key, first, place)
        sums = (sums + _taint(delta[..., None]))[..., None]
        weights = jnp.where(seen, jnp.exp(scores - sums), 0)
        value_slope += _product("bkgqs,bqkgh->bskh", weights.astype(dtype), _finite(slope))
        by_weight = _product("bqkgh,bskh->bkgqs", slope, value) - delta[..., None]
        by_score = jnp.where(seen, weights * by_weight * scale, 0).astype(dtype)
        key_slope += _product("bkgqs,bqkgh->bskh", by_score, _finite(query))
        query_slope = _product("bkgqs,bskh->bqkgh", by_score, keys).astype(dtype)
        return (place + block, key_slope, value_slope), query_slope

    queries, slopes = (_in_blocks(block, _grouped(x, groups, 2), 1) for x in (query, slope))
    by_head = [_in_blocks(block, _grouped(x, groups, 1), 3) for x in (sums, delta)]
    zeros = jnp.zeros(key.shape, jnp.float32)
    blocks = queries, _in_blocks(block, first, 1), *by_head, slopes
    start = jnp.int32(0), zeros, zeros
    (_, key_slope, value_slope), query_slope = jax.lax.scan(of_block, start, blocks)
    query_slope = _joined(query_slope, length, 1).reshape(query.shape)
    return [query_slope, key_slope.astype(key.dtype), value_slope.astype(value.dtype)]


# ---- The kernels. Each program of a grid holds a block of rows, and loops over blocks of columns.

_ROWS, _COLUMNS, _KEY_ROWS, _KEY_COLUMNS = 128, 32, 64, 32


def _padded(fun: Callable[..., list[jax.Array]], *operands: jax.Array) -> list[jax.Array]:
    """Call a kernel for lengths that are whole blocks, and heads of a power of two.

    What is added sees itself alone, and nothing else sees it.
    """
    query, key, value, first, *more = operands
    length, size = query.shape[1], query.shape[3]
    longer, larger = -length % _ROWS, max(16, pl.next_power_of_2(size)) - size

    def heads(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, longer), (0, 0), (0, larger)))

    own = jnp.broadcast_to(jnp.arange(length, length + longer), (first.shape[0], longer))
    first = jnp.concatenate([first, own.astype(first.dtype)], axis=1)
    by_head = [jnp.pad(x, ((0, 0), (0, 0), (0, longer))) for x in more[:2]]
    outs = fun(size**-0.5, *map(heads, (query, key, value)), first, *by_head, *map(heads, more[2:]))
    return [x[:, :length, :, :size] if x.ndim == 4 else x[..., :length] for x in outs]


def _dot(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Return the product of two matrices, summed over a dimension of each, in float32."""
    dims = (((over[0],), (over[1],)), ((), ()))
    precise = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precise, preferred_element_type=jnp.float32)


def _seen(query_at: jax.Array, key_at: jax.Array, first: jax.Array) -> jax.Array:
    return (key_at <= query_at) & (key_at >= first)


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
        scores = _dot(query, key_ref[at, :], (1, 1)) * scale + _taint(value)[None]
        scores = jnp.where(seen, scores, _LOWEST)
        now = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.where(seen, jnp.exp(scores - now[:, None]), 0)
        shrunk = jnp.exp(largest - now)
        out = out * shrunk[:, None] + _dot(weights.astype(value.dtype), _finite(value), (1, 0))
        return out, now, total * shrunk + jnp.sum(weights, axis=1)

    empty = jnp.zeros((rows, size)), jnp.full((rows,), _LOWEST), jnp.zeros((rows,))
    ends = jnp.min(first) // _COLUMNS, (begin + rows) // _COLUMNS
    out, largest, total = jax.lax.fori_loop(*ends, of_columns, empty)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[...] = largest + jnp.log(total)


def _query_kernel(*refs: Any, scale: float) -> None:
    query_ref, key_ref, value_ref, first_ref, sums_ref, delta_ref, slope_ref, out_ref = refs
    rows = query_ref.shape[0]
    begin, query, slope = pl.program_id(0) * rows, query_ref[...], slope_ref[...]
    own, first, sums, delta = (
        x[:, None]
        for x in (begin + jnp.arange(rows), first_ref[...], sums_ref[...], delta_ref[...])
    )

    def of_columns(number: jax.Array, out: jax.Array) -> jax.Array:
        at = pl.ds(number * _COLUMNS, _COLUMNS)
        key, other = key_ref[at, :], number * _COLUMNS + jnp.arange(_COLUMNS)
        weights = jnp.exp(_dot(query, key, (1, 1)) * scale - sums)
        by_score = weights * (_dot(slope, value_ref[at, :], (1, 1)) - delta) * scale
        by_score = jnp.where(_seen(own, other[None], first), by_score, 0)
        return out + _dot(by_score.astype(key.dtype), _finite(key), (1, 0))

    ends = jnp.min(first) // _COLUMNS, (begin + rows) // _COLUMNS
    out = jax.lax.fori_loop(*ends, of_columns, jnp.zeros(query.shape))
    out_ref[...] = out.astype(out_ref.dtype)


def _key_kernel(*refs: Any, scale: float) -> None:
    query_ref, key_ref, value_ref, first_ref, sums_ref, delta_ref, slope_ref, *others = refs
    end_ref, *out_refs = others
    rows = key_ref.shape[0]
    begin, key, value = pl.program_id(0) * rows, key_ref[...], value_ref[...]
    own = (begin + jnp.arange(rows))[:, None]
    columns, end = _KEY_COLUMNS, end_ref[pl.program_id(0)]

    def of_columns(number: jax.Array, carry: Any, head: Any) -> Any:
        key_slope, value_slope = carry
        at = pl.ds(number * columns, columns)
        query, slope = query_ref[at, head, :], slope_ref[at, head, :]
        sums, delta, first = sums_ref[head, at][None], delta_ref[head, at][None], first_ref[at]
        seen = _seen(number * columns + jnp.arange(columns)[None], own, first[None])
        scores = _dot(key, query, (1, 1)) * scale
        weights = jnp.where(seen, jnp.exp(scores - sums - (delta - delta)), 0)
        by_score = jnp.where(seen, weights * (_dot(value, slope, (1, 1)) - delta) * scale, 0)
        value_slope += _dot(weights.astype(slope.dtype), _finite(slope), (1, 0))
        return key_slope + _dot(by_score.astype(query.dtype), _finite(query), (1, 0)), value_slope

    def of_head(head: Any, carry: Any) -> Any:
        ends = begin // columns, (end + columns - 1) // columns
        return jax.lax.fori_loop(*ends, functools.partial(of_columns, head=head), carry)

    zeros = jnp.zeros(key.shape)
    found = jax.lax.fori_loop(0, query_ref.shape[1], of_head, (zeros, zeros))
    for ref, made in zip(out_refs, found, strict=True):
        ref[...] = made.astype(ref.dtype)


def _by_rows(rows: int, length: int, group: int, size: int) -> list[Any]:
    """Return blocks for a grid over rows of queries, heads and examples.

    They are of queries, keys, first tokens, and numbers of queries.
    """
    return [
        pl.BlockSpec((None, rows, None, size), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, length, None, size), lambda i, n, b: (b, 0, n // group, 0)),
        pl.BlockSpec((None, rows), lambda i, n, b: (b, i)),
        pl.BlockSpec((None, None, rows), lambda i, n, b: (b, n, i)),
    ]


def _by_key_rows(rows: int, length: int, group: int, size: int) -> list[Any]:
    """Return the same for a grid over rows of keys, their heads and examples."""
    return [
        pl.BlockSpec((None, length, group, size), lambda i, n, b: (b, 0, n, 0)),
        pl.BlockSpec((None, rows, None, size), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, length), lambda i, n, b: (b, 0)),
        pl.BlockSpec((None, group, length), lambda i, n, b: (b, n, 0)),
    ]


def _launched(
    kernel: Callable[..., None], products: int, given: Sequence[jax.Array], **how: Any
) -> list[jax.Array]:
    """Return the results of a kernel that makes so many `products` for each pair of tokens."""
    batch, length, heads, size = given[0].shape
    pairs = batch * heads * length * length // 2
    moved = sum(x.size * x.dtype.itemsize for x in (*given, *how["out_shape"]))
    call = pl.pallas_call(
        kernel,
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        cost_estimate=pl.CostEstimate(2 * products * pairs * size, pairs, moved),
        **how,
    )
    found: list[jax.Array] = call(*given)
    return found


def _fused_forward(interpret: bool, scale: float, *given: jax.Array) -> list[jax.Array]:
    query, key, *_ = given
    batch, length, heads, size = query.shape
    queries, keys, firsts, numbers = _by_rows(_ROWS, length, heads // key.shape[2], size)
    return _launched(
        functools.partial(_forward_kernel, scale=scale),
        2,
        given,
        grid=(length // _ROWS, heads, batch),
        in_specs=[queries, keys, keys, firsts],
        out_specs=[queries, numbers],
        out_shape=[_type(query), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)],
        interpret=interpret,
    )


def _fused_backward(interpret: bool, scale: float, *given: jax.Array) -> list[jax.Array]:
    query, key, value, first, *_ = given
    batch, length, heads, size = query.shape
    shapes = length, heads // key.shape[2], size
    queries, keys, firsts, numbers = _by_rows(_ROWS, *shapes)
    query_slope = _launched(
        functools.partial(_query_kernel, scale=scale),
        3,
        given,
        grid=(length // _ROWS, heads, batch),
        in_specs=[queries, keys, keys, firsts, numbers, numbers, queries],
        out_specs=[queries],
        out_shape=[_type(query)],
        interpret=interpret,
    )
    last = jnp.arange(_KEY_ROWS - 1, length, _KEY_ROWS)
    ends = jnp.sum(first[:, None] <= last[:, None], axis=-1, dtype=jnp.int32)
    queries, keys, firsts, numbers = _by_key_rows(_KEY_ROWS, *shapes)
    end = pl.BlockSpec((None, len(last)), lambda i, n, b: (b, 0))
    return query_slope + _launched(
        functools.partial(_key_kernel, scale=scale),
        4,
        (*given, ends),
        grid=(len(last), key.shape[2], batch),
        in_specs=[queries, keys, keys, firsts, numbers, numbers, queries, end],
        out_specs=[keys, keys],
        out_shape=[_type(key), _type(value)],
        interpret=interpret,
    )


def _type(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
