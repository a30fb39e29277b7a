"""Models whose blocks are one `lax.scan`: a layer for each iteration, and an array for each layer.

A scan is one equation, which no stage boundary can cut. `open_scans` returns the step with the
iterations of such scans as layers, and each array that holds the parameters of all of them, and
what the optimizer keeps for these, as one array for each: a stage then has those of its own layers.
The step's arguments and results keep their structure outside (`Stacks`). Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax

from launcher.trace.interface import Interface, OuterProgram
from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    dependents,
    has_tangent,
    inline_calls,
    is_var,
    needed,
    scan_counts,
)
from launcher.trace.ir.primitive_kinds import ELEMENTWISE, LOOPS
from launcher.trace.primitives import boundary_p
from launcher.trace.scans.stacked import LayerRows, Opener, Value, by_rows, given_rows, may_open
from launcher.trace.slicing.slices import Traces

OPEN = ".open"  # ends the fingerprint of a step whose scans are open


@dataclasses.dataclass(frozen=True)
class Stacks:
    """The arguments and results of a step whose scans are open, as its caller knows them.

    Attributes:
        in_tree, out_tree: their structure.
        in_rows, out_rows: for each leaf the number of its rows, which are arguments or results of
            the open step; 0 where the leaf itself is.
    """

    in_tree: Any
    out_tree: Any
    in_rows: tuple[int, ...]
    out_rows: tuple[int, ...]


def open_scans(step: OuterProgram, traces: Traces) -> dict[str, Any] | None:
    """Return the attributes of a step that change with its scans open; None if there are none.

    Args:
        step: the step.
        traces: those of its loss.
    """
    positions = _stacked_operands(step)
    if not positions:
        return None
    layered = _layered(step, positions)
    values: dict[Var, Value] = {}
    ins: list[tuple[Var, ...]] = []
    for v, is_batch in zip(step.invars, step.batch, strict=True):
        names: tuple[Var, ...] = (v,)
        if v in layered and not is_batch:
            values[v], names = given_rows(v)
        ins.append(names)
    opener = Opener(values, layered)
    opener.run(step.before)
    loss, gradients = _opened_loss(step.loss_equation, positions, opener)
    before = opener.take()
    opener.stand_for(gradients)
    opener.run(step.after)
    outs: list[list[Atom]] = []
    for i, atom in enumerate(step.outvars):
        value, argument = opener.value(atom), step.aliases.get(i)
        apart = argument is not None and step.invars[argument] in values
        if isinstance(value, LayerRows) or apart:
            rows = opener.rows(value)
            outs.append([rows[k] for k in range(rows.count)])
        else:
            outs.append([value])
    after = needed(opener.take(), [x for each in outs for x in each])
    return {
        **_interface(step, ins, outs),
        "before": tuple(before),
        "loss_equation": loss,
        "after": tuple(after),
        "traces": traces.rewritten(
            _open_equation(traces.whole, positions), lambda eqn: _open_equation(eqn, positions)
        ),
    }


def _open_equation(eqn: Equation, positions: Set[int]) -> Equation:
    """Return the equation of a loss with its scans open.

    Args:
        eqn: the equation, on the whole batch or on a slice.
        positions: the operands that become one for each row.
    """
    jaxpr: Jaxpr = eqn.params["jaxpr"]
    values: dict[Var, Value] = {}
    starts: list[int] = []
    invars: list[Var] = []
    operands: list[Atom] = []
    for i, (v, outer) in enumerate(zip(jaxpr.invars, eqn.invars, strict=True)):
        starts.append(len(invars))
        if i in positions:
            values[v], rows = given_rows(v)
            invars += rows
            operands += [Var(row.aval) for row in rows]
        else:
            invars.append(v)
            operands.append(outer)
    opener = Opener(values, marks=True)
    opener.run(jaxpr.eqns)
    outs = [opener.whole(opener.value(v)) for v in jaxpr.outvars]
    ends = [*starts[1:], len(invars)]
    wrt = [k for i in eqn.params["wrt"] for k in range(starts[i], ends[i])]
    results = eqn.outvars[: len(jaxpr.outvars)]
    params = {"jaxpr": Jaxpr(invars, opener.equations, outs), "wrt": tuple(wrt)}
    return eqn.replace(
        invars=operands,
        outvars=[*results, *(Var(invars[k].aval) for k in wrt)],
        params={**eqn.params, **params},
    )


def with_rows_apart(jaxpr: Jaxpr, counts: Sequence[int]) -> Jaxpr:
    """Return a program some of whose results are the rows of what they were.

    Args:
        jaxpr: the program.
        counts: for each result how many rows it has that are results; 0 where it stays.
    """
    jaxpr = inline_calls(jaxpr)
    wanted = {v for v, count in zip(jaxpr.outvars, counts, strict=True) if count and is_var(v)}
    before = -1
    while len(wanted) != before:
        before = len(wanted)
        for eqn in reversed(jaxpr.eqns):
            if eqn.primitive.name in ELEMENTWISE:
                wanted |= _connected(eqn, wanted)
    opener = Opener({}, wanted)
    opener.run(jaxpr.eqns)
    outs: list[Atom] = []
    for atom, count in zip(jaxpr.outvars, counts, strict=True):
        value = opener.value(atom)
        outs += (
            map(opener.rows(value).__getitem__, range(count)) if count else [opener.whole(value)]
        )
    return dataclasses.replace(jaxpr, eqns=needed(opener.take(), outs), outvars=outs)


def _opened_loss(
    eqn: Equation, positions: Set[int], opener: Opener
) -> tuple[Equation, dict[Var, Value]]:
    """Return the loss with open scans in the opened step, and replacements of its gradients."""
    operands: list[Atom] = []
    for i, v in enumerate(eqn.invars):
        value = opener.value(v)
        if i in positions:
            rows = opener.rows(value)
            operands += [rows[k] for k in range(rows.count)]
        else:
            operands.append(opener.whole(value))
    opened = _open_equation(eqn, positions)
    gradients: dict[Var, Value] = {}
    made = opened.outvars[len(eqn.params["reduce"]) :]
    for i, v in zip(eqn.params["wrt"], eqn.outvars[len(eqn.params["reduce"]) :], strict=True):
        count = v.aval.shape[0] if i in positions else 1
        mine, made = made[:count], made[count:]
        gradients[v] = LayerRows(v.aval, mine.__getitem__) if i in positions else mine[0]
    return opened.replace(invars=operands), gradients


def _interface(
    step: Interface, ins: Sequence[Sequence[Var]], outs: Sequence[Sequence[Atom]]
) -> dict[str, Any]:
    """Return the arguments and results of the opened step, as attributes of it."""

    def places(parts: Sequence[Sequence[Any]]) -> list[int]:
        return [0, *itertools.accumulate(map(len, parts))]

    def opened(tree: Any, rows: Sequence[int]) -> Any:
        leaves = [(0,) * count if count else 0 for count in rows]
        return jax.tree.structure(jax.tree.unflatten(tree, leaves))

    given, made = places(ins), places(outs)
    in_rows = tuple(len(x) if x[0] is not v else 0 for x, v in zip(ins, step.invars, strict=True))
    out_rows = tuple(
        len(x) if x[0].aval.shape != v.aval.shape else 0
        for x, v in zip(outs, step.outvars, strict=True)
    )
    repeated = [i for i, names in enumerate(ins) for _ in names]
    aliases = {
        made[i] + k: given[argument] + k
        for i, argument in step.aliases.items()
        if len(outs[i]) == len(ins[argument])
        for k in range(len(outs[i]))
    }
    invars = tuple(v for names in ins for v in names)
    return {
        "in_tree": opened(step.in_tree, in_rows),
        "out_tree": opened(step.out_tree, out_rows),
        "in_avals": tuple(v.aval for v in invars),
        "invars": invars,
        "outvars": tuple(x for each in outs for x in each),
        "donated": tuple(step.donated[i] for i in repeated),
        "batch": tuple(step.batch[i] for i in repeated),
        "aliases": aliases,
        "stacks": Stacks(step.in_tree, step.out_tree, in_rows, out_rows),
    }


def _stacked_operands(step: OuterProgram) -> set[int]:
    """Return the operands of the loss that scans take apart, a row an iteration.

    They are parameters: floating, and not of the batch. A loss with marks has none: its layers are
    those that it says.
    """
    jaxpr: Jaxpr = step.loss_equation.params["jaxpr"]
    if any(eqn.primitive is boundary_p for eqn in jaxpr.eqns):
        return set()  # layers end where the user says
    batch = {v for v, is_batch in zip(step.invars, step.batch, strict=True) if is_batch}
    varying = dependents(step.before, batch)
    of_batch = [v for v, x in zip(jaxpr.invars, step.operands, strict=True) if x in varying]
    inside = dependents(jaxpr.eqns, of_batch)
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in LOOPS and may_open(eqn):
            first = sum(scan_counts(eqn))
            if any(atom in inside for atom in eqn.invars[first:]):
                continue  # a recurrent network's time steps, with parameters for each
            for atom in eqn.invars[first:]:
                root = _root(atom, makers)
                i = position.get(root, -1) if root is not None else -1
                if i >= 0:
                    found.add(i)
    return found


def _root(atom: Atom, makers: Mapping[Var, Equation]) -> Var | None:
    """Return the array of which another one is an element-wise function; None: it is no number."""
    while is_var(atom) and atom in makers and makers[atom].primitive.name in ELEMENTWISE:
        atom = makers[atom].invars[0]
    if is_var(atom) and has_tangent(atom.aval):
        return atom
    return None


def _layered(step: OuterProgram, positions: Set[int]) -> set[Var]:
    """Return the variables outside of the loss that hold a row for each iteration of a scan.

    They are operands of scans, their gradients, and values computed from these row by row, or
    from which these are computed: so an optimizer's averages are found.
    """
    eqn = step.loss_equation
    of = dict(zip(eqn.params["wrt"], eqn.outvars[len(eqn.params["reduce"]) :], strict=True))
    found = {step.operands[i] for i in positions} | {of[i] for i in positions if i in of}
    pairs = [(step.outvars[i], step.invars[k]) for i, k in step.aliases.items()]
    equations, count = [*step.before, *step.after], -1
    while len(found) != count:
        count = len(found)
        for one in (*equations, *reversed(equations)):
            found |= _connected(one, found)
        for result, argument in pairs:
            if result in found or argument in found:
                found |= {v for v in (result, argument) if is_var(v)}
    return found


def _connected(eqn: Equation, found: Set[Var]) -> set[Var]:
    """Return what holds rows because something else that an equation reads or makes does."""
    vars_ = [v for v in (*eqn.invars, *eqn.outvars) if is_var(v)]
    if not any(v in found for v in vars_):
        return set()
    if eqn.primitive.name in ELEMENTWISE:
        (out,) = eqn.outvars
        return {v for v in vars_ if v.aval.shape == out.aval.shape and v.aval.shape}
    given = [is_var(v) and v in found for v in eqn.invars]
    shapes = [v.aval.shape for v in eqn.invars]
    return set(eqn.outvars) if any(given) and by_rows(eqn, given, shapes) is not None else set()
