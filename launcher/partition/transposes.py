"""Swap the operands of products that are transposed afterwards.

The gradient of a weight is traced as `transpose(dot_general(cotangent, input))`. XLA multiplies
`input` by `cotangent` instead, but not in products with batch dimensions, which those of a replica
become (`runtime.programs.stage_programs`): there the transposition is a pass over the whole
gradient. A product's left operand is copied unless it is contracted along its last dimension, so
that they are swapped only where less is copied. Pure.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jax.lax import DotAlgorithm

from launcher.trace import Equation, Jaxpr, Var, bodies, is_var, replace_bodies


def without_transposes(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with `transpose(a · b)` as `b · a`, inside loops and checkpoints, too."""
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v))
    uses.update(v for v in jaxpr.outvars if is_var(v))
    products: dict[Var, int] = {}  # those that nothing has read, by their place
    equations: list[Equation | None] = []
    for eqn in jaxpr.eqns:
        if bodies(eqn):  # kernels have none, and stay as they are written
            eqn = replace_bodies(eqn, without_transposes)
        if eqn.primitive.name == "dot_general" and uses[eqn.outvars[0]] == 1:
            products[eqn.outvars[0]] = len(equations)
        elif eqn.primitive.name == "transpose" and is_var(of := eqn.invars[0]):
            at = products.get(of)
            product = None if at is None else equations[at]
            if at is not None and product and _swaps(product, eqn.params["permutation"]):
                equations[at] = None
                eqn = _the_other_way(product, eqn)
        equations.append(eqn)
    return dataclasses.replace(jaxpr, eqns=[eqn for eqn in equations if eqn is not None])


def _swaps(product: Equation, permutation: Sequence[int]) -> bool:
    """Return whether a permutation puts a product's right operand first, and a swap copies less.

    The result has the batch dimensions, then the rest of the left operand, then of the right.
    """
    contracted, (batch, _) = product.params["dimension_numbers"]
    if product.params.get("out_sharding") is not None:
        return False
    if isinstance(product.params["precision"], DotAlgorithm):  # it may tell left from right
        return False
    first = len(batch)
    left = product.invars[0].aval.ndim - first - len(contracted[0])
    all_dims = range(len(permutation))
    swapped = [*all_dims[:first], *all_dims[first + left :], *all_dims[first : first + left]]
    copies = [
        0 if x.aval.ndim - 1 in dims else x.aval.size
        for x, dims in zip(product.invars, contracted, strict=True)
    ]
    return list(permutation) == swapped and copies[1] <= copies[0] + product.outvars[0].aval.size


def _the_other_way(product: Equation, transpose: Equation) -> Equation:
    """Return the product of the operands in the other order, in place of the transposed one."""
    params = dict(product.params)
    params["dimension_numbers"] = tuple((b, a) for a, b in params["dimension_numbers"])
    if isinstance(precision := params["precision"], tuple):
        params["precision"] = precision[::-1]
    return product.replace(invars=product.invars[::-1], outvars=transpose.outvars, params=params)
