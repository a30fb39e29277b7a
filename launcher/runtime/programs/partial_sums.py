"""Emit equations as each device computes them, where XLA would move too much data.

If a gradient has several parts, such as that of the common input of query, key and value, XLA's
partitioner sums each part over the devices and adds them afterwards, at least on CPUs. Here the
parts are added first and summed once. And a convolution that every replica does on its own rows is
a grouped convolution to the partitioner, which gathers it; so it does what kernels and searches for
the k largest read. All become a `jax.shard_map` of what each device needs for its own part.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from launcher.partition import Execution, NamedDims, Sharding, Spec, Use, cut_axes, execution, parts
from launcher.runtime.programs.collectives import abstract_mesh
from launcher.trace import (
    CUSTOM_VJPS,
    FORMS,
    GRADIENT_SUMS,
    OWN_KERNELS,
    PARTIAL_SUMS,
    UNPARTITIONED,
    Atom,
    Equation,
    Jaxpr,
    Var,
    bodies,
    called_instead,
    is_var,
    jaxpr_as_fun,
    replace_bodies,
)


def emitted_locally(jaxpr: Jaxpr, known: Sharding, replicas: int) -> Jaxpr:
    """Return the same program with some of its equations replaced by a `jax.shard_map`.

    Args:
        jaxpr: the program.
        known: how the program's values are sharded, except those inside its bodies.
        replicas: how many replicas of the program will run side by side, under a `jax.vmap`.
    """
    sharding = Sharding(NamedDims(jaxpr.eqns), known.sizes)
    for v in (*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)):
        sharding.seed(v, known.spec(v))
    return _rewritten(jaxpr, 0, sharding, replicas)


def _rewritten(jaxpr: Jaxpr, scope: int, sharding: Sharding, replicas: int) -> Jaxpr:
    body = _Body(jaxpr, scope, sharding)
    instead: dict[int, list[Equation]] = {}
    for members in body.totals():
        instead.update((id(eqn), []) for eqn in members)
        instead[id(members[-1])] = [body.joined(members)]
    for eqn in jaxpr.eqns:
        if id(eqn) in instead:
            continue
        is_kernel = eqn.primitive.name in OWN_KERNELS and (replicas > 1 or sharding.axis_of)
        if is_kernel or (replicas > 1 and eqn.primitive.name in UNPARTITIONED):
            instead[id(eqn)] = [body.alone(eqn)]
        elif sharding.dims.inner_scopes(scope, eqn):
            instead[id(eqn)] = [_with_bodies(eqn, scope, sharding, replicas)]
    equations = [new for e in jaxpr.eqns for new in instead.get(id(e), [e])]
    return dataclasses.replace(jaxpr, eqns=equations)


def _with_bodies(eqn: Equation, scope: int, sharding: Sharding, replicas: int) -> Equation:
    inner = iter(sharding.dims.inner_scopes(scope, eqn))
    if eqn.primitive.name in CUSTOM_VJPS:  # derivatives have been taken
        (body,) = bodies(eqn)
        fun = jaxpr_as_fun(_rewritten(body.jaxpr, next(inner), sharding, replicas))
        return called_instead(eqn, fun, eqn.invars)
    return replace_bodies(eqn, lambda body: _rewritten(body, next(inner), sharding, replicas))


class _Body:
    """A program or a body inside it, with the producers and readers of its values."""

    def __init__(self, jaxpr: Jaxpr, scope: int, sharding: Sharding) -> None:
        self._equations, self._scope, self._sharding = jaxpr.eqns, scope, sharding
        self._maker: dict[Var, Equation] = {v: e for e in jaxpr.eqns for v in e.outvars}
        read = [v for e in jaxpr.eqns for v in e.invars]
        self._reads = Counter(v for v in (*read, *jaxpr.outvars) if is_var(v))
        self._uses: Mapping[Var, Use] = {
            use.eqn.outvars[0]: use
            for use in sharding.dims.uses
            if use.scope == scope and use.eqn.outvars
        }

    def totals(self) -> Iterator[list[Equation]]:
        """Yield the gradients whose parts each device can add before they are summed over devices.

        A gradient is given as all equations that only lead from two or more parts to the whole,
        which the last of them makes.
        """
        if not self._sharding.axis_of:
            return
        told: set[int] = set()
        for eqn in reversed(self._equations):
            if eqn.primitive.name not in GRADIENT_SUMS or id(eqn) in told:
                continue
            sides = [self._leading_to(v) for v in eqn.invars]
            found = [*(e for side in sides for e in side), eqn]
            if all(sides) and self._is_local(eqn) and len(set(map(self._summed, found))) <= 2:
                told.update(map(id, found))
                yield found

    def _leading_to(self, atom: Atom) -> list[Equation]:
        """Return the equations, used by nothing else, that make a value from each device's part."""
        if not is_var(atom) or atom not in self._maker or self._reads[atom] != 1:
            return []
        eqn = self._maker[atom]
        if self._summed(eqn):
            return [eqn]
        if (
            eqn.primitive.name in GRADIENT_SUMS | FORMS
            and self._is_local(eqn)
            and not _narrows(eqn)
        ):
            found = [e for v in eqn.invars for e in self._leading_to(v)]
            return [*found, eqn] if found else []
        return []

    def _summed(self, eqn: Equation) -> tuple[str, ...]:
        """Return the axes over which a part of a gradient must be summed; else none."""
        if eqn.primitive.name not in PARTIAL_SUMS or len(eqn.outvars) > 1:
            return ()
        runs = self._runs(eqn)
        (kept,) = runs.kept_outs
        whole = runs.outs == runs.kept_outs and not cut_axes(kept) & set(runs.summed)
        return runs.summed if whole else ()

    def _is_local(self, eqn: Equation) -> bool:
        """Return whether each device makes its shard of the result from its own operand shards."""
        runs = self._runs(eqn)
        return runs.ins == runs.kept_ins and runs.outs == runs.kept_outs

    def _runs(self, eqn: Equation) -> Execution:
        return execution(self._uses[eqn.outvars[0]], self._sharding)

    def _spec(self, atom: Atom) -> Spec:
        return self._sharding.spec(atom, self._scope)

    def joined(self, members: Sequence[Equation]) -> Equation:
        """Return one equation in place of those that lead to a gradient.

        It adds the gradient's parts, sums them over the devices, and adds what is whole already.
        """
        root = members[-1].outvars[0]
        inside = {e.outvars[0]: e for e in members}
        partial = [e for e in members if self._summed(e)]
        axes = self._summed(partial[0])
        reads = [v for e in partial for v in e.invars]
        others = [v for e in members if e not in partial for v in e.invars if v not in inside]
        specs = [spec for e in partial for spec in self._runs(e).ins]

        def value(atom: Atom, given: Callable[[Atom], Any], local: bool) -> Any:
            """Return the value of the tree ending in `atom`, or None if nothing in it is given."""
            eqn = inside.get(atom) if is_var(atom) else None
            if eqn is None or eqn in partial:
                return given(atom)
            parts_of = [value(v, given, local) for v in eqn.invars]
            there = [x for x in parts_of if x is not None]
            if not there:
                return None
            if eqn.primitive.name in GRADIENT_SUMS:
                return there[0] if len(there) == 1 else jax.lax.add(*there)
            shape = self._local_shape(eqn.outvars[0]) if local else atom.aval.shape
            return _in_form(eqn, there[0], shape)

        def local(*values: Any) -> Any:
            left = list(values)
            made: dict[Atom, Any] = {}
            for eqn in partial:
                own, left = left[: len(eqn.invars)], left[len(eqn.invars) :]
                (made[eqn.outvars[0]],) = _applied(eqn, own)
            return [jax.lax.psum(value(root, made.get, True), axes)]

        def whole(*values: Any) -> Any:
            (summed,) = self._mapped(local, specs, [self._spec(root)])(*values[: len(reads)])
            known: dict[Atom, Any] = dict(zip(others, values[len(reads) :], strict=True))
            rest = value(root, known.get, False)
            return summed if rest is None else jax.lax.add(summed, rest)

        return called_instead(members[-1], whole, [*reads, *others])

    def alone(self, eqn: Equation) -> Equation:
        """Return a product or kernel that each device computes from its own shards."""
        runs = self._runs(eqn)

        def local(*values: Any) -> list[Any]:
            made = _applied(eqn, values)
            return [jax.lax.psum(x, runs.summed) for x in made] if runs.summed else made

        return called_instead(eqn, self._mapped(local, runs.ins, runs.outs), eqn.invars)

    def _mapped(
        self, fun: Callable[..., Any], ins: Sequence[Spec], outs: Sequence[Spec]
    ) -> Callable[..., Any]:
        return jax.shard_map(
            fun,
            mesh=abstract_mesh(self._sharding.sizes),
            in_specs=tuple(PartitionSpec(*spec) for spec in ins),
            out_specs=[PartitionSpec(*spec) for spec in outs],
            check_vma=False,  # it does not know the axis that a `jax.vmap` adds
        )

    def _local_shape(self, var: Var) -> tuple[int, ...]:
        sizes, spec = self._sharding.sizes, self._spec(var)
        return tuple(n // parts((a,), sizes) for n, a in zip(var.aval.shape, spec, strict=True))


def _narrows(eqn: Equation) -> bool:
    """Return whether a result has fewer bits than its operand: parts are summed before that."""
    widths = [v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars)]
    return widths[0] > widths[-1]


def _applied(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Return an equation's results for other operands, which may have other lengths."""
    named = [(v, x) for v, x in zip(eqn.invars, values, strict=True) if is_var(v)]
    reads = dict(named)
    return list(jaxpr_as_fun(Jaxpr(list(reads), [eqn], eqn.outvars))(*reads.values()))


def _in_form(eqn: Equation, value: Any, shape: Sequence[int]) -> Any:
    """Convert, reshape or transpose a value as `eqn` does.

    Args:
        eqn: the equation.
        value: its operand.
        shape: the shape of the result.
    """
    if eqn.primitive.name == "reshape":
        return jax.lax.reshape(value, shape, eqn.params["dimensions"])
    (made,) = _applied(eqn, [value])
    return made
