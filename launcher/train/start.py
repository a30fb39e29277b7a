"""A first state with a stored model, and a model with averages in the place of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from launcher import checkpoint
from launcher.arrays.stacked_array import sharding_of, with_rows, with_stacks
from launcher.checkpoint.adapters import ADAPTERS, without_adapters
from launcher.checkpoint.train_state import TrainState


def stored_part(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a model a checkpoint to start from holds: all but new adapters."""
    return {**model, "params": without_adapters(model["params"])}


def with_stored_model(state: TrainState, placed: TrainState, path: Path) -> TrainState:
    """Return a first state with a stored model, whose average begins there, too.

    Args:
        state: a first state; the memory of what is replaced is freed first.
        placed: its shapes with their shardings.
        path: a checkpoint, or files as `checkpoint.restore_model` reads them.
    """
    adapters = {}
    if without_adapters(state.params) is not state.params:
        adapters = {ADAPTERS: state.params[ADAPTERS]}
    nothing: dict[str, Any] = dict.fromkeys((*placed.model, "ema"))
    state = replace(state, **nothing)
    state = replace(state, **checkpoint.restore_model(path, stored_part(placed.model)))
    if adapters:
        state = replace(state, params={**state.params, **adapters})
    if placed.ema is None:
        return state
    learning = jax.tree.map(
        lambda average, param: None if average is None else param,
        *(placed.ema, state.params),
        is_leaf=lambda leaf: leaf is None,
    )
    return replace(state, ema=_placed_as(learning, placed.ema))


def averaged_model(state: TrainState, placed: TrainState) -> dict[str, Any]:
    """Return the model with the averages of its parameters, placed as the parameters are."""
    if state.ema is None:
        return state.model
    return {**state.model, "params": _placed_as(state.averaged["params"], placed.params)}


def _placed_as(tree: Any, like: Any) -> Any:
    """Return copies of a tree's arrays, sharded over their devices as those of `like` are."""

    def move(leaf: Any, one: Any) -> Any:
        where = sharding_of(one)
        if where is None or not where.addressable_devices:  # no part of it is here
            return leaf
        return jax.jit(lambda x: x.copy(), out_shardings=where)(leaf)

    return with_stacks(jax.tree.map(move, with_rows(tree), with_rows(like)), like)
