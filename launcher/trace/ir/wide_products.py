"""Products of 16 bits in 32, for GPUs that have no others of bfloat16.

On these XLA computes a product of bfloat16 in float32, and refuses one that asks for another
algorithm by name, as `jax.nn.dot_product_attention` does. Said in the program, all that is planned
knows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from launcher.trace.ir.jaxpr import (
    Equation,
    Jaxpr,
    jaxpr_as_fun,
    make_jaxpr_and_shape,
    rewritten_params,
    splice,
)
from launcher.trace.ir.primitive_kinds import CONTRACTIONS


def products_in_fp32(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the products of another's bfloat16 in float32.

    Their results are of the types that they were, and so are those of their derivatives.

    Args:
        fun: takes and returns pytrees of arrays. Rules for derivatives that it brings itself are
            left as they are.

    Returns:
        The same function of the same arguments. It traces `fun` whenever it is called.
    """

    def wide(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        traced, shape = make_jaxpr_and_shape(lambda *x: fun(*jax.tree.unflatten(tree, x)), *leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), jaxpr_as_fun(_wide(traced))(*leaves))

    return wide


def _wide(jaxpr: Jaxpr) -> Jaxpr:
    return dataclasses.replace(jaxpr, eqns=[new for eqn in jaxpr.eqns for new in _instead(eqn)])


def _instead(eqn: Equation) -> list[Equation]:
    if eqn.primitive.name not in CONTRACTIONS:
        return [eqn.replace(params=rewritten_params(eqn, _wide))]
    if all(v.aval.dtype != jnp.bfloat16 for v in eqn.invars):
        return [eqn]

    def product(*operands: jax.Array) -> list[jax.Array]:
        params = {**eqn.params, "precision": None, "preferred_element_type": jnp.dtype(jnp.float32)}
        made: jax.Array = eqn.primitive.bind(*(x.astype(jnp.float32) for x in operands), **params)
        return [made.astype(eqn.outvars[0].aval.dtype)]

    *before, last = splice(product, eqn.invars)[0]
    new = [*before, last.replace(outvars=eqn.outvars)]
    return [each.replace(source_info=eqn.source_info) for each in new]
