"""Random numbers of a slice: those that one device draws for its rows of the batch.

The keys are the same in all slices, and so is what belongs to no example. Where a draw has rows of
the batch, a slice draws the numbers of its own rows, as `ir.threefry` can.

Where their places do not tell the numbers (another generator, a draw in a function with a rule of
derivatives), the key is folded with the slice's number: each slice draws its own numbers.

A typed key says what it is. A raw key (`jax.random.PRNGKey`, an array of `uint32`) is known by its
use: the loss makes a typed key of it, or of parts of it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from launcher.trace.ir.jaxpr import (
    Aval,
    Equation,
    Jaxpr,
    Var,
    bodies,
    called_instead,
    hide_from_source_lines,
    is_var,
    jaxpr_as_fun,
    sub_jaxprs,
    walk,
)
from launcher.trace.ir.primitive_kinds import (
    CALLS_WITH_RULES,
    DRAWN_BY_PLACE,
    DRAWS,
    RECOMPUTED,
    SAME_ELEMENTS,
)
from launcher.trace.ir.threefry import NAME, block_generator, drawn_words, tells_by_place

hide_from_source_lines(__file__)


def is_typed(aval: Aval) -> bool:
    """Return whether a value is a typed key, or an array of them."""
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def raw_generator(var: Var, equations: Iterable[Equation]) -> str | None:
    """Return the generator whose raw keys `equations` take `var` for, such as "threefry2x32".

    None if they do not; `var` is a raw key, or an array of them.
    """
    return _wrapped_as({var}, equations) if var.aval.dtype == jnp.uint32 else None


def may_be_raw_key(shape: Any) -> bool:
    """Return whether an array may be one raw key, by its shape and dtype."""
    return bool(shape.dtype == jnp.uint32) and shape.shape in ((2,), (4,))


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
            inner = zip(body.invars[::-1], used[::-1], strict=False)  # a branch has no index
            found = _wrapped_as({v for v, is_key in inner if is_key}, body.eqns)
            if found is not None:
                return found
    return None


def draws(equations: Iterable[Equation]) -> bool:
    """Return whether equations, or programs in them, draw numbers or make several keys of one."""
    return any(e.primitive.name in DRAWS | DRAWN_BY_PLACE for e in walk(equations))


def draws_rows(whole: Equation, part: Equation) -> bool:
    """Return whether an equation draws more on the whole batch than on a slice of it."""
    pairs = zip(walk([whole]), walk([part]), strict=False)
    drawn = (zip(a.outvars, b.outvars, strict=False) for a, b in pairs if draws([a]))
    return any(x.aval.shape != y.aval.shape for outs in drawn for x, y in outs)


def differs_from_one_device(eqn: Equation) -> bool:
    """Return whether an equation draws numbers that slices cannot draw as one device does."""
    inside = walk([eqn], lambda e: not _has_rule(e))
    return any(draws([e]) if _has_rule(e) else _by_slices(e) for e in inside)


def _has_rule(eqn: Equation) -> bool:
    return eqn.primitive.name in CALLS_WITH_RULES - RECOMPUTED


def _by_slices(eqn: Equation) -> bool:
    name = eqn.primitive.name
    return name in DRAWN_BY_PLACE and not tells_by_place(eqn.invars[0].aval)


def draw_rows(eqn: Equation, axis: int, rows: int, number: Var) -> Equation:
    """Return the equation by which a slice draws its rows.

    It is a single one, as on the whole batch: layers end after so many equations.

    Args:
        eqn: draws as many numbers, or keys, as a slice has, from keys that all slices share.
        axis: that of the rows, in the result.
        rows: those of the whole batch.
        number: the slice's.
    """
    key = eqn.invars[0]
    if _by_slices(eqn):
        return with_own_keys(eqn, [0], number)
    axis -= key.aval.ndim
    shape, width = eqn.params["shape"], eqn.params.get("bit_width")

    def draw(words: Any) -> Any:
        if width is None:  # keys
            made = jnp.stack(drawn_words(words, shape, axis, rows), -1)
            return jax.random.wrap_key_data(made, impl=NAME)
        placed = jax.random.wrap_key_data(words, impl=block_generator(axis, rows))
        return jax.random.bits(placed, shape, jnp.dtype(f"uint{width}"))

    def of_keys(key: Any, number: Any) -> Any:
        words = jax.random.key_data(key)
        block = jnp.broadcast_to(number, (*key.shape, 1))
        return _of_each(draw, key.ndim)(jnp.concatenate([words, block], -1))

    return called_instead(eqn, of_keys, [key, number])


def with_own_keys(eqn: Equation, shared: Container[int], number: Var) -> Equation:
    """Return an equation that folds its keys with the slice's number.

    Args:
        eqn: the equation.
        shared: the operands that all slices share.
        number: the slice's.
    """
    ins, outs = ([Var(v.aval) for v in vs] for vs in (eqn.invars, eqn.outvars))
    fun = jaxpr_as_fun(Jaxpr(ins, [eqn.replace(invars=ins, outvars=outs)], outs))
    generators = {i: key for i, key in key_operands(eqn).items() if i in shared}

    def with_folded(number: Any, *given: Any) -> Any:
        own = [
            _folded(x, number, generators[i]) if i in generators else x for i, x in enumerate(given)
        ]
        return fun(*own)

    return called_instead(eqn, with_folded, [number, *eqn.invars])


def key_operands(eqn: Equation) -> dict[int, str | None]:
    """Return which operands of an equation are keys, and the generator of those that are raw."""
    found: dict[int, str | None] = {i: None for i, v in enumerate(eqn.invars) if is_typed(v.aval)}
    for body in bodies(eqn):
        for k, atom in body.inputs:
            if generator := raw_generator(body.jaxpr.invars[k], body.jaxpr.eqns):
                found[eqn.invars.index(atom)] = generator
    return found


def _folded(key: Any, number: Any, generator: str | None) -> Any:
    typed = key if generator is None else jax.random.wrap_key_data(key, impl=generator)
    folded = _of_each(lambda k: jax.random.fold_in(k, number), typed.ndim)(typed)
    return folded if generator is None else jax.random.key_data(folded)


def _of_each(fun: Callable[[Any], Any], ndim: int) -> Callable[[Any], Any]:
    """Return a function of an array of keys that calls `fun` with each."""
    for _ in range(ndim):
        fun = jax.vmap(fun)
    return fun
