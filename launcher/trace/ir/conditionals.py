"""Splitting a conditional into independent ones.

"Apply the update only if all gradients are finite" is one `lax.cond` over every parameter. As one
equation it would have to run in one place. Its results fall into groups that share no array
operand, one group a parameter; each becomes a conditional of its own on the same predicate.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.trace.ir.jaxpr import (
    Equation,
    Jaxpr,
    inline_calls,
    is_var,
    needed,
    read_jaxpr,
    rewritten_as,
)


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
