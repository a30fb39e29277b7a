"""What cutting a program costs: operations a device still does, and bytes its collectives move.

Counted equation by equation under given specs. A sum over a dimension that is cut ends in an
all-reduce of the result, or in a reduce-scatter where the result is cut along the same axis. In the
backward pass, so does the gradient of an operand that is whole along a dimension that the result is
cut along. Pure; used by `plan.predict` and `sharding.choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.sharding.dims import Sharding, Spec, Use, axes, parts, without
from launcher.trace.cost import flops, moved_bytes
from launcher.trace.graph import Equation, Var, dependents, is_var, nbytes

PRODUCTS = ("dot_general", "conv_general_dilated")

Flow = Callable[[Use, Var], bool]  # whether gradients flow to a value that an equation has


@dataclass(frozen=True)
class Load:
    """What one device does: operations of matrix products (in 16 and in 32 bits) and of everything
    else, bytes that the latter move, and bytes all-reduced along each axis, forward and in the
    backward pass."""

    product_flops: float
    product_flops_fp32: float
    other_flops: float
    moved_bytes: float
    forward: Mapping[str, float]
    backward: Mapping[str, float]


def flow(equations: Iterable[Equation], sources: Sequence[Var]) -> Flow:
    """To what depends on `sources`; inside of bodies, to everything."""
    reached = dependents(equations, sources)
    return lambda use, var: use.scope > 0 or var in reached


def is_active(use: Use, flows: Flow) -> bool:
    """Whether gradients flow through an equation."""
    return any(flows(use, v) for v in use.eqn.outvars)


def load(use: Use, sharding: Sharding, flows: Flow) -> Load:
    """Of one equation."""
    eqn, sizes = use.eqn, sharding.sizes
    ins = [sharding.spec(v, use.scope) if is_var(v) else () for v in eqn.invars]
    outs = [sharding.spec(v, use.scope) for v in eqn.outvars]
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    kept = {a for spec in outs for axis in spec for a in axes(axis)}
    active, cut = is_active(use, flows), set(kept)
    for factor in use.factors or ():
        of_factor = {a for i, d in factor.operands if d < len(ins[i]) for a in axes(ins[i][d])}
        if not factor.results:
            for axis in of_factor - (cut - kept):
                summed = _local(eqn.outvars[0], without(outs[0], axis), sizes)
                if axis in kept:  # scattered, and its gradient gathered: half as much each
                    summed /= 2
                    if active:
                        backward[axis] = backward.get(axis, 0.0) + summed
                forward[axis] = forward.get(axis, 0.0) + summed
            cut |= of_factor
    if active and eqn.primitive.name in (*PRODUCTS, "broadcast_in_dim", "gather"):
        for i, atom in enumerate(eqn.invars):
            if not is_var(atom) or not _floating(atom) or not flows(use, atom):
                continue
            own = {a for axis in ins[i] for a in axes(axis)}
            for axis in cut - own:
                backward[axis] = backward.get(axis, 0.0) + _local(atom, ins[i], sizes)
    if use.factors is None:  # gathered, computed everywhere
        for atom, spec in zip(eqn.invars, ins, strict=True):
            for axis in {a for one in spec for a in axes(one)}:
                forward[axis] = forward.get(axis, 0.0) + _local(atom, spec, sizes)
        cut = set()
    share = 1.0
    for axis in cut:
        share *= sizes[axis]
    work = flops(eqn) * use.times / share
    product = eqn.primitive.name in PRODUCTS
    single = product and eqn.invars[0].aval.dtype.itemsize >= 4
    return Load(
        work if product and not single else 0.0,
        work if single else 0.0,
        0.0 if product else work,
        0.0 if product else moved_bytes(eqn) * use.times / share,
        {a: x * use.times for a, x in forward.items()},
        {a: x * use.times for a, x in backward.items()},
    )


def all_reduced(sharding: Sharding, flows: Flow) -> dict[str, tuple[list[float], list[float]]]:
    """The sums over devices that a program will hold: for each axis the bytes of every one, in the
    forward and in the backward pass."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for use in sharding.dims.uses:
        one = load(use, sharding, flows)
        for k, sums in enumerate((one.forward, one.backward)):
            for axis, size in sums.items():
                of = found.setdefault(axis, ([], []))[k]
                of += [size / use.times] * use.times
    return found


def all_reduce_seconds(size: float, devices: int, bandwidth: float, latency: float) -> float:
    """A ring's: each device sends `2 (n - 1) / n` of the bytes (Patarasuk and Yuan, 2009)."""
    if devices == 1 or not size:
        return 0.0
    return 2 * (devices - 1) * (size / devices / bandwidth + latency)


def gather_seconds(size: float, devices: int, bandwidth: float, latency: float) -> float:
    """Half an all-reduce: an all-gather or a reduce-scatter of `size` bytes in all."""
    return all_reduce_seconds(size, devices, bandwidth, latency) / 2


def _local(var: Var, spec: Spec, sizes: Mapping[str, int]) -> float:
    return nbytes(var.aval) / parts(spec, sizes)


def _floating(var: Var) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jnp.floating))


def seconds(found: Load, sizes: Mapping[str, int], cluster: ClusterShape, link: float) -> float:
    """Forward and, at twice the work, backward: of one slice, on one device."""
    return forward_seconds(found, sizes, cluster, link) + backward_seconds(
        found, sizes, cluster, link
    )


def forward_seconds(
    found: Load, sizes: Mapping[str, int], cluster: ClusterShape, link: float
) -> float:
    """One slice's work, and what is summed."""
    return work_seconds(found, cluster) + _reduced(found.forward, sizes, cluster, link)


def backward_seconds(
    found: Load, sizes: Mapping[str, int], cluster: ClusterShape, link: float
) -> float:
    """Twice the forward pass's work, and what is summed."""
    return 2 * work_seconds(found, cluster) + _reduced(found.backward, sizes, cluster, link)


def work_seconds(found: Load, cluster: ClusterShape) -> float:
    """Of one pass, without what is summed."""
    return cluster.work_seconds(
        found.product_flops, found.product_flops_fp32, found.other_flops, found.moved_bytes
    )


def _reduced(
    sums: Mapping[str, float], sizes: Mapping[str, int], cluster: ClusterShape, link: float
) -> float:
    return sum(
        all_reduce_seconds(size, sizes[axis], link, cluster.latency) for axis, size in sums.items()
    )
