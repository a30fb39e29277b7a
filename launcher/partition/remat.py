"""Rematerialisation in the backward pass, one or several layers at a time.

`none` keeps all that is needed, `full` nothing but the layers' inputs, `selective` the results of
products with weights, but not what attention computes inside (Korthikanti et al. 2022, arXiv
2205.05198). The others are those policies of `jax.checkpoint_policies` that take no arguments.
What the model checkpoints itself (`jax.checkpoint`, `nn.remat`) is done as it says, under any word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from launcher.base import REMAT_NAMES, parse_remat
from launcher.partition.assignment import PlanError
from launcher.trace import (
    CALLS_WITH_RULES,
    Equation,
    checkpoint_policy,
    is_checkpoint,
    matmul_flops,
    sub_jaxprs,
    walk,
)

Policy = Callable[..., Any]  # (primitive, *operand avals, **parameters) -> whether to keep
Layers = Sequence[Sequence[Equation]]

POLICIES: dict[str, Policy | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    **{name: getattr(jax.checkpoint_policies, name) for name in REMAT_NAMES[3:]},
}


def remat_of_stages(remat: str | Sequence[str], num_stages: int) -> tuple[str, ...]:
    """Return the remat string of each stage, from one for all or one for each.

    Raises:
        PlanError: a word is unknown, or there are not as many as stages.
    """
    names = (remat,) * num_stages if isinstance(remat, str) else tuple(remat)
    for name in names:
        try:
            parse_remat(name)
        except ValueError as error:
            raise PlanError(f"parallel.remat={error}") from error
    if len(names) != num_stages:
        raise PlanError(
            f"parallel.remat lists {len(names)} names for {num_stages} stages; give one for each, "
            "or one word for all"
        )
    return names


@dataclass(frozen=True, eq=False)
class RematSegment:
    """Consecutive equations of a stage's forward pass.

    Attributes:
        equations: the equations.
        policy: what of them is kept, the rest being recomputed together; None: all that the
            backward pass needs.
    """

    equations: list[Equation]
    policy: Policy | None


def segments(layers: Layers, remat: str, by_layer: bool = False) -> list[RematSegment]:
    """Cut a stage's forward pass into what is recomputed together, and what is not.

    Args:
        layers: the equations of each of its layers.
        remat: the word.
        by_layer: whether what is not recomputed is cut where layers end, too.
    """
    name = parse_remat(remat)
    found: list[RematSegment] = []
    together: object = None  # what the equations of one segment have in common
    for i, equations in enumerate(layers):
        policy = POLICIES[name.policy_of(i)]
        for eqn in equations:
            own = policy is not None and _is_own_checkpoint(eqn)
            kept = policy is None or own
            key = ("kept", i if by_layer else None) if kept else i // name.every
            if not found or key != together:
                found.append(RematSegment([], None if own else policy))
                together = key
            found[-1].equations.append(eqn)
    return found


@dataclass(frozen=True, eq=False)
class Recomputed:
    """Recomputation in a stage's backward pass.

    Attributes:
        equations: the equations of its forward pass that run again, at least in part.
        kept: those inside of them that do not.
    """

    equations: Sequence[Equation]
    kept: frozenset[Equation]

    @property
    def matmul_flops(self) -> float:
        """Operations of the matrix products and convolutions."""
        return matmul_flops(self.equations, self.kept)


def recomputed(layers: Layers, remat: str) -> Recomputed:
    """Return what the backward pass of a stage of these layers recomputes."""
    again: list[Equation] = []
    kept: set[Equation] = set()
    for segment in segments(layers, remat):
        policy = segment.policy
        for eqn in segment.equations:
            if policy and not keeps(policy, eqn):
                again.append(eqn)
                kept.update(_kept_inside(eqn, policy))
            elif policy is None and _is_own_checkpoint(eqn):
                again.append(eqn)
                kept.update(_kept_by_own(eqn))
    return Recomputed(again, frozenset(kept))


def own_layers(layers: Layers) -> int:
    """Return how many layers the model checkpoints itself: all of their products."""
    return sum(
        any(map(_is_own_checkpoint, layer))
        and not matmul_flops(e for e in layer if not _is_own_checkpoint(e))
        for layer in layers
    )


def keeps(policy: Policy, eqn: Equation) -> bool:
    """Return whether a policy keeps an equation's results."""
    said = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return bool(said) and type(said).__name__ != "RecomputeType"


def _is_own_checkpoint(eqn: Equation) -> bool:
    """Return whether an equation of the loss is, or holds, a `jax.checkpoint` that the user wrote.

    Functions with derivatives of their own recompute what these say.
    """
    inside = walk([eqn], lambda e: e.primitive.name not in CALLS_WITH_RULES)
    return any(map(is_checkpoint, inside))


def _inside(eqn: Equation) -> Iterator[Equation]:
    return (inner for jaxpr in sub_jaxprs(eqn) for inner in jaxpr.eqns)


def _kept_inside(eqn: Equation, policy: Policy) -> Iterator[Equation]:
    """Yield what a policy keeps of the bodies of an equation that runs again."""
    for inner in _inside(eqn):
        yield from walk([inner]) if keeps(policy, inner) else _kept_inside(inner, policy)


def _kept_by_own(eqn: Equation) -> Iterator[Equation]:
    """Yield what does not run again of the bodies of an equation with a checkpoint in it."""
    if is_checkpoint(eqn):
        yield from _kept_inside(eqn, checkpoint_policy(eqn))
        return
    for inner in _inside(eqn):
        yield from _kept_by_own(inner) if _is_own_checkpoint(inner) else walk([inner])
