"""Products of tokens with the weights of the experts that they are sent to, and of no others.

Tokens are sorted by expert, and each expert's are cut into tiles of a few rows, the last of which
is not full (Gale et al., 2023, "MegaBlocks"). On GPUs since Ampere, a Pallas kernel's program
computes a tile; it reads and writes rows where they are, so no sorted copy is stored. All else
gathers tiles, and some at a time their experts' weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from launcher.trace import Kernel, call_kernel

# Reading an expert's weights for a tile costs about what so many rows of it do. The kernels read
# them from a cache; where they are gathered, they are written and read again.
_ROWS_OF_READING, _ROWS_OF_GATHERING = 4, 16
_STEP = 2**12  # rows of the tiles that are gathered at a time

# The largest tile's rows, its columns, and how much of a sum is added at a time: what an L40S has
# the shared memory for. The least is what a tensor core takes.
_MOST, _LEAST, _COLUMNS, _DEPTH, _WARPS, _STAGES = 128, 16, 128, 32, 8, 3


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def routed(x: jax.Array, index: jax.Array, weights: jax.Array, is_fused: bool) -> jax.Array:
    """Return the products of tokens with the weights of their experts.

    Args:
        x: of each token, float [batch, length, size], which all of its experts get; or of each and
            each of its experts, float [batch, length, chosen, size].
        index: the experts that each token is sent to, int32 [batch, length, chosen].
        weights: float [experts, size, width].
        is_fused: whether GPUs run the kernels.

    Returns:
        Float [batch, length, chosen, width]; or, of each and each of its experts, the sums of the
        products over a token's experts, [batch, length, width].
    """
    return call_kernel(_product(x.ndim, False, is_fused), x, index, weights)[0]


def _with_kept(*given: Any) -> tuple[jax.Array, Any]:
    *operands, is_fused = given
    return call_kernel(_product(given[0].ndim, False, is_fused), *operands)[0], operands


def _slopes(is_fused: bool, kept: Any, slope: jax.Array) -> tuple[Any, ...]:
    x, index, weights = kept
    of_x = call_kernel(_product(slope.ndim, True, is_fused), slope, index, weights)[0]
    gradient = _gradient(x.ndim, len(weights), is_fused)
    return of_x, None, call_kernel(gradient, x, index, slope)[0]


routed.defvjp(_with_kept, _slopes)


@functools.cache
def _product(rank: int, is_turned: bool, is_fused: bool) -> Kernel:
    """Return the kernel of `routed`; of `is_turned` weights, float [experts, width, size]."""
    size, width = (2, 1) if is_turned else (1, 2)
    places = (
        (((0, 0), (1, 0)), ((0, 0),)),
        (((0, 1), (1, 1)), ((0, 1),)),
        (((0, rank - 1), (2, size)), ()),
        (((2, width),), ((0, 6 - rank),)),
    )

    def flops(operands: Sequence[Any]) -> float:
        return 2.0 * operands[1].size * math.prod(operands[2].shape[1:])

    plain, fused = (
        functools.partial(way, is_turned=is_turned) for way in (product_in_tiles, fused_product)
    )
    return Kernel(_note(is_fused), plain, fused if is_fused else None, places, flops)


@functools.cache
def _gradient(rank: int, experts: int, is_fused: bool) -> Kernel:
    """Return the kernel of the gradient of so many experts' weights.

    Its operands are those of `routed`, of that rank, but the gradient of its result in place of the
    weights.
    """
    places = (
        (((0, 0), (1, 0), (2, 0)), ()),
        (((0, 1), (1, 1), (2, 1)), ()),
        (((0, rank - 1),), ((0, 1),)),
        (((2, 6 - rank),), ((0, 2),)),
    )

    def flops(operands: Sequence[Any]) -> float:
        return 2.0 * operands[1].size * operands[0].shape[-1] * operands[2].shape[-1]

    plain, fused = (functools.partial(way, experts) for way in (gradient_in_tiles, fused_gradient))
    return Kernel(_note(is_fused), plain, fused if is_fused else None, places, flops)


def _note(is_fused: bool) -> str:
    by = "kernels" if is_fused else "gathered tiles"
    return f"experts compute the tokens that are sent to them, and no others: by {by}"


class _Tiles(NamedTuple):
    """Tokens by expert. A *place* is one of a token at one of its experts, counted along `index`.

    Attributes:
        order: the places by expert, int32 [places].
        begins, ends: where each expert's begin and end there, int32 [experts].
        expert: of each tile, int32 [tiles].
        first, last: where a tile begins and ends in `order`; it has no rows if these are no more.
        rows: the most rows of a tile.
    """

    order: jax.Array
    begins: jax.Array
    ends: jax.Array
    expert: jax.Array
    first: jax.Array
    last: jax.Array
    rows: int


def _tiles(
    index: jax.Array, experts: int, reading: int, least: int = 1, most: int = 2**9
) -> _Tiles:
    """Return the tiles of tokens by expert, as many as any routing needs.

    Their rows r are few enough that experts' last tiles are seldom empty, and enough to read
    weights seldom: with n places, (n / r + experts) (r + reading) is least for
    r = sqrt(reading * n / experts).
    """
    index = index.reshape(-1)
    best = math.sqrt(reading * index.size / experts)
    rows = min(max(2 ** int(math.log2(max(best, 1))), least), most)
    ends = jnp.sum(index[:, None] <= jnp.arange(experts), axis=0, dtype=jnp.int32)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    count = (ends - begins + rows - 1) // rows
    until = jnp.cumsum(count)
    tile = jnp.arange(min(index.size, (index.size + experts * (rows - 1)) // rows))
    expert = jnp.minimum(jnp.sum(until <= tile[:, None], axis=1), experts - 1)
    first = begins[expert] + (tile - (until - count)[expert]) * rows
    last = jnp.minimum(first + rows, ends[expert])
    return _Tiles(jnp.argsort(index), begins, ends, expert, first, last, rows)


# ---- Gathered tiles.


def product_in_tiles(
    x: jax.Array, index: jax.Array, weights: jax.Array, is_turned: bool
) -> list[jax.Array]:
    """Return what the kernel of `_product` does, by gathered tiles."""
    tiles = _tiles(index, len(weights), _ROWS_OF_GATHERING)
    x_rows = _rows_of(x)
    source = _sources(tiles, index.size)
    read = source if x.ndim == 4 else source // index.shape[-1]
    dims = "tbm,tnm->tbn" if is_turned else "tbm,tmn->tbn"

    # One step would be no loop, and gather all layers' weights at the start.
    steps = max(2, -(-read.size // _STEP))
    each = -(-len(read) // steps)
    padding = (0, steps * each - len(read))
    expert, read = jnp.pad(tiles.expert, padding), jnp.pad(read, (padding, (0, 0)))

    def of_step(number: jax.Array, made: jax.Array) -> jax.Array:
        own = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=number * each, slice_size=each
        )
        rows = jnp.einsum(dims, x_rows.at[own(read)].get(mode="clip"), weights[own(expert)])
        return jax.lax.dynamic_update_slice_in_dim(made, rows, number * each, 0)

    width = weights.shape[1 if is_turned else 2]
    made = jax.lax.fori_loop(0, steps, of_step, _empty((*read.shape, width), x_rows, x.dtype))
    slot = jnp.zeros(index.size, jnp.int32)
    slot = slot.at[source.reshape(-1)].set(jnp.arange(source.size), mode="drop")
    return [_of_tokens(made.reshape(-1, width)[slot], x, index)]


def gradient_in_tiles(
    experts: int, x: jax.Array, index: jax.Array, slope: jax.Array
) -> list[jax.Array]:
    """Return what the kernel of `_gradient` does, by gathered tiles."""
    tiles = _tiles(index, experts, _ROWS_OF_GATHERING)
    source = _sources(tiles, index.size)

    def rows(a: jax.Array, source: jax.Array) -> jax.Array:
        at = source if a.ndim == 4 else source // index.shape[-1]
        return jnp.where((source < index.size)[:, None], _rows_of(a).at[at].get(mode="clip"), 0)

    is_first = tiles.first == tiles.begins[tiles.expert]

    def add(tile: jax.Array, sums: jax.Array) -> jax.Array:
        expert, own = tiles.expert[tile], source[tile]
        both = rows(x, own), rows(slope, own)
        more = jnp.einsum("bm,bn->mn", *both, preferred_element_type=jnp.float32)
        before = jax.lax.dynamic_index_in_dim(sums, expert, keepdims=False)
        now = jnp.where(is_first[tile], 0, before) + more
        return jax.lax.dynamic_update_index_in_dim(sums, now, expert, 0)

    shape = experts, x.shape[-1], slope.shape[-1]
    sums = jax.lax.fori_loop(0, len(source), add, _empty(shape, slope, jnp.float32))
    is_used = (tiles.ends > tiles.begins)[:, None, None]
    return [jnp.where(is_used, sums, 0).astype(x.dtype)]


def _empty(shape: tuple[int, ...], x: jax.Array, dtype: Any) -> jax.Array:
    """Return an array for a loop to fill, which is made when there is `x`.

    Zeros would be made for all layers at the start, and kept.
    """
    return jnp.full(shape, x.reshape(-1)[0], dtype)


def _rows_of(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _of_tokens(rows: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """Return the result of `routed` from products for each place, float [places, width]."""
    made = rows.reshape(*index.shape, -1)
    return made if x.ndim == 3 else jnp.sum(made, axis=2, dtype=jnp.float32).astype(x.dtype)


def _sources(tiles: _Tiles, places: int) -> jax.Array:
    """Return the place of each row of a tile, int32 [tiles, rows]; `places` beyond its last."""
    at = tiles.first[:, None] + jnp.arange(tiles.rows)
    place = tiles.order.at[at].get(mode="clip")
    return jnp.where(at < tiles.last[:, None], place, places)


# ---- Kernels. Each program of a grid computes a tile's part of some columns, or a block of an
# expert's gradient.


def _at(ref: Any, *index: Any) -> tuple[Any, jax.Array]:
    """Return the block of a matrix, or of one among several, at rows and columns, and its mask."""
    *one, row, column = index
    row, column = row[:, None], column[None]
    return ref.at[*one, row, column], (row < ref.shape[-2]) & (column < ref.shape[-1])


def _read(ref: Any, *index: Any) -> jax.Array:
    """Return the block of a matrix at rows and columns; 0 where there are none."""
    block, is_there = _at(ref, *index)
    return triton.load(block, mask=is_there, other=0)


def _places(order_ref: Any, first: jax.Array, last: jax.Array, rows: int) -> jax.Array:
    """Return the places of a tile's rows; a number beyond all places after the last row."""
    at = first + jnp.arange(rows)
    return triton.load(order_ref.at[at], mask=at < last, other=order_ref.shape[0])


