"""Jaxprs: JAX's classes for programs, with types, and small pure functions over them.

A program is a list of equations with unique definitions; these functions trace one, flatten calls,
keep what is needed, and answer who depends on whom. `jax.extend` is imported here and nowhere else,
so that a release of JAX that moves a name touches one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from launcher.trace.primitive_kinds import CALLS

Primitive = jex.Primitive


class Aval(Protocol):
    """The type of an array: `jax.core.ShapedArray`, `jax.ShapeDtypeStruct`, or an array's own."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def size(self) -> int: ...
    @property
    def ndim(self) -> int: ...


if TYPE_CHECKING:
    from typing_extensions import TypeIs

    # What we use of JAX's own classes, whose annotations give a variable's type no shape and no
    # dtype. They are classes rather than protocols: a literal has all that a variable has.

    class Var:
        aval: Aval

        def __init__(self, aval: Aval) -> None: ...

    class DropVar(Var): ...

    class Literal:
        aval: Aval
        val: Any

    class Equation:
        primitive: Primitive
        invars: list[Var | Literal]
        outvars: list[Var]
        params: dict[str, Any]
        effects: Set[Any]
        source_info: Any

        def replace(self, **changes: Any) -> Equation: ...

    class Jaxpr:
        constvars: list[Var]
        invars: list[Var]
        outvars: list[Var | Literal]
        eqns: list[Equation]
        effects: Set[Any]

        def __init__(
            self,
            constvars: Sequence[Var],
            invars: Sequence[Var],
            outvars: Sequence[Var | Literal],
            eqns: Sequence[Equation],
            effects: Set[Any],
            debug_info: Any,
        ) -> None: ...
        def replace(self, **changes: Any) -> Jaxpr: ...
        def pretty_print(self, *, use_color: bool) -> str: ...

    class ClosedJaxpr:
        jaxpr: Jaxpr
        consts: list[Any]
        eqns: list[Equation]
        out_avals: list[Aval]

        def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None: ...

else:
    Var, DropVar, Literal = jex.Var, jex.DropVar, jex.Literal
    Equation, Jaxpr, ClosedJaxpr = jex.JaxprEqn, jex.Jaxpr, jex.ClosedJaxpr

Atom: TypeAlias = "Var | Literal"

_UNNAMED = jex.DebugInfo("launcher", "<part>", None, None)  # programs that no single function wrote


