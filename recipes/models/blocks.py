"""Equal blocks in a row, each a pipeline layer, traced once for all of them.

A model has dozens of blocks that differ in nothing but their parameters, and tracing one takes as
long as all of its Python. JAX keeps the program of a jitted function, so that a loss of 96 blocks
is traced in about the time of one, as a scan over stacked parameters is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.trace import mark_pipeline_boundary


def dtype_of(precision: str) -> Any:
    """Return the type of activations and products, "fp32" or "bf16"."""
    return jnp.bfloat16 if precision == "bf16" else jnp.float32


def blocks_in_a_row(
    parent: nn.Module,
    make: Callable[..., nn.Module],
    count: int,
    x: jax.Array,
    *arrays: Any,
    call: Callable[..., Any] = lambda module, *given: module(*given),
    draws: bool = False,
    scanned: bool = False,
) -> Any:
    """Apply `count` blocks, the submodules `layers_0` … of `parent`, with a mark between any two.

    Scanned, they are one submodule `layers`, whose parameters have an axis of blocks in front.

    Args:
        parent: the module in whose compact method this is called.
        make: returns a block, given `name` or `parent`.
        count: the number of blocks.
        x: what the first block is given; each other one is given the result of that before.
        arrays: what each of them is given besides, pytrees of arrays.
        call: called with a block, its input and `arrays`; returns its result. By default it is
            called as it is.
        draws: whether blocks draw random numbers, which each draws of its own.
        scanned: whether the blocks are one `nn.scan`.
    """
    if scanned:
        scan = nn.scan(
            lambda module, x: (call(module, x, *arrays), None),
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True, "dropout": True},
            length=count,
        )
        return scan(make(name="layers"), x)[0]
    begins = parent.is_initializing()
    begin, apply = jax.jit(_first_function(make, call)), jax.jit(_function(make, call))
    # While intermediate values or a cache are written, each block is itself.
    writes = any(map(parent.is_mutable_collection, ("intermediates", "cache")))
    shared = begins or not (draws or writes)
    for index in range(count):
        if index > 0:
            mark_pipeline_boundary()
        name = f"layers_{index}"
        if not shared:
            x = call(make(name=name), x, *arrays)
            continue
        with jax.named_scope(name):
            if begins:
                x, made = begin(parent.make_rng("params"), x, *arrays)
                parent.param(name, lambda key, made=made: made)
            else:
                x = apply(parent.variables["params"][name], x, *arrays)
    return x


def _function(make: Callable[..., nn.Module], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block as a function of its parameters, its input and the other arrays."""

    def block(params: Any, *given: Any) -> Any:
        return nn.apply(call, make(parent=None))({"params": params}, *given)

    return block


def _first_function(
    make: Callable[..., nn.Module], call: Callable[..., Any]
) -> Callable[..., tuple[Any, Any]]:
    """Return a function of a random key and a block's input: its result, and its parameters."""

    def block(key: jax.Array, *given: Any) -> tuple[Any, Any]:
        out, made = nn.init_with_output(call, make(parent=None))({"params": key}, *given)
        return out, made["params"]

    return block
