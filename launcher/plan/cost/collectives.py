"""Cost of sharding a program: the operations left to a device, and the bytes of its collectives.

Counted equation by equation, as `named_dims.execution` runs each. A sum over a dimension that is
cut ends in an all-reduce of the result, or in a reduce-scatter where the result is cut along the
same axis; an operand that is cut where the equation needs it whole is gathered. In the backward
pass the gradient of an operand that is whole along a dimension that the result is cut along is
summed: once for all uses of a value, since the runtime adds the parts first (but not those of a
look-up, whose gradient is scattered). Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.hardware import ClusterShape
from launcher.partition import (
    Execution,
    Holder,
    NamedDims,
    Recomputed,
    Sharding,
    Spec,
    Use,
    cut_axes,
    execution,
    parts,
    without,
)
from launcher.plan.cost.formulas import ring_seconds
from launcher.trace import (
    LENGTHENING,
    PRODUCTS,
    SEARCHES,
    SPREADING,
    Equation,
    Var,
    backward_share,
    dependents,
    flops,
    free_vars,
    has_tangent,
    is_fused_attention,
    is_unaligned,
    is_var,
    moved_bytes,
    nbytes,
)

Flow = Callable[[Use, Var], bool]  # whether gradients flow to a value that an equation has


@dataclass(frozen=True)
class Collective:
    """A collective of the devices along an axis.

    Attributes:
        kind: "all-reduce", "all-gather" or "reduce-scatter".
        axis: the axis, or several.
        size: bytes of the array on a device where it is whole along the axis.
        times: how often it runs.
        of: for the sum of a gradient, the value that it is the gradient of.
        again: whether the backward pass only repeats what the forward pass did.
    """

    kind: str
    axis: str | tuple[str, ...]
    size: float
    times: int = 1
    of: Holder | None = None
    again: bool = field(default=False, compare=False)

    @property
    def share(self) -> float:
        """Fraction of an all-reduce: gathering and scattering are half of one each."""
        return 1.0 if self.kind == "all-reduce" else 0.5

    def as_reduced(self, cluster: ClusterShape) -> float:
        """Return the bytes of all-reduces that take as long."""
        rate = 1.0 if self.kind == "all-reduce" else cluster.gather_rate
        return self.times * self.share * self.size / rate

    def seconds(
        self, sizes: Mapping[str, int], bandwidth: float, cluster: ClusterShape, starts: bool = True
    ) -> float:
        """Return the seconds that a ring takes.

        Args:
            sizes: number of devices along each axis.
            bandwidth: bytes/s between neighbours.
            cluster: the devices.
            starts: whether to count what it takes beside its bytes.
        """
        devices, count = parts((self.axis,), sizes), int(starts and self.size > 0)
        each = ring_seconds(self.kind, self.size, devices, bandwidth, cluster, count)
        return float(self.times * each)


@dataclass(frozen=True)
class Load:
    """What one device does.

    Attributes:
        product_flops: operations of matrix products in 16 bits.
        product_flops_fp32: operations of matrix products in 32 bits.
        product_results: elements of the results of matrix products.
        unaligned_flops: those of `product_flops` that are `is_unaligned`.
        attention_flops: operations of fused attention in 16 bits.
        launches: number of products, with the kernels around them, that a host launches.
        other_flops: operations of everything else.
        moved_bytes: bytes that everything else moves.
        backward_share: the backward pass's work over the forward pass's.
        forward: collectives of the forward pass.
        backward: collectives of the backward pass.
    """

    product_flops: float
    product_flops_fp32: float
    product_results: float
    unaligned_flops: float
    attention_flops: float
    launches: int
    other_flops: float
    moved_bytes: float
    backward_share: float
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]


def flow(equations: Iterable[Equation], sources: Sequence[Var]) -> Flow:
    """Return the gradient flow from `sources`: to what depends on them by floating-point values.

    Inside of bodies, gradients are taken to flow to everything.
    """
    reached = set(sources)
    for eqn in equations:
        if eqn.primitive.name != "stop_gradient" and not reached.isdisjoint(
            v for v in eqn.invars if is_var(v)
        ):
            reached.update(v for v in eqn.outvars if has_tangent(v.aval))
    return lambda use, var: use.scope > 0 or var in reached


def dependence(equations: Iterable[Equation], sources: Sequence[Var]) -> Flow:
    """Return the same as `flow` for the dependence of values on `sources`."""
    reached = dependents(equations, sources)
    return lambda use, var: use.scope > 0 or var in reached


def is_active(use: Use, flows: Flow) -> bool:
    """Return whether gradients flow through an equation."""
    return any(flows(use, v) for v in use.eqn.outvars)


def equation_load(use: Use, sharding: Sharding, flows: Flow) -> Load:
    """Return the load of one equation, alone."""
    eqn, share, parts_out = use.eqn, 1.0, 1.0
    forward: list[Collective] = []
    backward: list[Collective] = []
    if sharding.axis_of:
        runs = execution(use, sharding)
        cut = set().union(*map(cut_axes, runs.outs))
        parts_out = math.prod(sharding.sizes[axis] for axis in cut)
        share = parts_out * math.prod(sharding.sizes[axis] for axis in {*runs.summed} - cut)
        if any(map(any, (*runs.kept_ins, *runs.kept_outs))):
            forward, backward = _crossing(use, runs, sharding, flows)
    work = flops(eqn) * use.times / share
    product = eqn.primitive.name in PRODUCTS
    wide = product and eqn.invars[0].aval.dtype.itemsize >= 4
    fused = is_fused_attention(eqn) and not wide
    plain = product and not fused
    half = work if plain and not wide else 0.0
    results = eqn.outvars[0].aval.size * use.times / parts_out if plain else 0.0
    return Load(
        half,
        work if plain and wide else 0.0,
        results,
        half if is_unaligned(eqn) else 0.0,
        work if fused else 0.0,
        use.times if product else 0,
        0.0 if product else work,
        0.0 if product else moved_bytes(eqn) * use.times / share,
        backward_share(eqn),
        tuple(forward),
        tuple(backward),
    )


def _crossing(
    use: Use, runs: Execution, sharding: Sharding, flows: Flow
) -> tuple[list[Collective], list[Collective]]:
    """Return the collectives of an equation's forward and backward pass."""
    eqn, sizes = use.eqn, sharding.sizes
    active = is_active(use, flows)
    cut = set(runs.summed).union(*map(cut_axes, runs.outs))
    forward, backward = [], []
    for var, kept, made in zip(eqn.outvars, runs.kept_outs, runs.outs, strict=True):
        for axis in runs.summed if var is eqn.outvars[0] else ():
            scattered = axis in cut_axes(kept)
            size = _local(var, without(made, axis), sizes)
            kind = "reduce-scatter" if scattered else "all-reduce"
            forward.append(Collective(kind, axis, size, use.times))
            if scattered and active:
                backward.append(Collective("all-gather", axis, size, use.times))
        if active:  # a part is taken; its gradient is gathered
            for axis in _moved(kept, made) - set(runs.summed):
                size = _local(var, without(kept, axis), sizes)
                backward.append(Collective("all-gather", axis, size, use.times))
    for atom, kept, read in zip(eqn.invars, runs.kept_ins, runs.ins, strict=True):
        if not is_var(atom):
            continue
        gathered = _moved(kept, read)
        fixed = sharding.dims.is_fixed(use.scope, atom)
        wanted = active and has_tangent(atom.aval) and flows(use, atom) and not fixed
        for axis in gathered:
            if eqn.primitive.name in SEARCHES:  # each device's own find, and where it is
                finds = (v.aval.dtype.itemsize for v in (atom, eqn.outvars[0]))
                count = sizes[axis] * eqn.outvars[0].aval.size / parts(runs.outs[0], sizes)
                forward += [Collective("all-gather", axis, count * n, use.times) for n in finds]
                continue
            size = _local(atom, without(kept, axis), sizes)
            forward.append(Collective("all-gather", axis, size, use.times))
            if active and eqn.primitive.name in PRODUCTS:  # the other operand's gradient needs it
                backward.append(Collective("all-gather", axis, size, use.times, again=True))
        if wanted and (eqn.primitive.name in SPREADING or _is_stretched(atom, eqn)):
            for axis in cut - cut_axes(read):
                size = _local(atom, read, sizes)
                if axis in gathered:
                    backward.append(Collective("reduce-scatter", axis, size, use.times))
                else:
                    of = None if eqn.primitive.name == "gather" else (use.scope, atom)
                    backward.append(Collective("all-reduce", axis, size, use.times, of))
    return forward, backward


