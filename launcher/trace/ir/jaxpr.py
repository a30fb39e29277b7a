"""The one reader of JAX's programs: `Jaxpr`, the same form whatever JAX's version.

JAX changes the form of its jaxprs between minor versions: what is closed over constants, where a
loop keeps its counts, which operations hide their program. `make_jaxpr` reads them into `Jaxpr`,
and `jaxpr_as_fun` runs one; no other module imports `jax.extend` or knows JAX's own form. The other
functions flatten calls, keep what is needed, and answer who depends on whom. `bodies` maps the
inputs and outputs of the programs inside an equation to its operands and results; `sub_jaxprs`
finds the programs of any equation, even of an unknown primitive; `structure_text` is a program as
text, the same in every process, of which fingerprints and likenesses are made.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend import random as jex_random
from jax.extend import source_info_util

from launcher.trace.ir.primitive_kinds import CALLS, CALLS_WITH_RULES

Primitive = jex.Primitive
define_prng_impl = jex_random.define_prng_impl
threefry2x32_p: Any = jex_random.threefry2x32_p
threefry_prng_impl: Any = jex_random.threefry_prng_impl


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

    # JAX's own annotations give a variable's type no shape and no dtype. These are classes rather
    # than protocols, since a literal has all that a variable has.

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

else:
    Var, DropVar, Literal, Equation = jex.Var, jex.DropVar, jex.Literal, jex.JaxprEqn

Atom: TypeAlias = "Var | Literal"

_RULES = "bwd", "jvp_jaxpr_fun", "transpose_thunk"  # parameters: rules of derivatives
_HIDING = "call_hi_primitive"
_UNNAMED = jex.DebugInfo("launcher", "<part>", None, None)  # programs that no single function wrote


@dataclass(frozen=True, eq=False, repr=False)
class Jaxpr:
    """A program; what JAX calls a jaxpr.

    Attributes:
        invars, eqns, outvars: its inputs, its equations in order, its results.
        constvars, consts: the variables of the arrays that it captures, and these arrays.
    """

    invars: Sequence[Var]
    eqns: Sequence[Equation]
    outvars: Sequence[Atom]
    constvars: Sequence[Var] = ()
    consts: Sequence[Any] = ()

    @property
    def out_avals(self) -> list[Aval]:
        """The types of the results."""
        return [v.aval for v in self.outvars]

    @functools.cached_property
    def written(self) -> Any:
        """The program as JAX's own jaxpr, closed over the captured arrays."""
        effects = frozenset().union(*(eqn.effects for eqn in self.eqns))
        parts = map(list, (self.constvars, self.invars, self.outvars, self.eqns))
        new: Any = jex.Jaxpr  # whose annotations are not those above
        return jex.ClosedJaxpr(new(*parts, effects, _UNNAMED), list(self.consts))

    def __str__(self) -> str:
        return str(self.written)


def is_jaxpr(value: Any) -> bool:
    """Return whether a parameter of an equation is a program."""
    return isinstance(value, (Jaxpr, jex.Jaxpr, jex.ClosedJaxpr))


def read_jaxpr(value: Any) -> Jaxpr:
    """Return a program of JAX's, such as a parameter of an equation, as a `Jaxpr`."""
    if isinstance(value, Jaxpr):
        return value
    inner = getattr(value, "jaxpr", value)  # before JAX 0.11, a closed one holds an open one
    consts = getattr(value, "consts", ())
    return Jaxpr(inner.invars, inner.eqns, inner.outvars, inner.constvars, consts)


def rewritten_as(old: Any, new: Jaxpr) -> Any:
    """Return a rewritten program in the form of the parameter that it replaces.

    It captures the same arrays.
    """
    if isinstance(old, Jaxpr):
        return new
    parts = {"invars": list(new.invars), "outvars": list(new.outvars), "eqns": list(new.eqns)}
    inner = old if isinstance(old, jex.Jaxpr) else old.jaxpr  # since JAX 0.11 all are
    if len(inner.invars) != len(new.invars):
        parts["debug_info"] = _UNNAMED
    return inner.replace(**parts) if inner is old else old.replace(jaxpr=inner.replace(**parts))


