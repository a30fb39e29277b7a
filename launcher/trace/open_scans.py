"""Models whose blocks are one `lax.scan`: a layer for each iteration, and an array for each layer.

A model that runs its blocks by `lax.scan` (Flax: `nn.scan`) stacks the parameters of all blocks
along a first axis, and so does what the optimizer keeps for them. A scan is one equation, which no
stage boundary can cut. `open_scans` returns the step with the iterations of such scans as layers,
and each stacked array as one array for each layer: a stage then has those of its own layers. The
step's arguments and results keep their structure outside (`Stacks`).

`Opener` rewrites a program in which such arrays are `LayerRows`, a value for each layer: what
computes each row of the result from the same rows of the operands becomes an equation for each row,
and a scan over rows its body, once for each. Where an equation needs an array whole, it is stacked
again. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from launcher.trace.interface import Interface, OuterProgram
from launcher.trace.ir.jaxpr import (
    Atom,
    Aval,
    Equation,
    Jaxpr,
    Var,
    dependents,
    has_tangent,
    inline_calls,
    is_var,
    make_jaxpr,
    needed,
    read_jaxpr,
    renamed,
    scan_counts,
    splice,
)
from launcher.trace.ir.primitive_kinds import ELEMENTWISE, FOLDS, LOOPS
from launcher.trace.primitives import boundary_p
from launcher.trace.slicing.slices import Traces


class LayerRows:
    """The rows of an array along its first axis, each made when it is first asked for.

    Attributes:
        count: how many there are.
        aval: the type of the whole array.
    """

    def __init__(self, aval: Aval, make: Callable[[int], Atom]) -> None:
        self.aval, self.count = aval, aval.shape[0]
        self._row = functools.cache(make)
        self.stacked: Atom | None = None  # the array itself, once it was needed

    def __getitem__(self, i: int) -> Atom:
        return self._row(i)

    def all(self) -> list[Atom]:
        """Return all rows, in order."""
        return [self[i] for i in range(self.count)]


Value: TypeAlias = "Atom | LayerRows"


def given_rows(v: Var) -> tuple[LayerRows, tuple[Var, ...]]:
    """Return an input as rows, and a variable for each of them."""
    names = tuple(Var(_row_aval(v.aval)) for _ in range(v.aval.shape[0]))
    return LayerRows(v.aval, lambda i: names[i]), names


def _row_aval(aval: Any) -> Any:
    """Return the type of a row of an array."""
    return aval.update(shape=aval.shape[1:])


class Opener:
    """Rewrites a program, equation by equation.

    Args:
        values: replacements of variables of the old program; others are kept.
        opened: the variables that are to be rows wherever that is possible, such as those that
            become arguments.
        marks: whether each iteration of a scan is a layer, with a mark before it.

    Attributes:
        equations: the new program.
    """

    def __init__(
        self, values: Mapping[Var, Value], opened: Iterable[Var] = (), marks: bool = False
    ) -> None:
        self._values: dict[Var, Value] = dict(values)
        self._opened, self._marks, self._has_layer = set(opened), marks, False
        self._cut: dict[Var, LayerRows] = {}
        self.equations: list[Equation] = []

    def take(self) -> list[Equation]:
        """Return the new program so far, and begin another one that continues from its values."""
        taken, self.equations = self.equations, []
        return taken

    def stand_for(self, values: Mapping[Var, Value]) -> None:
        """Let these values stand for variables of the old program from here on."""
        self._values.update(values)

    def run(self, equations: Iterable[Equation]) -> None:
        """Rewrite equations and add them."""
        for eqn in equations:
            operands = [self.value(v) for v in eqn.invars]
            results = self._results(eqn, operands)
            if results is None:
                reads = [self.whole(x) for x in operands]
                self.equations.append(eqn.replace(invars=reads))
            else:
                self._values.update(zip(eqn.outvars, results, strict=True))

    def value(self, atom: Atom) -> Value:
        """Return the replacement of an atom of the old program."""
        return self._values.get(atom, atom) if is_var(atom) else atom

    def whole(self, value: Value) -> Atom:
        """Return an array of the new program; rows are stacked."""
        if not isinstance(value, LayerRows):
            return value
        if value.stacked is None:
            equations, (value.stacked,) = splice(lambda *xs: [jnp.stack(xs)], value.all())
            self.equations += equations
        return value.stacked

    def rows(self, value: Value) -> LayerRows:
        """Return the rows of a value, cut out of an array where they are no values yet."""
        if isinstance(value, LayerRows):
            return value
        assert is_var(value)  # a literal is a single number

        template = make_jaxpr(
            lambda x: [jax.lax.index_in_dim(x, 0, axis=0, keepdims=False)],
            jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype),
        )

        def cut(i: int) -> Atom:
            (row,) = self._body(template, [value], lambda params: _from_row(params, i))
            return row

        return self._cut.setdefault(value, LayerRows(value.aval, cut))

    def _results(self, eqn: Equation, operands: Sequence[Value]) -> list[Value] | None:
        """Return the replacements of an equation's results; None if it needs arrays whole."""
        rows = [x for x in operands if isinstance(x, LayerRows)]
        if not rows and not any(v in self._opened for v in eqn.outvars):
            return None
        if eqn.primitive.name in LOOPS:
            return self._iterations(eqn, operands) if may_open(eqn) else None
        are_rows = [isinstance(x, LayerRows) for x in operands]
        by_row = by_rows(eqn, are_rows, [x.aval.shape for x in operands])
        if by_row is not None:
            (out,) = eqn.outvars
            return [LayerRows(out.aval, functools.partial(self._row, eqn, operands, by_row))]
        return self._folded(eqn, operands[0])

    def _row(
        self, eqn: Equation, operands: Sequence[Value], params: Mapping[str, Any], i: int
    ) -> Atom:
        """Add the equation that makes a row of a result."""
        (out,) = eqn.outvars
        reads = []
        for x in operands:
            cut = isinstance(x, LayerRows) or x.aval.shape == out.aval.shape
            reads.append(self.rows(x)[i] if cut and x.aval.shape else self.whole(x))
        made = Var(_row_aval(out.aval))
        self.equations.append(eqn.replace(invars=reads, outvars=[made], params={**params}))
        return made

    def _folded(self, eqn: Equation, of: Value) -> list[Value] | None:
        """Return a reduction over the rows, too: that of each, then those of all together."""
        fold = FOLDS.get(eqn.primitive.name)
        if fold is None or not isinstance(of, LayerRows):
            return None
        inside = tuple(axis - 1 for axis in eqn.params["axes"] if axis)
        (out,), params = eqn.outvars, {**eqn.params, "axes": inside}
        parts = of.all()
        if inside:
            made = [Var(out.aval) for _ in parts]
            for row, part in zip(parts, made, strict=True):
                self.equations.append(eqn.replace(invars=[row], outvars=[part], params=params))
            parts = [*made]

        of_row = jax.ShapeDtypeStruct(out.aval.shape, out.aval.dtype)
        folded = make_jaxpr(lambda x, y: [getattr(jax.lax, fold)(x, y)], of_row, of_row)
        return [functools.reduce(lambda x, y: self._body(folded, [x, y])[0], parts)]

    def _iterations(self, eqn: Equation, operands: Sequence[Value]) -> list[Value]:
        """Add the body of a scan once for each iteration."""
        params = eqn.params
        (consts, carried), length = scan_counts(eqn), params["length"]
        body = inline_calls(read_jaxpr(params["jaxpr"]))
        same = [self.whole(x) for x in operands[:consts]]
        carry = [self.whole(x) for x in operands[consts : consts + carried]]
        stacked = [self.rows(x) for x in operands[consts + carried :]]
        made: list[dict[int, Atom]] = [{} for _ in eqn.outvars[carried:]]
        order = range(length)
        for i in reversed(order) if params["reverse"] else order:
            if self._marks and self._has_layer:
                self.equations += make_jaxpr(lambda: boundary_p.bind()).eqns
            self._has_layer = True
            outs = self._body(body, [*same, *carry, *(x[i] for x in stacked)])
            carry = outs[:carried]
            for rows, out in zip(made, outs[carried:], strict=True):
                rows[i] = out
        pairs = zip(eqn.outvars[carried:], made, strict=True)
        return [*carry, *(LayerRows(v.aval, rows.__getitem__) for v, rows in pairs)]

    def _body(
        self,
        jaxpr: Any,
        operands: Sequence[Atom],
        changed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    ) -> list[Atom]:
        """Add a copy of a body, its equations' parameters changed; return its results."""
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        copies = renamed(jaxpr.eqns, env)
        self.equations += [eqn.replace(params=changed(eqn.params)) for eqn in copies]
        return [env[v] if is_var(v) else v for v in jaxpr.outvars]