def _is_stretched(atom: Var, eqn: Equation) -> bool:
    """Return whether an operand is repeated along a dimension of length 1."""
    before, after = atom.aval.shape, eqn.outvars[0].aval.shape
    same = len(before) == len(after) and eqn.primitive.name not in LENGTHENING
    return same and any(a == 1 != b for a, b in zip(before, after, strict=True))


def _moved(kept: Spec, used: Spec) -> set[str]:
    """Return the axes that a value is sharded along as it is kept, but not as it is used."""
    pairs = zip(kept, used, strict=True)
    return {a for have, need in pairs for a in cut_axes((have,)) - cut_axes((need,))}


def loads(sharding: Sharding, flows: Flow) -> list[tuple[Use, Load]]:
    """Return the load of every equation of a program.

    Where several parts of a value's gradient have to be summed, they are added first: the sum is
    counted once, at the first of them.
    """
    dims = sharding.dims
    alone = [(use, equation_load(use, sharding, flows)) for use in dims.uses]
    joined = joined_sums(dims, [c for _, one in alone for c in one.backward])
    found = []
    for use, one in alone:
        backward = [joined.pop(_key(dims, c), None) if c.of else c for c in one.backward]
        left = tuple(c for c in backward if c is not None)
        found.append((use, dataclasses.replace(one, backward=left)))
    return found


