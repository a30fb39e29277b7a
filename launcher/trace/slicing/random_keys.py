"""Random keys among the inputs of a loss: which they are, and a key of its own for each slice.

A typed key says what it is. A raw key (`jax.random.PRNGKey`, an array of `uint32`) is known by its
use: the loss makes a typed key of it, or of parts of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from launcher.trace.ir.jaxpr import Aval, Equation, Var, is_var, sub_jaxprs
from launcher.trace.ir.primitive_kinds import SAME_ELEMENTS


def is_typed(aval: Aval) -> bool:
    """Return whether a value is a typed key, or an array of them."""
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def raw_generator(var: Var, equations: Iterable[Equation]) -> str | None:
    """Return the generator whose raw keys `equations` take `var` for, such as "threefry2x32".

    None if they do not; `var` is a raw key, or an array of them.
    """
    return _wrapped_as({var}, equations) if var.aval.dtype == jnp.uint32 else None


def _wrapped_as(words: set[Var], equations: Iterable[Equation]) -> str | None:
    for eqn in equations:
        used = [is_var(v) and v in words for v in eqn.invars]
        if not any(used):
            continue
        if eqn.primitive.name == "random_wrap":
            return str(eqn.params["impl"].name)
        if eqn.primitive.name in SAME_ELEMENTS:
            words.update(eqn.outvars)
        for body in sub_jaxprs(eqn):
            inner = zip(
                reversed(body.invars), reversed(used), strict=False
            )  # a branch has no index
            found = _wrapped_as({v for v, is_key in inner if is_key}, body.eqns)
            if found is not None:
                return found
    return None


def fold_slices(key: Any, generator: str | None, num_slices: int) -> Any:
    """Return the keys of all slices along a new leading axis, each folded with its slice's number.

    Args:
        key: typed keys of any shape or, with the name of their `generator`, raw ones.
        generator: of raw keys, such as "threefry2x32"; None for typed ones.
        num_slices: how many slices.
    """
    typed = key if generator is None else jax.random.wrap_key_data(key, impl=generator)
    numbers = jnp.arange(num_slices)
    fold = jax.random.fold_in
    for _ in range(typed.ndim):
        fold = jax.vmap(fold, (0, None))
    folded = jax.vmap(fold, (None, 0))(typed, numbers)
    return folded if generator is None else jax.random.key_data(folded)
