"""Programs on arrays that hold several layers, stacked, as programs on one array for each layer.

A model that runs its blocks by `lax.scan` (Flax: `nn.scan`) stacks the parameters of all blocks
along a first axis, and so does what the optimizer keeps for them. `Opener` rewrites a program in
which such arrays are `LayerRows`, a value for each layer: what computes each row of the result from
the same rows of the operands becomes an equation for each row, and a scan over rows its body, once
for each. Where an equation needs an array whole, it is stacked again. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from launcher.trace.ir.jaxpr import (
    Atom,
    Aval,
    DropVar,
    Equation,
    Var,
    inline_calls,
    is_var,
    make_jaxpr,
    read_jaxpr,
    scan_counts,
    splice,
)
from launcher.trace.ir.primitive_kinds import ELEMENTWISE, FOLDS, LOOPS
from launcher.trace.primitives import boundary_p


class LayerRows:
    """The rows of an array along its first axis, each made when it is first asked for.

    Attributes:
        count: how many there are.
        aval: the type of the whole array.
    """

    def __init__(self, aval: Aval, make: Callable[[int], Atom]) -> None:
        self.aval, self.count = aval, aval.shape[0]
        self._make = make
        self._made: dict[int, Atom] = {}
        self.stacked: Atom | None = None  # the array itself, once it was needed

    def __getitem__(self, i: int) -> Atom:
        if i not in self._made:
            self._made[i] = self._make(i)
        return self._made[i]


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
            rows = [value[i] for i in range(value.count)]
            (value.stacked,) = self._spliced(lambda *xs: [jnp.stack(xs)], rows)
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
        parts = [of[i] for i in range(of.count)]
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
                self.equations.append(_mark())
            self._has_layer = True
            outs = self._body(body, [*same, *carry, *(x[i] for x in stacked)])
            carry = outs[:carried]
            for rows, out in zip(made, outs[carried:], strict=True):
                rows[i] = out
        results: list[Value] = [*carry]
        for v, rows in zip(eqn.outvars[carried:], made, strict=True):
            results.append(LayerRows(v.aval, rows.__getitem__))
        return results

    def _body(
        self,
        jaxpr: Any,
        operands: Sequence[Atom],
        changed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    ) -> list[Atom]:
        """Add a copy of a body, its equations' parameters changed; return its results."""
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Atom) -> Atom:
            return env[atom] if is_var(atom) else atom

        for eqn in jaxpr.eqns:
            outs = [v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
            reads = [read(v) for v in eqn.invars]
            params = changed(eqn.params)
            self.equations.append(eqn.replace(invars=reads, outvars=outs, params=params))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _spliced(self, fun: Callable[..., list[Any]], operands: Sequence[Atom]) -> list[Atom]:
        """Add the equations of a function of these operands; return its results."""
        equations, outs = splice(fun, operands)
        self.equations += equations
        return outs


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


def _mark() -> Equation:
    (eqn,) = make_jaxpr(lambda: boundary_p.bind()).eqns
    return eqn
