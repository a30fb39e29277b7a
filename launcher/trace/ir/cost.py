"""Cost of equations: floating-point operations and bytes moved.

Counted as the field does for MFU: a multiply-add is two operations; matrix products and
convolutions are counted from their shapes, everything else one operation an output element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from launcher.trace.ir.cudnn import attended_pairs, attention_sizes
from launcher.trace.ir.jaxpr import DropVar, Equation, is_var, nbytes, total
from launcher.trace.ir.primitive_kinds import (
    ATTENTION_PRODUCTS,
    BROADCASTS,
    OWN_KERNELS,
    PRODUCTS,
)


def flops(eqn: Equation) -> float:
    """Floating-point operations of one execution of an equation."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        depth: int = math.prod(eqn.invars[0].aval.shape[d] for d in contract)
        return 2.0 * depth * eqn.outvars[0].aval.size
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = eqn.params["dimension_numbers"].rhs_spec[0]
        per_output: float = math.prod(kernel) / kernel[out_features]
        return 2.0 * per_output * eqn.outvars[0].aval.size
    if name in ATTENTION_PRODUCTS:
        (batch, length, heads, size), keys = attention_sizes(eqn)
        pairs = attended_pairs(eqn.params, length, keys)
        return 2.0 * ATTENTION_PRODUCTS[name] * batch * heads * size * pairs
    if name in OWN_KERNELS:
        return float(eqn.params["of"].flops([v.aval for v in eqn.invars]))
    inside = total(eqn, lambda jaxpr: program_flops(jaxpr.eqns))
    if inside is not None:
        return inside
    return float(sum(v.aval.size for v in eqn.outvars if hasattr(v.aval, "size")))


def backward_share(eqn: Equation) -> float:
    """Return the work of an equation's gradient over its own: two products for each of its own.

    Fused attention's computes the scores again: five for two.
    """
    if eqn.primitive.name in OWN_KERNELS:
        return float(eqn.params["of"].backward_share)
    return 2.5 if eqn.primitive.name in ATTENTION_PRODUCTS else 2.0


def program_flops(equations: Iterable[Equation]) -> float:
    """Floating-point operations of a run of equations."""
    return sum(flops(eqn) for eqn in equations)


def matmul_flops(equations: Iterable[Equation], skipped: Set[Equation] = frozenset()) -> float:
    """Operations of the matrix products and convolutions alone: the model FLOPs that MFU counts.

    Args:
        equations: the equations.
        skipped: those, also in bodies, that do not count.
    """
    found = 0.0
    for eqn in equations:
        if eqn in skipped:
            continue
        if eqn.primitive.name in PRODUCTS:
            found += flops(eqn)
        else:
            found += total(eqn, lambda jaxpr: matmul_flops(jaxpr.eqns, skipped)) or 0.0
    return found


def is_fused_attention(eqn: Equation) -> bool:
    """Return whether an equation is attention in one kernel, a hand-written one included."""
    own = eqn.primitive.name in OWN_KERNELS and eqn.params["of"].is_attention
    return own or eqn.primitive.name in ATTENTION_PRODUCTS


_TENSOR_CORE_BYTES = 16  # rows of matrices that tensor cores read as they are are multiples of it


def is_unaligned(eqn: Equation) -> bool:
    """Return whether an equation is products of a batch of matrices, the shortest side of them odd.

    Such are attention's with heads of 108. An odd number of positions, which is longer than a head,
    is not meant: no measurement says that it costs as much.
    """
    if eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][1][0]:
        return False
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval for v in eqn.invars)
    depth, count = (math.prod(lhs.shape[d] for d in dims) for dims in (contract, batch))
    shortest = min(depth, lhs.size // (depth * count), rhs.size // (depth * count))
    return bool(shortest * lhs.dtype.itemsize % _TENSOR_CORE_BYTES)


def moved_bytes(eqn: Equation) -> float:
    """Bytes that an equation reads and writes when nothing is fused.

    A broadcast moves none: the compiler repeats the values where they are read. On a device that
    has a part of the result, only that part is.
    """
    if eqn.primitive.name in BROADCASTS:
        return 0.0
    operands = {v: None for v in eqn.invars if is_var(v)}
    return float(
        sum(nbytes(v.aval) for v in operands)
        + sum(nbytes(v.aval) for v in eqn.outvars if not isinstance(v, DropVar))
    )
