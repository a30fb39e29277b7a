"""Rematerialisation by name: what a backward pass computes again, a layer at a time.

`none` keeps all that is needed, `full` nothing but the layers' inputs, `selective` the results of
products with weights, but not what attention computes inside (Korthikanti et al. 2022, arXiv
2205.05198). The others are those policies of `jax.checkpoint_policies` that take no arguments.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from launcher.partition.errors import PlanError
from launcher.trace.jaxpr import Equation

Policy = Callable[..., Any]  # (primitive, *operand avals, **parameters) -> whether to keep

POLICIES: dict[str, Policy | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    **{
        name: getattr(jax.checkpoint_policies, name)
        for name in (
            "checkpoint_dots",
            "checkpoint_dots_with_no_batch_dims",
            "dots_saveable",
            "dots_with_no_batch_dims_saveable",
            "everything_saveable",
            "nothing_saveable",
        )
    },
}


def remat_of_stages(remat: str | Sequence[str], num_stages: int) -> tuple[str, ...]:
    """The name for each stage, from one for all or one for each.

    Raises:
        PlanError: a name is unknown, or there are not as many as stages.
    """
    names = (remat,) * num_stages if isinstance(remat, str) else tuple(remat)
    for name in names:
        if name not in POLICIES:
            near = difflib.get_close_matches(name, POLICIES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise PlanError(f"parallel.remat={name} is not one of {', '.join(POLICIES)}{hint}")
    if len(names) != num_stages:
        raise PlanError(
            f"parallel.remat lists {len(names)} names for {num_stages} stages; give one for each, "
            "or one word for all"
        )
    return names


def recomputed(equations: Sequence[Equation], remat: str) -> list[Equation]:
    """The equations of a stage's forward pass that its backward pass runs again."""
    keep = POLICIES[remat]
    return [] if keep is None else [e for e in equations if not keeps(keep, e)]


def keeps(policy: Policy, eqn: Equation) -> bool:
    """Whether a policy keeps an equation's results."""
    return bool(policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params))


def is_checkpoint(eqn: Equation) -> bool:
    """Whether an equation is a `jax.checkpoint` that the user wrote, or its backward pass."""
    return "prevent_cse" in eqn.params