def may_open(eqn: Equation) -> bool:
    """Return whether an equation is a scan that can be written as its iterations."""
    return (
        eqn.primitive.name in LOOPS
        and eqn.params["length"] > 1
        and not read_jaxpr(eqn.params["jaxpr"]).consts
    )


def by_rows(
    eqn: Equation, is_rows: Sequence[bool], shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any] | None:
    """Return the parameters by which an equation makes each row of its result from rows.

    Args:
        eqn: the equation.
        is_rows: which operands are rows. Others are read whole, or cut if they have the shape of
            the result.
        shapes: the shape of each operand.

    Returns:
        The parameters; None if a row of the result is made from other rows as well.
    """
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.outvars) != 1 or not (shape := eqn.outvars[0].aval.shape):
        return None
    alike = [given == shape for given in shapes]
    if name in ELEMENTWISE:
        fits = all(a or not given for a, given in zip(alike, shapes, strict=True))
        return dict(params) if fits else None
    if len(shapes) != 1 or (is_rows[0] and shapes[0][0] != shape[0]):
        return None
    if name == "broadcast_in_dim":
        dims = tuple(params["broadcast_dimensions"])
        if is_rows[0] != (dims[:1] == (0,)):  # an array is repeated for each row, or spread in it
            return None
        dims = tuple(d - 1 for d in dims[is_rows[0] :])
        return {**params, "shape": shape[1:], "broadcast_dimensions": dims}
    if not is_rows[0]:
        return None
    if "axes" in params and 0 not in params["axes"]:
        return {**params, "axes": tuple(axis - 1 for axis in params["axes"])}
    if "permutation" in params and params["permutation"][0] == 0:
        return {**params, "permutation": tuple(d - 1 for d in params["permutation"][1:])}
    if "new_sizes" in params and params["dimensions"] is None:
        return {**params, "new_sizes": shape[1:]}
    return None


