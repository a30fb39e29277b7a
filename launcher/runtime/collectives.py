"""Sharding inside a stage's programs: constraints and the explicit reduce-scatter.

The programs are traced for an abstract mesh, without devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from launcher.partition.sharding.layout import DATA, ROWS, Layout
from launcher.partition.sharding.named_dims import Spec, axes


def partition_spec(spec: Spec) -> PartitionSpec:
    """Return a spec in JAX's form, without the trailing dimensions that are not sharded."""
    last = max((d + 1 for d, axis in enumerate(spec) if axis), default=0)
    return PartitionSpec(*spec[:last])


def constrained(layout: Layout, value: Any, spec: Spec) -> Any:
    """Constrain a value to have this spec from here on."""
    sharding = NamedSharding(abstract_mesh(layout.sizes), partition_spec(spec))
    return jax.lax.with_sharding_constraint(value, sharding)


def scatter(layout: Layout, operand: int, parts: Any) -> Any:
    """Sum an operand's gradient over the replicas and leave each device with its shard.

    This is an explicit reduce-scatter, since XLA does not turn a sum and a slice into one on CPUs.

    Args:
        layout: the layout of the submesh.
        operand: the operand's index among those of the loss.
        parts: the gradients of all replicas, `[replicas, …]`.
    """
    before, after = layout.operand(operand), layout.gradient(operand)
    at = next(d for d, axis in enumerate(after) if DATA in axes(axis))
    own = axes(before[at])
    rest = axes(after[at])[len(own) :]
    if axes(after[at])[: len(own)] != own or rest not in ((DATA,), (DATA, ROWS)):
        return constrained(layout, parts.sum(0), after)  # cut in another order

    def local(part: Any) -> Any:
        part = jax.lax.psum_scatter(part[0], DATA, scatter_dimension=at, tiled=True)
        if ROWS in rest:
            size = part.shape[at] // layout.sizes[ROWS]
            part = jax.lax.dynamic_slice_in_dim(part, jax.lax.axis_index(ROWS) * size, size, at)
        return part

    return jax.shard_map(
        local,
        mesh=abstract_mesh(layout.sizes),
        in_specs=PartitionSpec(DATA, *before),
        out_specs=PartitionSpec(*after),
    )(parts)


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Return the axes of a submesh, without its devices."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))