def rewritten_params(eqn: Equation, rewrite: Callable[[Jaxpr], Jaxpr]) -> dict[str, Any]:
    """Return an equation's parameters with the programs in them rewritten."""
    return {key: _rewritten(value, rewrite) for key, value in eqn.params.items()}


def _rewritten(value: Any, rewrite: Callable[[Jaxpr], Jaxpr]) -> Any:
    """Return a parameter of an equation with the programs in it rewritten."""
    if type(value) is tuple:  # not a named one of numbers
        return tuple(_rewritten(each, rewrite) for each in value)
    return rewritten_as(value, rewrite(read_jaxpr(value))) if is_jaxpr(value) else value


def make_jaxpr(fun: Callable[..., Any], *args: Any) -> Jaxpr:
    """Trace `fun(*args)`; `args` may be shapes."""
    return make_jaxpr_and_shape(fun, *args)[0]


def make_jaxpr_and_shape(fun: Callable[..., Any], *args: Any) -> tuple[Jaxpr, Any]:
    """Trace `fun(*args)`; returns its program and the shapes of its result."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    jaxpr = read_jaxpr(closed)
    return _shown(jaxpr) if _hides(jaxpr) else jaxpr, shape


def jaxpr_as_fun(jaxpr: Jaxpr) -> Callable[..., Any]:
    """Return the function that evaluates a program and returns a list."""
    return cast(Callable[..., Any], jex.jaxpr_as_fun(jaxpr.written))


def _hides(jaxpr: Jaxpr) -> bool:
    """Return whether an operation in a program hides what it computes, and can say it.

    Since JAX 0.12 `searchsorted`, `nonzero`, `ldexp` and functions built on them do.
    """
    return any(
        "jvp" in vars(type(eqn.params["_prim"]))
        if eqn.primitive.name == _HIDING
        else any(map(_hides, sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _shown(jaxpr: Jaxpr) -> Jaxpr:
    """Replace what hides its program by a call of it, which has the same derivative rule."""

    def instead(eqn: Equation) -> Equation:
        if not _hides(Jaxpr((), [eqn], ())):
            return eqn
        if eqn.primitive.name != _HIDING:
            return eqn.replace(params=rewritten_params(eqn, _shown))
        hidden = eqn.params["_prim"]

        def fun(*flat: Any) -> list[Any]:
            return jax.tree.leaves(hidden.expand(*jax.tree.unflatten(hidden.in_tree, flat)))

        if any(has_tangent(v.aval) for v in eqn.outvars):
            fun = jax.custom_jvp(fun)
            bind = functools.partial(eqn.primitive.bind, **eqn.params)
            fun.defjvp(functools.partial(jax.jvp, bind))
        return called_instead(eqn, fun, eqn.invars)

    return dataclasses.replace(jaxpr, eqns=list(map(instead, jaxpr.eqns)))


def called_instead(eqn: Equation, fun: Callable[..., Any], operands: Sequence[Atom]) -> Equation:
    """Return an equation with the results of `eqn` that calls `fun(*operands)`."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    (call,) = make_jaxpr(jax.jit(fun), *avals).eqns
    instead = {"primitive": call.primitive, "params": call.params, "effects": call.effects}
    return eqn.replace(invars=list(operands), **instead)


def hide_from_source_lines(file: str) -> None:
    """Take an equation's source line from the caller of a file's functions, not from the file."""
    source_info_util.register_exclusion(file)


hide_from_source_lines(__file__)


def is_var(atom: Atom) -> TypeIs[Var]:
    """Return whether an atom is a named value; else it is a literal."""
    return not isinstance(atom, Literal)


