"""Named dimensions: which dimensions of a program's values are cut alike, or else resharded.

Every equation's rule (`trace.factors`) says which dimensions run together; their union over the
program leaves few classes, such as the heads of one attention layer or the batch (cf. TOAST, Alabed
et al. 2025, arXiv 2508.15010). To cut a program is to give some classes a mesh axis. Bodies of
loops, branches and calls are part of the program that holds them.

The specs of a program say how values are kept. An equation can follow them as far as its factors
go (`execution`): an operand that is cut in any other way is gathered first, and a dimension that is
cut and summed over leaves each device with a part of the result. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.trace import FORMS, Atom, Body, Equation, Factor, Place, Var, bodies, factors, is_var

# What an array's dimensions are cut over: for each a mesh axis, several, or None.
Axis = str | tuple[str, ...] | None
Spec = tuple[Axis, ...]
Holder = tuple[int, Var]  # a value, by the scope that it stands in


@dataclass(frozen=True, eq=False)
class Use:
    """One equation of the program, or of a body in it.

    Attributes:
        scope: which body's instance it stands in; variables are known by `(scope, variable)`.
        times: how often it runs. factors: None where its primitive has no known rule.
    """

    eqn: Equation
    scope: int
    times: int
    factors: tuple[Factor, ...] | None


class NamedDims:
    """The classes of a program's dimensions.

    Attributes:
        uses: its equations, those of bodies in the place of the equations that hold them.
    """

    def __init__(self, equations: Iterable[Equation]) -> None:
        self.uses: list[Use] = []
        self._parent: list[int] = []
        self._size: list[int] = []  # of a root: the greatest common divisor of its dimensions
        self._first: dict[tuple[int, Var], int] = {}
        self._scopes = 0
        self._source: dict[Holder, Holder] = {}
        self._fixed: set[Holder] = set()
        self._inner: dict[Holder, list[int]] = {}
        self._visit(equations, 0, 1)

    def classes(self, atom: Atom, scope: int = 0) -> tuple[int, ...]:
        """Return the class of each dimension of a value; of a literal there are none."""
        if not is_var(atom) or not getattr(atom.aval, "shape", ()):
            return ()
        first = self._node(atom, scope)
        return tuple(self._find(first + d) for d in range(len(atom.aval.shape)))

    def size(self, of: int) -> int:
        """Return the greatest common divisor of a class's lengths: the parts it can be cut into."""
        return self._size[self._find(of)]

    def source(self, scope: int, var: Var) -> Holder:
        """Return the value that this one is another form of, or itself."""
        return self._source.get((scope, var), (scope, var))

    def is_fixed(self, scope: int, var: Var) -> bool:
        """Return whether no gradient flows to a value, by the program's own word."""
        return self.source(scope, var) in self._fixed

    def inner_scopes(self, scope: int, eqn: Equation) -> Sequence[int]:
        """Return the scopes of an equation's bodies."""
        return self._inner.get((scope, eqn.outvars[0]), ()) if eqn.outvars else ()

    def _node(self, var: Var, scope: int) -> int:
        key = scope, var
        if key not in self._first:
            self._first[key] = len(self._parent)
            for length in var.aval.shape:
                self._parent.append(len(self._parent))
                self._size.append(length)
        return self._first[key]

    def _find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def _union(self, a: int, b: int) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._parent[b] = a
            self._size[a] = math.gcd(self._size[a], self._size[b])

    def link(self, a: Atom, b: Atom, scope_a: int = 0, scope_b: int = 0, skip: int = 0) -> None:
        """Make two values of one shape run together.

        Args:
            a: a value.
            b: the other one, whose shape `a` has behind its leading dimensions.
            scope_a: the scope of `a`.
            scope_b: the scope of `b`.
            skip: how many leading dimensions `a` has for itself.
        """
        if is_var(a) and is_var(b) and b.aval.shape:
            first, second = self._node(a, scope_a) + skip, self._node(b, scope_b)
            for d, length in enumerate(b.aval.shape):
                if length != 1:
                    self._union(first + d, second + d)

    def _visit(self, equations: Iterable[Equation], scope: int, times: int) -> None:
        for eqn in equations:
            inside = bodies(eqn)
            if inside:
                for body in inside:
                    self._enter(eqn, scope, times, body)
                continue
            fixed = eqn.primitive.name == "stop_gradient"
            if eqn.primitive.name in FORMS and is_var(eqn.invars[0]):
                fixed = self.is_fixed(scope, eqn.invars[0])
                if not _widens(eqn):  # else parts of its gradient are summed before they are cast
                    self._source[scope, eqn.outvars[0]] = self.source(scope, eqn.invars[0])
            if fixed:
                self._fixed.add((scope, eqn.outvars[0]))
            found = factors(eqn)
            self.uses.append(Use(eqn, scope, times, found))
            for factor in found or ():
                atoms = [(eqn.invars[i], d) for i, d in factor.operands]
                atoms += [(eqn.outvars[i], d) for i, d in factor.results]
                nodes = [
                    self._node(atom, scope) + d
                    for atom, d in atoms
                    if is_var(atom) and atom.aval.shape[d] != 1  # else it is stretched, not cut
                ]
                for node in nodes[1:]:
                    self._union(nodes[0], node)

    def _enter(self, eqn: Equation, scope: int, times: int, body: Body) -> None:
        self._scopes += 1
        inner = self._scopes
        if eqn.outvars:
            self._inner.setdefault((scope, eqn.outvars[0]), []).append(inner)
        for i, atom in body.inputs:
            skip = 1 if i in body.stacked_inputs else 0
            self.link(atom, body.jaxpr.invars[i], scope, inner, skip)
        for i, atom in body.outputs:
            skip = 1 if i in body.stacked_outputs else 0
            self.link(atom, body.jaxpr.outvars[i], scope, inner, skip)
        self._visit(body.jaxpr.eqns, inner, times * body.times)


