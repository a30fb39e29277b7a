"""Small pure functions over jaxprs that tracing, planning and running share.

A program is a list of equations with unique definitions; these functions flatten calls, keep what
is needed, and answer who depends on whom. Imports nothing of ours but the errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from jax.extend import core as jex
from jax.extend.source_info_util import summarize

if TYPE_CHECKING:  # JAX's own annotations give a variable's type no shape and no dtype
    Var: TypeAlias = Any
    Equation: TypeAlias = Any
else:
    Var = jex.Var
    Equation = jex.JaxprEqn
Atom: TypeAlias = Any  # Var | Literal

_UNNAMED = jex.DebugInfo("launcher", "<part>", None, None)  # programs that no single function wrote
_CALLS = ("jit", "pjit", "closed_call", "core_call")


def is_var(atom: Atom) -> bool:
    """Whether an atom is a named value; else it is a literal."""
    return not isinstance(atom, jex.Literal)


def inline_calls(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program with every plain call (`jit`) replaced by its body, under fresh names.

    An equation of a body that no line of the user's is known for gets that of its call.
    """
    equations: list[Equation] = []
    constants: dict[Var, Any] = {}

    def walk(jaxpr: jex.Jaxpr, env: dict[Var, Atom], call: Equation | None) -> list[Atom]:
        def read(atom: Atom) -> Atom:
            return env[atom] if is_var(atom) else atom

        for eqn in jaxpr.eqns:
            if call is not None and not source_line(eqn):
                eqn = eqn.replace(source_info=call.source_info)
            operands = [read(v) for v in eqn.invars]
            body = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
            if body is None:
                results = [v if isinstance(v, jex.DropVar) else Var(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=operands, outvars=results))
            else:
                inner: dict[Var, Atom] = dict(zip(body.jaxpr.invars, operands, strict=True))
                for v, value in zip(body.jaxpr.constvars, body.consts, strict=True):
                    inner[v] = Var(v.aval)
                    constants[inner[v]] = value
                results = walk(body.jaxpr, inner, eqn)
            env.update(
                (v, r)
                for v, r in zip(eqn.outvars, results, strict=True)
                if not isinstance(v, jex.DropVar)
            )
        return [read(v) for v in jaxpr.outvars]

    top = closed.jaxpr
    env = {v: v for v in (*top.constvars, *top.invars)}
    constants.update(zip(top.constvars, closed.consts, strict=True))
    outs = walk(top, env, None)
    jaxpr = jex.Jaxpr(list(constants), top.invars, outs, equations, top.effects, _UNNAMED)
    return jex.ClosedJaxpr(jaxpr, list(constants.values()))


def lift_constants(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program with its captured constants as leading inputs."""
    jaxpr = closed.jaxpr
    return program([*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns, jaxpr.outvars)


def needed(equations: Sequence[Equation], outs: Iterable[Atom]) -> list[Equation]:
    """The equations that `outs` depend on, in their order."""
    wanted = {v for v in outs if is_var(v)}
    kept: list[Equation] = []
    for eqn in reversed(equations):
        if any(v in wanted for v in eqn.outvars):
            wanted.update(v for v in eqn.invars if is_var(v))
            kept.append(eqn)
    return kept[::-1]


def dependents(equations: Iterable[Equation], sources: Iterable[Var]) -> set[Var]:
    """Every variable that depends on one of `sources`, and the sources themselves."""
    reached = set(sources)
    for eqn in equations:
        if any(is_var(v) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return reached


def free_vars(equations: Iterable[Equation], outs: Iterable[Atom] = ()) -> list[Var]:
    """The variables that the equations and `outs` read and none defines, in order of first use."""
    defined: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in equations:
        free.update((v, None) for v in eqn.invars if is_var(v) and v not in defined)
        defined.update(eqn.outvars)
    free.update((v, None) for v in outs if is_var(v) and v not in defined)
    return list(free)


def program(
    invars: Sequence[Var], equations: Sequence[Equation], outs: Sequence[Atom]
) -> jex.ClosedJaxpr:
    """A closed program of these parts; it captures nothing."""
    effects = frozenset().union(*(e.effects for e in equations)) if equations else frozenset()
    jaxpr = jex.Jaxpr((), list(invars), list(outs), list(equations), effects, _UNNAMED)
    return jex.ClosedJaxpr(jaxpr, ())


def sub_jaxprs(eqn: Equation) -> Iterator[jex.Jaxpr]:
    """The programs inside an equation's parameters (loop bodies, branches, calls)."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex.Jaxpr):
                yield item


def source_line(eqn: Equation) -> str:
    """Where the user wrote this equation: `file:line:column (function)`."""
    return summarize(eqn.source_info)


def nbytes(aval: Any) -> int:
    """Bytes of one value of this shape and dtype; a random key counts its words."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return int(aval.size) * 8
    return int(aval.size) * int(aval.dtype.itemsize)


_NOISE = re.compile(r"0x[0-9a-f]+|Var\(id=\d+\)")


def structure_text(jaxpr: jex.Jaxpr, extra: Mapping[str, Any] | None = None) -> str:
    """The program as text, the same in every process: no addresses, no source lines."""
    text = jaxpr.pretty_print(use_color=False)  # plain str() is coloured on a terminal
    return _NOISE.sub("", f"{text}{sorted((extra or {}).items())}")