def inline_calls(jaxpr: Jaxpr) -> Jaxpr:
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
            called = None
            if eqn.primitive.name in CALLS:
                called = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if called is None:
                results = [v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=operands, outvars=results))
            else:
                body = read_jaxpr(called)
                inner: dict[Var, Atom] = dict(zip(body.invars, operands, strict=True))
                for v, value in zip(body.constvars, body.consts, strict=True):
                    inner[v] = name = Var(v.aval)
                    constants[name] = value
                results = walk(body, inner, eqn)
            env.update(
                (v, r)
                for v, r in zip(eqn.outvars, results, strict=True)
                if not isinstance(v, DropVar)
            )
        return [read(v) for v in jaxpr.outvars]

    env: dict[Var, Atom] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    constants.update(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    outs = walk(jaxpr, env, None)
    return Jaxpr(jaxpr.invars, equations, outs, list(constants), list(constants.values()))


def lift_constants(jaxpr: Jaxpr) -> Jaxpr:
    """Return the same program with its captured constants as leading inputs."""
    return Jaxpr([*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns, jaxpr.outvars)


def needed(
    equations: Sequence[Equation], outs: Iterable[Atom], given: Container[Var] = ()
) -> list[Equation]:
    """Return the equations that `outs` depend on, in their order, but for those of `given`."""
    wanted = {v for v in outs if is_var(v)}
    kept: list[Equation] = []
    for eqn in reversed(equations):
        if any(v in wanted and v not in given for v in eqn.outvars):
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


def sub_jaxprs(eqn: Equation) -> Iterator[Jaxpr]:
    """Return the programs inside an equation's parameters (loop bodies, branches, calls)."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item):
                yield read_jaxpr(item)


def walk(
    equations: Iterable[Equation], into: Callable[[Equation], bool] = lambda _: True
) -> Iterator[Equation]:
    """Yield equations, each behind those of the programs inside it; `into`: whether to enter it."""
    for eqn in equations:
        if into(eqn):
            for jaxpr in sub_jaxprs(eqn):
                yield from walk(jaxpr.eqns, into)
        yield eqn


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """Return how many constants and how many carried values a scan has; what it scans follows."""
    if "ft_in" in eqn.params:  # since JAX 0.11
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def while_counts(eqn: Equation) -> tuple[int, int]:
    """Return how many constants a loop's test has, and how many its body; the state follows."""
    return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


def is_checkpoint(eqn: Equation) -> bool:
    """Return whether an equation is a `jax.checkpoint` of the user's, or its backward pass."""
    return "prevent_cse" in eqn.params


def checkpoint_policy(eqn: Equation) -> Callable[..., Any]:
    """Return what a `jax.checkpoint` keeps of its results, by its policy."""
    policy: Callable[..., Any] | None = eqn.params["policy"]
    return policy or jax.checkpoint_policies.nothing_saveable


def runs_again(eqn: Equation) -> bool:
    """Return whether a `jax.checkpoint` is a backward pass that must not share its forward pass."""
    return bool(eqn.params["differentiated"] and eqn.params["prevent_cse"])


def captured(equations: Iterable[Equation]) -> Iterator[Any]:
    """Yield what equations hold that no text tells: arrays, and rules of derivatives.

    Two equations with the same rule hold the same object; one that is called for each of two
    equations may do another thing for each, such as scale gradients by a number of its own.
    """
    for eqn in walk(equations):
        yield from (eqn.params[name] for name in _RULES if name in eqn.params)
        for jaxpr in sub_jaxprs(eqn):
            yield from jaxpr.consts


def has_tangent(aval: Aval) -> bool:
    """Return whether values of this type have derivatives: floating or complex numbers."""
    return bool(jex.primal_dtype_to_tangent_dtype(aval.dtype) != jax.dtypes.float0)


def source_line(eqn: Equation) -> str:
    """Where the user wrote this equation: `file:line:column (function)`."""
    return source_info_util.summarize(eqn.source_info)


def nbytes(aval: Aval) -> int:
    """Bytes of one value of this shape and dtype; a random key counts its words."""
    return int(aval.size) * int(aval.dtype.itemsize)


def renamed(equations: Iterable[Equation], env: dict[Var, Atom]) -> list[Equation]:
    """Return a copy of equations by the names of `env`, to which fresh ones are added."""
    copies = []
    for eqn in equations:
        env.update(
            (v, v if isinstance(v, DropVar) else Var(v.aval)) for v in eqn.outvars if v not in env
        )
        invars = [env[v] if is_var(v) else v for v in eqn.invars]
        copies.append(eqn.replace(invars=invars, outvars=[env[v] for v in eqn.outvars]))
    return copies


def splice(fun: Callable[..., Any], operands: Sequence[Atom]) -> tuple[list[Equation], list[Atom]]:
    """Trace `fun` on values like `operands` and name its inputs so: its equations and results."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    made = inline_calls(make_jaxpr(fun, *avals))
    env: dict[Var, Atom] = dict(zip(made.invars, operands, strict=True))
    env |= {v: v for v in made.constvars}
    equations = renamed(made.eqns, env)
    return equations, [env[v] if is_var(v) else v for v in made.outvars]


_SCAN_COUNTS = ("num_consts", "num_carry", "linear", "ft_in")
_REWRITTEN = ("cond_jaxpr", "body_jaxpr", "branches", "jaxpr")  # parameters that hold bodies


@dataclass(frozen=True, eq=False)
class Body:
    """A program inside an equation.

    Attributes:
        jaxpr: the program.
        inputs: pairs (index of the program's input, the equation's operand).
        outputs: pairs (index of the program's output, the equation's result); a loop's carry also
            with the operand that it starts from.
        times: how often it runs.
        stacked_inputs, stacked_outputs: indices of the inputs and outputs that are slices of the
            equation's along the leading dimension, one an iteration.
    """

    jaxpr: Jaxpr
    inputs: Sequence[tuple[int, Atom]]
    outputs: Sequence[tuple[int, Atom]]
    times: int = 1
    stacked_inputs: range = range(0)
    stacked_outputs: range = range(0)


def bodies(eqn: Equation) -> list[Body]:
    """Return the bodies of a loop, a conditional or a call; of any other equation, none."""
    params, ins, outs = eqn.params, eqn.invars, eqn.outvars
    name = eqn.primitive.name
    if name == "scan":
        consts, carry = scan_counts(eqn)
        turn = [*enumerate(outs[:carry]), *enumerate(ins[consts : consts + carry])]
        return [
            Body(
                read_jaxpr(params["jaxpr"]),
                list(enumerate(ins)),
                [*turn, *enumerate(outs[carry:], carry)],
                params["length"],
                range(consts + carry, len(ins)),
                range(carry, len(outs)),
            )
        ]
    if name == "while":
        a, b = while_counts(eqn)
        state = ins[a + b :]
        return [
            Body(read_jaxpr(params["cond_jaxpr"]), list(enumerate([*ins[:a], *state])), []),
            Body(
                read_jaxpr(params["body_jaxpr"]),
                list(enumerate(ins[a:])),
                [*enumerate(outs), *enumerate(state)],
            ),
        ]
    found = []
    for jaxpr in alternatives(eqn):
        given = ins[len(ins) - len(jaxpr.invars) :]  # a branch has no index
        found.append(Body(jaxpr, list(enumerate(given)), list(enumerate(outs))))
    return found


def alternatives(eqn: Equation) -> list[Jaxpr]:
    """Return the programs of which an equation runs exactly one: a called function, or branches.

    Their inputs are the last operands of the equation.
    """
    if eqn.primitive.name == "cond":
        return [read_jaxpr(branch) for branch in eqn.params["branches"]]
    if eqn.primitive.name in CALLS | CALLS_WITH_RULES:
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if is_jaxpr(function := eqn.params.get(key)):
                return [read_jaxpr(function)]
    return []


def total(eqn: Equation, measure: Callable[[Jaxpr], float]) -> float | None:
    """Add up a measure over the programs inside an equation; None if there are none.

    A conditional counts its largest branch, a scan every iteration.
    """
    found = [measure(jaxpr) for jaxpr in sub_jaxprs(eqn)]
    if not found:
        return None
    if eqn.primitive.name == "cond":
        return max(found)
    return sum(found) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)


def replace_bodies(eqn: Equation, rewrite: Callable[[Jaxpr], Jaxpr]) -> Equation:
    """Return an equation with its bodies rewritten, in the order of `bodies`.

    Functions with custom derivatives are left alone: their rules are for the function as it is.
    """
    params = {key: _rewritten(eqn.params[key], rewrite) for key in _REWRITTEN if key in eqn.params}
    return eqn.replace(params={**eqn.params, **params})


def with_captured(eqn: Equation, programs: Sequence[Jaxpr], value: Var) -> Equation:
    """Return an equation with other bodies, in the order of `bodies`, that capture `value`."""
    name, given = eqn.primitive.name, eqn.invars
    programs = [dataclasses.replace(p, invars=[value, *p.invars]) for p in programs]
    if name in CALLS:
        return called_instead(eqn, jaxpr_as_fun(programs[0]), [value, *given])
    invars, counts = [value, *given], dict[str, Any]()
    if name == "cond":
        invars = [given[0], value, *given[1:]]
    elif name == "while":
        a, b = while_counts(eqn)
        counts = {"cond_nconsts": a + 1, "body_nconsts": b + 1}
        invars = [value, *given[:a], value, *given[a:]]
    elif name == "scan":
        consts, carry = scan_counts(eqn)
        counts = _scan_counted(consts + 1, carry, len(given) - consts - carry)
    following = iter(programs)
    eqn = replace_bodies(eqn, lambda _: next(following))
    return eqn.replace(invars=invars, params={**eqn.params, **counts})


@functools.cache
def _scan_counted(consts: int, carry: int, scanned: int) -> dict[str, Any]:
    """Return the parameters by which a scan counts its operands, in the form of JAX's version."""

    def scan(held: list[Any], state: list[Any], rows: list[Any]) -> Any:
        return jax.lax.scan(lambda s, _: ([x + sum(held) for x in s], sum(held)), state, rows, 1)

    counted = make_jaxpr(scan, [0.0] * consts, [0.0] * carry, [np.zeros(1)] * scanned)
    return {k: v for k, v in counted.eqns[-1].params.items() if k in _SCAN_COUNTS}


_NOISE = re.compile(r"0x[0-9a-f]+|Var\(id=\d+\)")


def structure_text(jaxpr: Jaxpr, extra: Mapping[str, Any] | None = None) -> str:
    """Return the program as text, the same in every process: no addresses, no source lines.

    JAX's own text takes many times as long.
    """
    text = "\n".join(_lines(jaxpr, {}))
    return _NOISE.sub("", f"{text}{sorted((extra or {}).items())}")


def _lines(jaxpr: Jaxpr, known: dict[object, str]) -> Iterator[str]:
    """Yield the lines of a program; `known` holds the texts of types and numbers so far."""
    names: dict[Var, str] = {}

    def defined(v: Var) -> str:
        names[v] = f"v{len(names)}"
        return f"{names[v]}:{_type(v.aval, known)}"

    def read(atom: Atom) -> str:
        return names[atom] if is_var(atom) else _number(atom, known)

    yield " ".join(map(defined, (*jaxpr.constvars, *jaxpr.invars)))
    for eqn in jaxpr.eqns:
        params = ",".join(f"{key}={_value(eqn.params[key], known)}" for key in sorted(eqn.params))
        operands, results = " ".join(map(read, eqn.invars)), " ".join(map(defined, eqn.outvars))
        yield f"{results}={eqn.primitive.name}[{params}] {operands}"
    yield " ".join(map(read, jaxpr.outvars))


def _type(aval: Aval, known: dict[object, str]) -> str:
    text = known.get(aval)
    if text is None:
        text = known[aval] = str(aval)
    return text


def _number(atom: Literal, known: dict[object, str]) -> str:
    """Return a literal as text."""
    try:
        key = type(atom.val), atom.aval, np.asarray(atom.val).tobytes()
    except TypeError:  # no number, such as a random key
        return f"{atom.val!r}:{atom.aval}"
    if key not in known:
        known[key] = f"{atom.val!r}:{_type(atom.aval, known)}"
    return known[key]


def _value(value: Any, known: dict[object, str]) -> str:
    if is_jaxpr(value):
        jaxpr = read_jaxpr(value)
        consts = [getattr(x, "aval", x) for x in jaxpr.consts]
        return "{" + ";".join(_lines(jaxpr, known)) + f"}}{consts}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_value(each, known) for each in value) + ")"
    return str(value)
