"""Programs that cut pieces from the tiles of an array, and join pieces into tiles (`reshard`).

They are compiled before the first step. A process that compiles in the middle of a step holds up
those that have begun to exchange arrays with it by collectives, and on GPUs may wait for their
devices for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from launcher.partition.sharding.reshard import Box, Piece

_MOST = 4096  # programs that are kept: microbatches and layers need the same few


def cutter(piece: Piece, dtype: Any, device: jax.Device) -> Callable[[jax.Array], jax.Array]:
    """Return a function that cuts a piece from its source tile, which lies on this device."""
    if piece.box == piece.src_box:
        return _as_it_is
    cut: Callable[[jax.Array], jax.Array]
    cut = _cut(_shape(piece.src_box), dtype, _inside(piece.box, piece.src_box), device)
    return cut


def joiner(
    pieces: Sequence[Piece], dtype: Any, device: jax.Device
) -> Callable[[list[jax.Array]], jax.Array]:
    """Return a function that joins the pieces of one destination tile on this device.

    A single piece is returned as it is.
    """
    tile = pieces[0].dst_box
    if len(pieces) == 1:
        return _only
    join = _join(_shape(tile), dtype, tuple(_inside(p.box, tile) for p in pieces), device)
    return lambda parts: join([jax.device_put(part, device) for part in parts])


def _as_it_is(tile: jax.Array) -> jax.Array:
    return tile


def _only(parts: list[jax.Array]) -> jax.Array:
    return parts[0]


@functools.lru_cache(_MOST)
def _cut(shape: tuple[int, ...], dtype: Any, inner: Box, device: jax.Device) -> Any:
    where = SingleDeviceSharding(device)
    like = jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    cut = jax.jit(lambda tile: tile[tuple(slice(*edge) for edge in inner)], out_shardings=where)
    return cut.lower(like).compile()


@functools.lru_cache(_MOST)
def _join(shape: tuple[int, ...], dtype: Any, inner: tuple[Box, ...], device: jax.Device) -> Any:
    where = SingleDeviceSharding(device)

    def join(parts: list[jax.Array]) -> jax.Array:
        tile = jnp.zeros(shape, dtype)
        for box, part in zip(inner, parts, strict=True):
            tile = jax.lax.dynamic_update_slice(tile, part, [start for start, _ in box])
        return tile

    like = [jax.ShapeDtypeStruct(_shape(box), dtype, sharding=where) for box in inner]
    return jax.jit(join, out_shardings=where).lower(like).compile()


def _inside(box: Box, of: Box) -> Box:
    """Return where a box lies in a larger one."""
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, of, strict=True))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
