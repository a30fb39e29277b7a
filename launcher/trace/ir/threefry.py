"""JAX's default generator, drawing some rows of a larger array.

Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) makes two
words of a key and a counter of 64 bits. With `jax_threefry_partitionable`, JAX counts the elements
of the array that is drawn, in row-major order. So any block of it can be drawn by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from launcher.trace.ir.jaxpr import (
    Aval,
    define_prng_impl,
    hide_from_source_lines,
    threefry2x32_p,
    threefry_prng_impl,
)

NAME = "threefry2x32"

hide_from_source_lines(__file__)


def tells_by_place(key: Aval) -> bool:
    """Return whether what is drawn from a typed key is a function of the key and of the place."""
    by_place: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return by_place and bool(key.dtype == _key_dtype())


@functools.cache
def _key_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=NAME)).dtype


@functools.cache
def block_generator(axis: int, rows: int) -> Any:
    """Return a generator that draws block `i` of an array, along `axis` of so many `rows`.

    Its keys have three words: the two of a key and `i`. They are made for one draw, and are not
    split.
    """

    def random_bits(words: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
        first, second = drawn_words(words, shape, axis, rows)
        dtype = jnp.dtype(f"uint{bit_width}")
        if bit_width == 64:
            return jax.lax.shift_left(first.astype(dtype), dtype.type(32)) | second.astype(dtype)
        return (first ^ second).astype(dtype)

    base = threefry_prng_impl
    return define_prng_impl(
        key_shape=(3,),
        seed=base.seed,
        split=base.split,
        fold_in=base.fold_in,
        random_bits=random_bits,
        name=f"{NAME}, blocks of {rows} along {axis}",
        tag=f"fry{rows}/{axis}",
    )


def drawn_words(words: Any, shape: Sequence[int], axis: int, rows: int) -> tuple[Any, Any]:
    """Return the two words drawn for each element of a block; see `block_generator`.

    Args:
        words: the two of the key, and the block's number.
        shape: the block's.
        axis: that of the blocks.
        rows: of all blocks along it.
    """
    high, low = places(words[2], shape, axis, rows)
    first, second = threefry2x32_p.bind(words[0], words[1], high, low)
    return first, second


def places(block: Any, shape: Sequence[int], axis: int, rows: int) -> tuple[Any, Any]:
    """Return the places of a block's elements, row by row, in the array of all blocks.

    They are numbers of 64 bits, given as their high and low words.
    """
    whole = [rows if d == axis else n for d, n in enumerate(shape)]
    is_long = math.prod(whole) > 2**32
    high = low = jnp.zeros(shape, jnp.uint32)
    for d, n in enumerate(shape):
        index = jnp.arange(n, dtype=jnp.uint32)
        if d == axis:
            index += block * jnp.uint32(n)
        more_high, more_low = _times(index, math.prod(whole[d + 1 :]), is_long)
        low += jax.lax.broadcast_in_dim(more_low, shape, [d])
        if is_long:
            carried = low < jax.lax.broadcast_in_dim(more_low, shape, [d])
            high += jax.lax.broadcast_in_dim(more_high, shape, [d]) + carried.astype(jnp.uint32)
    return high, low


def _times(x: Any, factor: int, is_long: bool) -> tuple[Any, Any]:
    """Return the product of words and a number, as its high and low words, by half words."""
    low = x * jnp.uint32(factor % 2**32)
    if not is_long:
        return jnp.zeros_like(low), low
    a, b = x >> 16, x & 0xFFFF
    c, d = (jnp.uint32(factor % 2**32 >> 16), jnp.uint32(factor & 0xFFFF))
    inner = a * d + (b * d >> 16)
    cross = b * c + (inner & 0xFFFF)
    return a * c + (inner >> 16) + (cross >> 16) + x * jnp.uint32(factor >> 32), low