def _dot(a: jax.Array, b: jax.Array, *over: int) -> jax.Array:
    """Return the product of two matrices in float32, over a dimension of each."""
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _product_kernel(*refs: Any, rows: int, each: int, is_turned: bool) -> None:
    x_ref, weights_ref, order_ref, expert_ref, first_ref, last_ref, out_ref = refs
    tile, column = pl.program_id(1), pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS)
    expert, first, last = (ref[tile] for ref in (expert_ref, first_ref, last_ref))
    place = _places(order_ref, first, last, rows)

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        depth = number * _DEPTH + jnp.arange(_DEPTH)
        x = _read(x_ref, place // each, depth)
        if is_turned:
            return total + _dot(x, _read(weights_ref, expert, column, depth), 1, 1)
        return total + _dot(x, _read(weights_ref, expert, depth, column), 1, 0)

    @pl.when(first < last)
    def _() -> None:
        zeros = jnp.zeros((rows, _COLUMNS), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(x_ref.shape[1], _DEPTH), add, zeros)
        block, is_there = _at(out_ref, place, column)
        triton.store(block, total.astype(out_ref.dtype), mask=is_there)


def _gradient_kernel(*refs: Any, rows: int, each: Sequence[int]) -> None:
    x_ref, slope_ref, order_ref, begins_ref, ends_ref, out_ref = refs
    row, column = (pl.program_id(d) * _COLUMNS + jnp.arange(_COLUMNS) for d in range(2))
    expert = pl.program_id(2)
    first, last = begins_ref[expert], ends_ref[expert]

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        place = _places(order_ref, first + number * rows, last, rows)
        x = _read(x_ref, place // each[0], row)
        return total + _dot(x, _read(slope_ref, place // each[1], column), 0, 0)

    zeros = jnp.zeros((_COLUMNS, _COLUMNS), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(last - first, rows), add, zeros)
    block, is_there = _at(out_ref, expert, row, column)
    triton.store(block, total.astype(out_ref.dtype), mask=is_there)


def _launched(
    kernel: Callable[..., None], grid: tuple[int, ...], shape: tuple[int, ...], *given: jax.Array
) -> jax.Array:
    """Return the result of a kernel, of the first operand's type."""
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape, given[0].dtype),
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
    )
    made: jax.Array = call(*given)
    return made


def fused_product(
    x: jax.Array, index: jax.Array, weights: jax.Array, is_turned: bool
) -> list[jax.Array]:
    """Return what the kernel of `_product` does, by a Pallas kernel."""
    tiles = _tiles(index, len(weights), _ROWS_OF_READING, _LEAST, _MOST)
    each = index.shape[-1] if x.ndim == 3 else 1
    width = weights.shape[1 if is_turned else 2]
    kernel = functools.partial(_product_kernel, rows=tiles.rows, each=each, is_turned=is_turned)
    grid = pl.cdiv(width, _COLUMNS), len(tiles.expert)
    table = tiles.order, tiles.expert, tiles.first, tiles.last
    made = _launched(kernel, grid, (index.size, width), _rows_of(x), weights, *table)
    return [_of_tokens(made, x, index)]


def fused_gradient(
    experts: int, x: jax.Array, index: jax.Array, slope: jax.Array
) -> list[jax.Array]:
    """Return what the kernel of `_gradient` does, by a Pallas kernel."""
    tiles = _tiles(index, experts, _ROWS_OF_READING, _LEAST, _MOST)
    each = [index.shape[-1] if a.ndim == 3 else 1 for a in (x, slope)]
    shape = experts, x.shape[-1], slope.shape[-1]
    kernel = functools.partial(_gradient_kernel, rows=tiles.rows, each=each)
    grid = *(pl.cdiv(size, _COLUMNS) for size in shape[1:]), experts
    table = tiles.order, tiles.begins, tiles.ends
    return [_launched(kernel, grid, shape, _rows_of(x), _rows_of(slope), *table)]
