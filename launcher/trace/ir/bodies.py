"""The programs inside an equation: loop bodies, branches and called functions.

`bodies` maps their inputs and outputs to the equation's operands and results; `jaxpr.sub_jaxprs`
finds the programs of any equation, even of an unknown primitive. `split_conditionals` divides a
conditional: "apply the update only if all gradients are finite" is one `lax.cond` over every
parameter, which as one equation would have to run in one place. Its results fall into groups that
share no array operand, one group a parameter; each becomes a conditional of its own on the same
predicate.
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
    inline_calls,
    is_var,
    needed,
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


def split_conditionals(equations: Sequence[Equation]) -> list[Equation]:
    """Return the same program with every `cond` split by the arrays that its results depend on."""
    return [part for eqn in equations for part in _split(eqn)]


def _split(eqn: Equation) -> list[Equation]:
    if eqn.primitive.name != "cond" or len(eqn.outvars) == 1 or eqn.effects:
        return [eqn]
    old = eqn.params["branches"]
    branches = [inline_calls(read_jaxpr(branch)) for branch in old]
    if any(branch.consts for branch in branches):
        return [eqn]
    reads = [_operands_read(branches, k) for k in range(len(eqn.outvars))]
    operands = eqn.invars[1:]
    arrays = [{i for i in used if operands[i].aval.size != 1} for used in reads]
    parts = []
    for group in _connected(arrays):
        used = sorted(set().union(*(reads[k] for k in group)))
        narrow = tuple(
            rewritten_as(before, _narrow(branch, group, used))
            for before, branch in zip(old, branches, strict=True)
        )
        parts.append(
            eqn.replace(
                invars=[eqn.invars[0], *(operands[i] for i in used)],
                outvars=[eqn.outvars[k] for k in group],
                params={**eqn.params, "branches": narrow},
            )
        )
    return parts


def _operands_read(branches: Sequence[Jaxpr], result: int) -> set[int]:
    found: set[int] = set()
    for branch in branches:
        out = branch.outvars[result]
        used = {v for e in needed(branch.eqns, [out]) for v in e.invars if is_var(v)}
        used |= {out} if is_var(out) else set()
        found |= {i for i, v in enumerate(branch.invars) if v in used}
    return found


def _connected(sets: Sequence[set[int]]) -> list[list[int]]:
    """Indices grouped so that sets of different groups are disjoint; the empty ones are one."""
    groups: list[tuple[set[int], list[int]]] = []
    for k, members in enumerate(sets):
        joined, indices = set(members), [k]
        rest = []
        for other, others in groups:
            if other & joined or (not other and not joined):
                joined, indices = joined | other, others + indices
            else:
                rest.append((other, others))
        groups = [*rest, (joined, indices)]
    return [sorted(indices) for _, indices in groups]


def _narrow(branch: Jaxpr, results: list[int], operands: list[int]) -> Jaxpr:
    outs = [branch.outvars[k] for k in results]
    return Jaxpr([branch.invars[i] for i in operands], needed(branch.eqns, outs), outs)