def _from_row(params: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return the parameters of an equation that cuts out row `i`, given those for row 0."""
    if "start_indices" not in params:
        return dict(params)
    starts, limits = (
        (i + k, *params[of][1:]) for k, of in enumerate(("start_indices", "limit_indices"))
    )
    return {**params, "start_indices": starts, "limit_indices": limits}


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
            outs.append(opener.rows(value).all())
        else:
            outs.append([value])
    after = needed(opener.take(), [x for each in outs for x in each])
    rewrite = functools.partial(_open_equation, positions=positions)
    return {
        **_interface(step, ins, outs),
        "before": tuple(before),
        "loss_equation": loss,
        "after": tuple(after),
        "traces": traces.rewritten(rewrite(traces.whole), rewrite),
    }


def _open_equation(
    eqn: Equation, positions: Set[int], operands: Sequence[Atom] | None = None
) -> Equation:
    """Return the equation of a loss with its scans open.

    Args:
        eqn: the equation, on the whole batch or on a slice.
        positions: the operands that become one for each row.
        operands: those of the opened equation; None: new names, which nothing else makes.
    """
    jaxpr: Jaxpr = eqn.params["jaxpr"]
    values: dict[Var, Value] = {}
    groups: list[tuple[Var, ...]] = []  # one input, or its rows
    for i, v in enumerate(jaxpr.invars):
        groups.append((v,))
        if i in positions:
            values[v], groups[i] = given_rows(v)
    invars = list(itertools.chain(*groups))
    ends = list(itertools.accumulate(map(len, groups)))
    wrt = [k for i in eqn.params["wrt"] for k in range(ends[i] - len(groups[i]), ends[i])]
    opener = Opener(values, marks=True)
    opener.run(jaxpr.eqns)
    outs = [opener.whole(opener.value(v)) for v in jaxpr.outvars]
    params = {"jaxpr": Jaxpr(invars, opener.equations, outs), "wrt": tuple(wrt)}
    return eqn.replace(
        invars=[Var(v.aval) for v in invars] if operands is None else list(operands),
        outvars=[*eqn.outvars[: len(jaxpr.outvars)], *(Var(invars[k].aval) for k in wrt)],
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
        outs += opener.rows(value).all() if count else [opener.whole(value)]
    return dataclasses.replace(jaxpr, eqns=needed(opener.take(), outs), outvars=outs)


def _opened_loss(
    eqn: Equation, positions: Set[int], opener: Opener
) -> tuple[Equation, dict[Var, Value]]:
    """Return the loss with open scans in the opened step, and replacements of its gradients."""
    operands: list[Atom] = []
    for i, v in enumerate(eqn.invars):
        value = opener.value(v)
        if i in positions:
            operands += opener.rows(value).all()
        else:
            operands.append(opener.whole(value))
    opened = _open_equation(eqn, positions, operands)
    gradients: dict[Var, Value] = {}
    made = opened.outvars[len(eqn.params["reduce"]) :]
    for i, v in zip(eqn.params["wrt"], eqn.outvars[len(eqn.params["reduce"]) :], strict=True):
        count = v.aval.shape[0] if i in positions else 1
        mine, made = made[:count], made[count:]
        gradients[v] = LayerRows(v.aval, mine.__getitem__) if i in positions else mine[0]
    return opened, gradients


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
    batch = step.batch_vars
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
            roots = (_root(atom, makers) for atom in eqn.invars[first:])
            found |= {position[root] for root in roots if root in position}
    return found


def _root(atom: Atom, makers: Mapping[Var, Equation]) -> Var | None:
    """Return the array of which another one is an element-wise function; None: it is no number."""
    while is_var(atom) and atom in makers and makers[atom].primitive.name in ELEMENTWISE:
        atom = makers[atom].invars[0]
    return atom if is_var(atom) and has_tangent(atom.aval) else None


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
