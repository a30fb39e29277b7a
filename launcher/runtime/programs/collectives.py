"""Shard values inside a stage's programs, and sum gradients over the replicas explicitly.

The programs are traced for an abstract mesh, without devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from launcher.partition import (
    DATA,
    ROWS,
    Bucket,
    Layout,
    Name,
    Spec,
    TaskProgram,
    are_packed,
    axes,
    scatter_dim,
    sum_places,
)
from launcher.partition import parts as count_parts
from launcher.trace import Atom, Equation, Jaxpr, free_vars, jaxpr_as_fun

GRADIENT_SUM = "gradient_sum"  # the scope of a bucket's operations, by which they are found again


def partition_spec(spec: Spec) -> PartitionSpec:
    """Return a spec in JAX's form, without the trailing dimensions that are not sharded."""
    last = max((d + 1 for d, axis in enumerate(spec) if axis), default=0)
    return PartitionSpec(*spec[:last])


def constrained(layout: Layout, value: Any, spec: Spec) -> Any:
    """Constrain a value to have this spec from here on."""
    sharding = NamedSharding(abstract_mesh(layout.sizes), partition_spec(spec))
    return jax.lax.with_sharding_constraint(value, sharding)


@dataclass(frozen=True, eq=False)
class BucketSum:
    """The explicit sum of a bucket's gradients over the replicas, by one collective.

    XLA would sum each gradient by itself, and does not turn a sum and a slice into a reduce-scatter
    on CPUs. `packed` and `total` are parts of one replica's program, under
    `jax.vmap(spmd_axis_name=DATA)`; `whole` takes what that leaves.

    Attributes:
        layout: the layout of the submesh.
        bucket: the bucket.
        number: the bucket's number in its program.
        packs: whether the gradients are packed into one array.
    """

    layout: Layout
    bucket: Bucket
    number: int
    packs: bool

    def packed(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arrays to sum, given a replica's gradients."""

        def local(*parts: Any) -> tuple[Any, ...]:
            own = [part.astype(self.bucket.dtype) for part in parts]
            if self._scatters:
                return (jnp.concatenate(self._rows(own), axis=1).reshape(-1),)
            return (jnp.concatenate([x.reshape(-1) for x in own]),) if self._is_flat else (*own,)

        return self._locally(local, self._before, self._crossing, parts)

    def total(self, packed: Sequence[Any]) -> tuple[Any, ...]:
        """Return the sum over the replicas of what `packed` returns, or this one's share of it."""

        def local(*packed: Any) -> tuple[Any, ...]:
            if self._scatters:
                return (jax.lax.psum_scatter(packed[0], DATA, tiled=True),)
            return tuple(jax.lax.psum(packed, DATA))

        return self._locally(local, self._crossing, self._crossing, packed)

    def whole(self, totals: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
        """Return the gradients, with the specs of `Layout.gradient`.

        Args:
            totals: what `total` returns, of all replicas.
            parts: all replicas' gradients, `[replicas, …]`, of which only the types are read.
        """
        after = [self.layout.gradient(i) for i in self.bucket.operands]
        shapes = [_local_shape(p, s, self.layout) for p, s in zip(parts, self._before, strict=True)]

        def local(*totals: Any) -> tuple[Any, ...]:
            found = self._unpacked([x[0] for x in totals], shapes)
            return tuple(x.astype(part.dtype) for x, part in zip(found, parts, strict=True))

        of_replicas = [(DATA, *spec) for spec in self._crossing]
        outs = after if self._scatters else self._before
        summed = self._locally(local, of_replicas, outs, totals)
        return [constrained(self.layout, x, spec) for x, spec in zip(summed, after, strict=True)]

    @property
    def _scatters(self) -> bool:
        return self.bucket.collective == "reduce-scatter"

    @property
    def _is_flat(self) -> bool:
        """Whether one flat array crosses, rather than each gradient in its own shape."""
        return self._scatters or (self.packs and len(self.bucket.operands) > 1)

    @property
    def _before(self) -> list[Spec]:
        return [self.layout.operand(i) for i in self.bucket.operands]

    @property
    def _crossing(self) -> list[Spec]:
        """The specs of the arrays that cross: every device packs its own shards."""
        others = tuple(axis for axis in self.layout.sizes if axis != DATA)
        return [(others,)] if self._is_flat else self._before

    def _locally(
        self, fun: Callable[..., Any], ins: Sequence[Spec], outs: Sequence[Spec], of: Sequence[Any]
    ) -> Any:
        with jax.named_scope(f"{GRADIENT_SUM}_{self.number}"):
            return jax.shard_map(
                fun,
                mesh=abstract_mesh(self.layout.sizes),
                in_specs=tuple(PartitionSpec(*spec) for spec in ins),
                out_specs=tuple(PartitionSpec(*spec) for spec in outs),
                check_vma=False,  # packed with one cut along `model`, any seems to vary along it
            )(*of)

    def _rows(self, own: Sequence[Any]) -> list[Any]:
        """Return gradients with a row for each replica.

        The collective leaves replica r with row r of its operand: a gradient enters it with its
        scattered dimension first.
        """
        at = [scatter_dim(self.layout, i) or 0 for i in self.bucket.operands]
        replicas = self.layout.sizes[DATA]
        return [jnp.moveaxis(x, d, 0).reshape(replicas, -1) for x, d in zip(own, at, strict=True)]

    def _unpacked(self, totals: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        """Return this device's part of each sum; `shapes`: of its gradients."""
        if not self._is_flat:
            return totals
        share = self.layout.sizes[DATA] if self._scatters else 1
        ends = np.cumsum([math.prod(shape) // share for shape in shapes])
        pieces = zip(jnp.split(totals[0], ends[:-1]), shapes, strict=True)
        if self._scatters:
            operands = self.bucket.operands
            return [self._shard(i, *each) for i, each in zip(operands, pieces, strict=True)]
        return [piece.reshape(shape) for piece, shape in pieces]

    def _shard(self, i: int, piece: Any, shape: tuple[int, ...]) -> Any:
        d, sizes = scatter_dim(self.layout, i) or 0, self.layout.sizes
        rest = [n for at, n in enumerate(shape) if at != d]
        shard = jnp.moveaxis(piece.reshape(shape[d] // sizes[DATA], *rest), 0, d)
        if ROWS in axes(self.layout.gradient(i)[d]):
            size = shard.shape[d] // sizes[ROWS]
            start = jax.lax.axis_index(ROWS) * size
            shard = jax.lax.dynamic_slice_in_dim(shard, start, size, d)
        return shard


def bucket_sums(layout: Layout, buckets: Sequence[Bucket]) -> list[BucketSum]:
    """Return the sums of a program's buckets."""
    packs = are_packed(buckets)
    return [BucketSum(layout, bucket, n, packs) for n, bucket in enumerate(buckets)]


def sum_buckets(
    layout: Layout, buckets: Sequence[Bucket], parts: Mapping[int, Any]
) -> dict[int, Any]:
    """Sum gradients over the replicas, those of a bucket by one collective.

    Args:
        layout: the layout of the submesh.
        buckets: the buckets.
        parts: each gradient of all replicas, `[replicas, …]`, by its operand.

    Returns:
        The gradients, with the specs of `Layout.gradient`.
    """
    found: dict[int, Any] = {}
    for each in bucket_sums(layout, buckets):
        own = [parts[i] for i in each.bucket.operands]
        totals = jax.vmap(lambda own, s=each: s.total(s.packed(own)), spmd_axis_name=DATA)(own)
        found.update(zip(each.bucket.operands, each.whole(totals, own), strict=True))
    return found


def with_sums(
    program: TaskProgram, sums: Sequence[BucketSum]
) -> Callable[..., tuple[Sequence[Any], list[Any]]]:
    """Return a replica's program with its buckets summed where `sum_places` says.

    It is `fun(summand, *inputs) -> (the program's results, what each bucket's `total` returns)`,
    where `summand(name, value)` returns what is summed of a gradient.
    """
    closed, places = program.closed, sum_places(program, [each.bucket for each in sums])
    results = zip(program.outputs, closed.outvars, strict=True)
    grads = {name: v for name, v in results if name.kind == "grad"}
    of_bucket = [[Name("grad", i) for i in each.bucket.operands] for each in sums]

    def fun(summand: Callable[[Name, Any], Any], *given: Any) -> tuple[Sequence[Any], list[Any]]:
        known = dict(zip(closed.invars, (*program.constants, *given), strict=True))
        totals: dict[int, Any] = {}
        latest: tuple[int, ...] = ()
        begin = 0

        def run(equations: Sequence[Equation], outs: Sequence[Atom]) -> Sequence[Any]:
            reads = free_vars(equations, outs)
            return jaxpr_as_fun(Jaxpr(reads, equations, outs))(*(known[v] for v in reads))

        for here in places:
            now, rest = closed.eqns[begin : here.place], closed.eqns[here.place :]
            made = {v for eqn in now for v in eqn.outvars}
            leaves = [v for v in free_vars(rest, closed.outvars) if v in made]
            known.update(zip(leaves, run(now, leaves), strict=True))
            packed = {}
            for k in here.buckets:
                parts = run((), [grads[n] for n in of_bucket[k]])
                packed[k] = sums[k].packed(list(map(summand, of_bucket[k], parts)))
            held = [totals[k] for k in latest], [known[v] for v in here.ties]
            if here.ties:
                _, *held = jax.lax.optimization_barrier((packed, *held))
            totals.update(zip(latest, held[0], strict=True))
            known.update(zip(here.ties, held[1], strict=True))
            totals.update((k, sums[k].total(x)) for k, x in packed.items())
            latest, begin = here.buckets, here.place
        outs = run(closed.eqns[begin:], closed.outvars)
        return outs, [totals[k] for k in range(len(sums))]

    return fun


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


def _local_shape(of_all: Any, spec: Spec, layout: Layout) -> tuple[int, ...]:
    """Return the shape of a device's part of its replica's gradient; `of_all`: all replicas'."""
    cut = zip(of_all.shape[1:], spec, strict=True)
    return tuple(n // count_parts((axis,), layout.sizes) for n, axis in cut)


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Return the axes of a submesh, without its devices."""
    auto = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