def loads_again(
    again: Recomputed, spec: Callable[[Var], Spec], sizes: Mapping[str, int], flows: Flow
) -> list[tuple[Use, Load]]:
    """Return the load of every equation that a backward pass recomputes.

    Args:
        again: what it recomputes.
        spec: returns the spec of a value of the forward pass.
        sizes: the devices along each mesh axis.
        flows: as for `loads`.
    """
    inside = Sharding(NamedDims(again.equations), sizes)
    for v in free_vars(again.equations):
        inside.seed(v, spec(v))
    return [(use, one) for use, one in loads(inside, flows) if use.eqn not in again.kept]


SumKey = tuple[str | tuple[str, ...], Holder]


def joined_sums(dims: NamedDims, sums: Iterable[Collective]) -> dict[SumKey, Collective]:
    """Return the sums of gradients, one for each axis and value."""
    found: dict[SumKey, Collective] = {}
    for one in sums:
        if one.of is None:
            continue
        key = _key(dims, one)
        other = found.setdefault(key, one)
        if other.of != one.of:  # they meet where both come from
            (_, root), (_, own) = key[1], one.of
            size = one.size * nbytes(root.aval) / nbytes(own.aval)
            found[key] = dataclasses.replace(one, size=size, of=key[1])
    return found


def _key(dims: NamedDims, one: Collective) -> SumKey:
    assert one.of is not None
    return one.axis, dims.source(*one.of)


def _local(var: Var, spec: Spec, sizes: Mapping[str, int]) -> float:
    return nbytes(var.aval) / parts(spec, sizes)


def seconds(found: Load, sizes: Mapping[str, int], cluster: ClusterShape, link: float) -> float:
    """Return the seconds of one slice's forward and backward pass on one device."""
    forward, backward = (
        sum(one.seconds(sizes, link, cluster) for one in sums)
        for sums in (found.forward, found.backward)
    )
    work = work_seconds(found, cluster)
    return (work + forward) + (found.backward_share * work + backward)


def backward_work_seconds(found: Load, cluster: ClusterShape) -> float:
    """Return the seconds of the backward pass without its collectives."""
    return found.backward_share * work_seconds(found, cluster)


def work_seconds(found: Load, cluster: ClusterShape) -> float:
    """Return the seconds of one pass without its collectives."""
    other = cluster.element_seconds(found.other_flops, found.moved_bytes)
    return product_seconds(found, cluster) + other


def product_seconds(found: Load, cluster: ClusterShape) -> float:
    """Return the part of `work_seconds` that matrix products take."""
    attention = cluster.attention_seconds(found.attention_flops)
    return attention + cluster.product_seconds(
        found.product_flops, found.product_flops_fp32, found.product_results, found.unaligned_flops
    )