class Sharding:
    """The specs that follow from giving classes mesh axes; `sizes` are the devices along each."""

    def __init__(self, dims: NamedDims, sizes: Mapping[str, int]) -> None:
        self.dims, self.sizes = dims, sizes
        self.axis_of: dict[int, tuple[str, ...]] = {}

    def seed(self, var: Var, spec: Spec) -> None:
        """Cut the classes of a value's dimensions as `spec` does.

        An earlier call that says more about a class has precedence.
        """
        for of, axis in zip(self.dims.classes(var), spec, strict=False):
            if len(axes(axis)) > len(self.axis_of.get(of, ())):
                self.axis_of[of] = axes(axis)

    def spec(self, var: Atom, scope: int = 0) -> Spec:
        """A value's own: each axis once, for the first dimension that it divides."""
        shape = getattr(var.aval, "shape", ())
        used: set[str] = set()
        found: list[Axis] = []
        for of, length in zip(self.dims.classes(var, scope), shape, strict=False):
            fits: tuple[str, ...] = ()
            for axis in self.axis_of.get(of, ()):
                parts = math.prod(self.sizes[a] for a in (*fits, axis))
                if axis not in used and self.sizes[axis] > 1 and length % parts == 0:
                    fits = (*fits, axis)
            used.update(fits)
            found.append(fits[0] if len(fits) == 1 else fits or None)
        return tuple(found)

    def parts(self, var: Var) -> int:
        """Into how many parts a value is cut."""
        return parts(self.spec(var), self.sizes) if self.axis_of else 1


def _widens(eqn: Equation) -> bool:
    """Return whether a value is cast to more bits: its gradient comes back to fewer."""
    (before, *_), (after,) = eqn.invars, eqn.outvars
    return bool(after.aval.dtype.itemsize > before.aval.dtype.itemsize)


def axes(axis: Axis) -> tuple[str, ...]:
    """Return the mesh axes of one dimension."""
    return (axis,) if isinstance(axis, str) else axis or ()


def without(spec: Spec, *dropped: str) -> Spec:
    """A spec less some mesh axes."""
    kept = [tuple(a for a in axes(axis) if a not in dropped) for axis in spec]
    return tuple(k[0] if len(k) == 1 else k or None for k in kept)


def parts(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Into how many parts a spec cuts an array."""
    return math.prod(sizes[a] for axis in spec for a in axes(axis))


@dataclass(frozen=True)
class Execution:
    """One equation on each device.

    Attributes:
        ins: the specs of the operands as they are read. outs: of the results, before any sum.
        summed: the axes along which each device has a part of the (first) result.
        kept_ins, kept_outs: the specs by which operands and results are kept.
    """

    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    summed: tuple[str, ...]
    kept_ins: tuple[Spec, ...]
    kept_outs: tuple[Spec, ...]


def execution(use: Use, sharding: Sharding) -> Execution:
    """Return how `use` runs under `sharding`; an unknown equation is computed whole, everywhere."""
    ins = tuple(sharding.spec(v, use.scope) for v in use.eqn.invars)
    outs = tuple(sharding.spec(v, use.scope) for v in use.eqn.outvars)
    if not any(map(any, (*ins, *outs))):
        return Execution(ins, outs, (), ins, outs)
    reads: list[list[list[str]]] = [[[] for _ in spec] for spec in ins]
    makes: list[list[list[str]]] = [[[] for _ in spec] for spec in outs]
    summed: list[str] = []
    factors = use.factors or ()
    sums = [[p for p in f.operands if _is_long(p, use)] for f in factors if not f.results]
    for places in sums:  # what all operands have cut
        for axis in _common([ins[i][d] for i, d in places]):
            summed.append(axis)
            _cut(reads, places, axis)
    for factor in factors:
        for axis in _common([outs[j][d] for j, d in factor.results]):
            if axis not in summed:
                _cut(reads, [p for p in factor.operands if _is_long(p, use)], axis)
                _cut(makes, factor.results, axis)
    for places in sums:  # what some have cut; of the others each device takes its part
        found = {axis: None for i, d in places for axis in axes(ins[i][d])}
        for axis in found:
            elsewhere = {a for i, _ in places for dim in reads[i] for a in dim}
            if axis not in elsewhere and axis not in summed:
                summed.append(axis)
                _cut(reads, places, axis)
    return Execution(
        tuple(map(_spec, reads)), tuple(map(_spec, makes)), tuple(dict.fromkeys(summed)), ins, outs
    )


def _cut(dims: list[list[list[str]]], places: Iterable[Place], axis: str) -> None:
    for i, d in places:
        dims[i][d].append(axis)


def _is_long(place: Place, use: Use) -> bool:
    """Return whether an operand's dimension can be cut: it is not a literal's, or stretched."""
    i, d = place
    shape = use.eqn.invars[i].aval.shape
    return d < len(shape) and shape[d] != 1


def _common(dims: list[Axis]) -> list[str]:
    """Return the axes that all of these dimensions are cut along."""
    if not dims:
        return []
    first, *others = map(axes, dims)
    return [a for a in first if all(a in other for other in others)]


def _spec(dims: list[list[str]]) -> Spec:
    return tuple(d[0] if len(d) == 1 else tuple(d) or None for d in dims)


def cut_axes(spec: Spec) -> set[str]:
    """All axes of a spec."""
    return {a for axis in spec for a in axes(axis)}
