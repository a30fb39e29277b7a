"""Shard values inside a stage's programs, and sum gradients over the replicas explicitly.

The programs are traced for an abstract mesh, without devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from launcher.partition import DATA, ROWS, Bucket, Layout, Spec, are_packed, axes, scatter_dim

GRADIENT_SUM = "gradient_sum"  # the scope of a bucket's operations, by which they are found again


def partition_spec(spec: Spec) -> PartitionSpec:
    """Return a spec in JAX's form, without the trailing dimensions that are not sharded."""
    last = max((d + 1 for d, axis in enumerate(spec) if axis), default=0)
    return PartitionSpec(*spec[:last])


def constrained(layout: Layout, value: Any, spec: Spec) -> Any:
    """Constrain a value to have this spec from here on."""
    sharding = NamedSharding(abstract_mesh(layout.sizes), partition_spec(spec))
    return jax.lax.with_sharding_constraint(value, sharding)


def sum_buckets(
    layout: Layout, buckets: Sequence[Bucket], parts: Mapping[int, Any]
) -> dict[int, Any]:
    """Sum gradients over the replicas, those of a bucket by one collective.

    These are explicit ones: XLA would sum each gradient by itself, and does not turn a sum and a
    slice into a reduce-scatter on CPUs.

    Args:
        layout: the layout of the submesh.
        buckets: the buckets.
        parts: each gradient of all replicas, `[replicas, …]`, by its operand.

    Returns:
        The gradients, with the specs of `Layout.gradient`.
    """
    packs = are_packed(buckets)
    found: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        of_bucket = [parts[i] for i in bucket.operands]
        with jax.named_scope(f"{GRADIENT_SUM}_{number}"):
            summed = _sum_bucket(layout, bucket, of_bucket, packs)
        found.update(zip(bucket.operands, summed, strict=True))
    return found


def _sum_bucket(layout: Layout, bucket: Bucket, parts: Sequence[Any], packs: bool) -> list[Any]:
    before = [layout.operand(i) for i in bucket.operands]
    after = [layout.gradient(i) for i in bucket.operands]
    scatters = bucket.collective == "reduce-scatter"

    def local(*parts: Any) -> tuple[Any, ...]:
        own = [part[0].astype(bucket.dtype) for part in parts]
        if scatters:
            found = _scattered(layout, bucket, own)
        else:
            found = _packed_sum(own) if packs else jax.lax.psum(own, DATA)
        return tuple(x.astype(part.dtype) for x, part in zip(found, parts, strict=True))

    summed = jax.shard_map(
        local,
        mesh=abstract_mesh(layout.sizes),
        in_specs=tuple(PartitionSpec(DATA, *spec) for spec in before),
        out_specs=tuple(PartitionSpec(*spec) for spec in (after if scatters else before)),
        check_vma=False,  # packed with one that is cut along `model`, any seems to vary along it
    )(*parts)
    return [constrained(layout, x, spec) for x, spec in zip(summed, after, strict=True)]


def copied(layout: Layout, operand: int, total: Any) -> Any:
    """Return a gradient's sum as `[replicas, …]`, each device with the copy that it has."""
    spec = layout.operand(operand)
    return _locally(layout, lambda x: x[None], spec, (DATA, *spec), total)


def of_copies(layout: Layout, operand: int, copies: Any) -> Any:
    """Return a gradient's sum, with the spec of `Layout.gradient`, given what `copied` returns."""
    spec = layout.operand(operand)
    total = _locally(layout, lambda x: x[0], (DATA, *spec), spec, copies)
    return constrained(layout, total, layout.gradient(operand))


def _locally(
    layout: Layout, fun: Callable[[Any], Any], before: Spec, after: Spec, value: Any
) -> Any:
    return jax.shard_map(
        fun,
        mesh=abstract_mesh(layout.sizes),
        in_specs=PartitionSpec(*before),
        out_specs=PartitionSpec(*after),
        check_vma=False,  # copies are equal, as far as it knows by chance
    )(value)


def _packed_sum(own: Sequence[Any]) -> list[Any]:
    if len(own) == 1:
        return [jax.lax.psum(own[0], DATA)]
    total = jax.lax.psum(jnp.concatenate([x.reshape(-1) for x in own]), DATA)
    pieces = jnp.split(total, np.cumsum([x.size for x in own])[:-1])
    return [piece.reshape(x.shape) for piece, x in zip(pieces, own, strict=True)]


def _scattered(layout: Layout, bucket: Bucket, own: Sequence[Any]) -> list[Any]:
    """Return this device's shard of each sum.

    The collective leaves replica r with row r of its operand: a gradient enters it with its
    scattered dimension first, as one row for each replica.
    """
    replicas = layout.sizes[DATA]
    at = [scatter_dim(layout, i) or 0 for i in bucket.operands]
    first = [jnp.moveaxis(x, d, 0) for x, d in zip(own, at, strict=True)]
    packed = jnp.concatenate([x.reshape(replicas, -1) for x in first], axis=1)
    total = jax.lax.psum_scatter(packed, DATA, scatter_dimension=0)
    pieces = jnp.split(total, np.cumsum([x.size // replicas for x in own])[:-1])
    found = []
    for i, d, x, piece in zip(bucket.operands, at, first, pieces, strict=True):
        shape = (x.shape[0] // replicas, *x.shape[1:])
        shard = jnp.moveaxis(piece.reshape(shape), 0, d)
        if ROWS in axes(layout.gradient(i)[d]):
            size = shard.shape[d] // layout.sizes[ROWS]
            start = jax.lax.axis_index(ROWS) * size
            shard = jax.lax.dynamic_slice_in_dim(shard, start, size, d)
        found.append(shard)
    return found


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Return the axes of a submesh, without its devices."""
    auto = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
