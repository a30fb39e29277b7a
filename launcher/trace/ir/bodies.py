"""The programs inside an equation: loop bodies, branches and called functions.

`bodies` maps their inputs and outputs to the equation's operands and results; `jaxpr.sub_jaxprs`
finds the programs of any equation, even of an unknown primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    called,
    read_jaxpr,
    rewritten_as,
    scan_counts,
    sub_jaxprs,
    while_counts,
)

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
    function = called(eqn)
    return [] if function is None else [function]


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

    def rewritten(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rewritten, value))
        return rewritten_as(value, rewrite(read_jaxpr(value)))

    params = {key: rewritten(eqn.params[key]) for key in _REWRITTEN if key in eqn.params}
    return eqn.replace(params={**eqn.params, **params})
