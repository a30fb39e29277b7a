"""Find the values that a program reads in fewer bits alone, and let it take them so.

A parameter that is kept sharded along data crosses in half the bytes if it is cast before it is
gathered, to the same values. It can be where all that reads it casts it, or moves its elements for
others that do, in loops and calls, too. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from launcher.partition.layout import Layout
from launcher.partition.task_programs import TaskProgram
from launcher.trace import (
    BARRIERS,
    CALLS_WITH_RULES,
    CONVERSIONS,
    MOVES,
    RECOMPUTED,
    Atom,
    Body,
    Equation,
    Jaxpr,
    Var,
    bodies,
    is_var,
    replace_bodies,
)


def narrow_reads(jaxpr: Jaxpr) -> dict[Var, str]:
    """Return the values that a program reads in a narrower floating type alone, with that type."""
    found: dict[Var, str | None] = dict.fromkeys(v for v in jaxpr.outvars if is_var(v))
    for eqn in reversed(jaxpr.eqns):
        for v, dtype in _reads(eqn, found):
            found[v] = dtype if found.get(v, dtype) == dtype else None
    return {v: dtype for v, dtype in found.items() if dtype}


def operand_types(program: TaskProgram) -> dict[int, str]:
    """Return the operands that a task program reads, with the types that it can take them in."""
    narrow = narrow_reads(program.closed)
    return {i: narrow.get(v, v.aval.dtype.name) for i, v in _operands(program).items()}


def gathered(program: TaskProgram, layout: Layout) -> dict[int, Var]:
    """Return the operands that a task program gathers along data, with its variables of them."""
    return {i: v for i, v in _operands(program).items() if layout.is_gathered(i)}


def gathering_less(program: TaskProgram, layout: Layout) -> TaskProgram:
    """Return the same task program, which takes what it gathers in the `operand_types`."""
    narrow, own = narrow_reads(program.closed), gathered(program, layout).values()
    closed = taking(program.closed, {v: narrow[v] for v in own if v in narrow})
    return dataclasses.replace(program, closed=closed)


def _operands(program: TaskProgram) -> dict[int, Var]:
    given = program.closed.invars[len(program.constants) :]
    named = zip(program.inputs, given, strict=True)
    return {name.of: v for name, v in named if name.kind == "operand"}


def _reads(eqn: Equation, found: Mapping[Var, str | None]) -> Iterator[tuple[Var, str | None]]:
    """Yield what an equation reads, with the narrower type in which it does.

    Args:
        eqn: the equation.
        found: the same of its results, for those that are read.
    """
    kept, moved = [v for v in eqn.invars if is_var(v)], _moved(eqn)
    for body in _bodies(eqn):
        inner, carried = narrow_reads(body.jaxpr), [v for _, v in body.outputs]
        reads = [(v, body.jaxpr.invars[i]) for i, v in body.inputs if is_var(v)]
        yield from ((v, None if v in carried else inner.get(own)) for v, own in reads)
        kept = [v for v in kept if v not in dict(reads)]
    if eqn.primitive.name in CONVERSIONS:
        yield from ((v, _narrowed(eqn)) for v in kept)
    else:
        yield from ((v, found[to]) for v, to in moved if is_var(v) and to in found)
        yield from ((v, None) for v in kept if v not in dict(moved))


def taking(jaxpr: Jaxpr, types: Mapping[Var, str]) -> Jaxpr:
    """Return the same program, which takes these inputs in the types of `narrow_reads`."""
    if not types:
        return jaxpr
    env = {v: _of_type(v, dtype) for v, dtype in types.items()}

    def named(atoms: Sequence[Any]) -> list[Any]:
        return [env.get(v, v) if is_var(v) else v for v in atoms]

    equations = []
    for eqn in jaxpr.eqns:
        pairs = [(v, to) for v, to in _moved(eqn) if is_var(v) and v in env]
        env.update((to, _of_type(to, env[v].aval.dtype)) for v, to in pairs)
        if any(v in env for v in eqn.invars if is_var(v)):
            narrow = iter([taking(body.jaxpr, _types(body, env)) for body in _bodies(eqn)])
            eqn = replace_bodies(eqn, functools.partial(next, narrow))
            eqn = eqn.replace(invars=named(eqn.invars), outvars=named(eqn.outvars))
        equations.append(eqn)
    return dataclasses.replace(jaxpr, invars=named(jaxpr.invars), eqns=equations)


def _types(body: Body, env: Mapping[Var, Var]) -> dict[Var, str]:
    """Return the types in which a body takes those of an equation's operands that are in `env`."""
    own = body.jaxpr.invars
    return {own[i]: env[v].aval.dtype.name for i, v in body.inputs if is_var(v) and v in env}


def _bodies(eqn: Equation) -> list[Body]:
    """Return the bodies of an equation that can be rewritten: no rule is for them as they are."""
    return [] if eqn.primitive.name in CALLS_WITH_RULES - RECOMPUTED else bodies(eqn)


def _moved(eqn: Equation) -> list[tuple[Atom, Var]]:
    """Return the operands whose elements an equation moves, each with a result that holds them."""
    if eqn.primitive.name in BARRIERS:
        return list(zip(eqn.invars, eqn.outvars, strict=True))
    return [(eqn.invars[0], v) for v in eqn.outvars] if eqn.primitive.name in MOVES else []


def _narrowed(eqn: Equation) -> str | None:
    """Return the type that a conversion is to, if it is a narrower one of floating numbers."""
    before, after = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (before, after))
    return after.name if floating and after.itemsize < before.itemsize else None


def _of_type(v: Var, dtype: Any) -> Var:
    aval: Any = v.aval
    return Var(aval.update(dtype=jnp.dtype(dtype)))