def make_jaxpr(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Trace `fun(*args)`; `args` may be shapes."""
    return cast(ClosedJaxpr, jax.make_jaxpr(fun)(*args))


def make_jaxpr_and_shape(fun: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """Trace `fun(*args)`; returns its program and the shapes of its result."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return cast(ClosedJaxpr, closed), shape


def jaxpr_as_fun(closed: ClosedJaxpr) -> Callable[..., Any]:
    """Return the function that evaluates a program and returns a list."""
    return cast(Callable[..., Any], jex.jaxpr_as_fun(cast(Any, closed)))


def hide_from_source_lines(file: str) -> None:
    """Take an equation's source line from the caller of a file's functions, not from the file."""
    source_info_util.register_exclusion(file)


hide_from_source_lines(__file__)


def is_var(atom: Atom) -> TypeIs[Var]:
    """Return whether an atom is a named value; else it is a literal."""
    return not isinstance(atom, Literal)


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same program with each plain call (`jit`) replaced by its body, under fresh names.

    An equation of a body is in the named scopes of its call. Where no line of the user's is known
    for it, it gets that of its call.
    """
    equations: list[Equation] = []
    constants: dict[Var, Any] = {}

    def walk(jaxpr: Jaxpr, env: dict[Var, Atom], call: Equation | None) -> list[Atom]:
        def read(atom: Atom) -> Atom:
            return env[atom] if is_var(atom) else atom

        for eqn in jaxpr.eqns:
            if call is not None:
                own, outer = eqn.source_info, call.source_info
                own = own if source_line(eqn) else outer.replace(name_stack=own.name_stack)
                stack = outer.name_stack + own.name_stack
                eqn = eqn.replace(source_info=own.replace(name_stack=stack))
            operands = [read(v) for v in eqn.invars]
            results: list[Any]
            body = eqn.params.get("jaxpr") if eqn.primitive.name in CALLS else None
            if body is None:
                results = [v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=operands, outvars=results))
            else:
                inner: dict[Var, Atom] = dict(zip(body.jaxpr.invars, operands, strict=True))
                for v, value in zip(body.jaxpr.constvars, body.consts, strict=True):
                    inner[v] = name = Var(v.aval)
                    constants[name] = value
                results = walk(body.jaxpr, inner, eqn)
            env.update(
                (v, r)
                for v, r in zip(eqn.outvars, results, strict=True)
                if not isinstance(v, DropVar)
            )
        return [read(v) for v in jaxpr.outvars]

    top = closed.jaxpr
    env: dict[Var, Atom] = {v: v for v in (*top.constvars, *top.invars)}
    constants.update(zip(top.constvars, closed.consts, strict=True))
    outs = walk(top, env, None)
    jaxpr = Jaxpr(list(constants), top.invars, outs, equations, top.effects, _UNNAMED)
    return ClosedJaxpr(jaxpr, list(constants.values()))


def lift_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same program with its captured constants as leading inputs."""
    jaxpr = closed.jaxpr
    return program([*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns, jaxpr.outvars)


def needed(equations: Sequence[Equation], outs: Iterable[Atom]) -> list[Equation]:
    """Return the equations that `outs` depend on, in their order."""
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
    """Return the variables that the equations and `outs` read and none defines, by first use."""
    defined: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in equations:
        free.update((v, None) for v in eqn.invars if is_var(v) and v not in defined)
        defined.update(eqn.outvars)
    free.update((v, None) for v in outs if is_var(v) and v not in defined)
    return list(free)


def program(
    invars: Sequence[Var], equations: Sequence[Equation], outs: Sequence[Atom]
) -> ClosedJaxpr:
    """A closed program of these parts; it captures nothing."""
    effects = frozenset().union(*(e.effects for e in equations)) if equations else frozenset()
    jaxpr = Jaxpr((), list(invars), list(outs), list(equations), effects, _UNNAMED)
    return ClosedJaxpr(jaxpr, ())


def sub_jaxprs(eqn: Equation) -> Iterator[Jaxpr]:
    """Return the programs inside an equation's parameters (loop bodies, branches, calls)."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def captured(equations: Iterable[Equation]) -> Iterator[Any]:
    """Yield what equations hold that their text does not tell: arrays, and rules of derivatives.

    Two equations with the same rule hold the same object; one that is called for each of two
    equations may do another thing for each, such as scale gradients by a number of its own.
    """
    for eqn in equations:
        yield from (eqn.params[name] for name in ("bwd", "jvp_jaxpr_fun") if name in eqn.params)
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr)
        ):
            if isinstance(value, ClosedJaxpr):
                yield from value.consts
        for jaxpr in sub_jaxprs(eqn):
            yield from captured(jaxpr.eqns)


def source_line(eqn: Equation) -> str:
    """Where the user wrote this equation: `file:line:column (function)`."""
    return source_info_util.summarize(eqn.source_info)


def nbytes(aval: Aval) -> int:
    """Bytes of one value of this shape and dtype; a random key counts its words."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return int(aval.size) * 8
    return int(aval.size) * int(aval.dtype.itemsize)


def splice(fun: Callable[..., Any], operands: Sequence[Atom]) -> tuple[list[Equation], list[Atom]]:
    """Trace `fun` on values like `operands` and name its inputs so: its equations and results."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    closed = inline_calls(make_jaxpr(fun, *avals))
    rename: dict[Any, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))

    def read(atom: Atom) -> Atom:
        return rename.get(atom, atom) if is_var(atom) else atom

    equations = [e.replace(invars=[read(v) for v in e.invars]) for e in closed.jaxpr.eqns]
    return equations, [read(v) for v in closed.jaxpr.outvars]
