"""Buckets: which gradients are summed over the replicas by one collective, and in which order.

Gradients are packed in the order in which the backward pass makes them, so that a bucket's sum can
run under what is left of the pass (Li et al., "PyTorch Distributed", VLDB 2020). Pure; the planner
prices the buckets and the runtime sums them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from launcher.partition.reduction import Reduction
from launcher.partition.sharding.layout import DATA, ROWS, Layout
from launcher.partition.sharding.named_dims import axes, parts
from launcher.partition.slicing import accumulator_dtype
from launcher.partition.task_programs import TaskProgram
from launcher.trace import Loss


@dataclass(frozen=True)
class Bucket:
    """Gradients that one collective sums over the replicas.

    Attributes:
        collective: "all-reduce" or "reduce-scatter".
        dtype: the type in which they cross.
        operands: the operands of the loss that they are the gradients of, in order.
        nbytes: bytes on one device, where they are not sharded along data.
    """

    collective: str
    dtype: str
    operands: tuple[int, ...]
    nbytes: int


def gradient_order(program: TaskProgram) -> tuple[int, ...]:
    """Return the operands whose gradients a task program makes, the one that it makes first first.

    Gradients that one equation makes are in the order of the program's results.
    """
    jaxpr = program.closed
    made = {v: place for place, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    found = [
        (made.get(v, -1), name.of)  # type: ignore[arg-type]  # a literal is made by none
        for name, v in zip(program.outputs, jaxpr.outvars, strict=True)
        if name.kind == "grad"
    ]
    return tuple(i for _, i in sorted(found, key=lambda one: one[0]))


def in_buckets(
    operands: Iterable[int], loss: Loss, layout: Layout, by: Reduction
) -> tuple[Bucket, ...]:
    """Return the buckets of these gradients, the one that is complete first first.

    Types and collectives do not mix. A bucket is complete when its last gradient is made.

    Args:
        operands: the operands that the gradients belong to, in the order in which they are made.
        loss: the loss, of one slice of the batch.
        layout: the specs on the submesh.
        by: how the gradients are summed.
    """
    done: list[tuple[int, Bucket]] = []
    filling: dict[tuple[str, str], list[tuple[int, int, int]]] = {}

    def close(kind: tuple[str, str]) -> None:
        members = filling.pop(kind)
        bucket = Bucket(*kind, tuple(i for _, i, _ in members), sum(size for *_, size in members))
        done.append((members[-1][0], bucket))

    sized = [(i, *_crossing(loss, layout, i, by)) for i in operands]
    limit = by.bucket_limit(sum(size for *_, size in sized))
    for place, (i, dtype, size) in enumerate(sized):
        kind = "all-reduce" if scatter_dim(layout, i) is None else "reduce-scatter", dtype
        held = sum(each for *_, each in filling.get(kind, ()))
        if held and held + size > limit:
            close(kind)
        filling.setdefault(kind, []).append((place, i, size))
    for kind in list(filling):
        close(kind)
    return tuple(bucket for _, bucket in sorted(done, key=lambda one: one[0]))


def are_packed(buckets: Sequence[Bucket]) -> bool:
    """Return whether a program packs the gradients that it all-reduces, and keeps them apart.

    All in one bucket, they are left to XLA, which combines them without a copy.
    """
    return sum(bucket.collective == "all-reduce" for bucket in buckets) > 1


def _crossing(loss: Loss, layout: Layout, i: int, by: Reduction) -> tuple[str, int]:
    """Return the type in which a gradient crosses, and its bytes then."""
    wide: jnp.dtype = jnp.dtype(accumulator_dtype(loss.invars[i].aval.dtype))
    dtype = jnp.dtype(jnp.bfloat16) if by.dtype == "bf16" and wide == jnp.float32 else wide
    count = loss.invars[i].aval.size // parts(layout.operand(i), layout.sizes)
    return dtype.name, count * dtype.itemsize


def scatter_dim(layout: Layout, i: int) -> int | None:
    """Return the dimension along which each replica keeps its part of a gradient's sum.

    None: each keeps all of it, or the parts do not follow those of the operand, so that they are
    taken from the sum.
    """
    if not layout.is_scattered(i):
        return None
    before, after = layout.operand(i), layout.gradient(i)
    at = next(d for d, axis in enumerate(after) if DATA in axes(axis))
    own = axes(before[at])
    rest = axes(after[at])[len(own) :]
    follows = axes(after[at])[: len(own)] == own and rest in ((DATA,), (DATA, ROWS))
    return at if follows else None


def is_summed_in_every(layout: Layout, i: int) -> bool:
    """Return whether every microbatch sums a gradient, rather than the last one.

    It does where every pass gathers the parameter: neither may fit in memory whole.
    """
    return layout.is_gathered(i) and layout.is_scattered(i)
