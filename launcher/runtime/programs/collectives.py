"""Shard values inside a stage's programs, and sum gradients over the replicas explicitly.

The programs are traced for an abstract mesh, without devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
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
    axes,
    is_flat,
    packed_form,
    scatter_dim,
    sum_places,
    without,
)
from launcher.partition import parts as count_parts
from launcher.trace import Atom, Aval, Equation, Jaxpr, free_vars, jaxpr_as_fun

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
    on CPUs. Its methods are parts of one replica's program, under `jax.vmap(spmd_axis_name=DATA)`.

    Attributes:
        layout: the layout of the submesh.
        bucket: the bucket.
        number: the bucket's number in its program.
        is_flat: see `partition.is_flat`.
        stays_packed: see `partition.stays_packed`.
    """

    layout: Layout
    bucket: Bucket
    number: int
    is_flat: bool
    stays_packed: bool

    def packed(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Return the arrays to sum, given a replica's gradients."""

        def local(*parts: Any) -> tuple[Any, ...]:
            own = [part.astype(self.bucket.dtype) for part in parts]
            if self._scatters:
                return (jnp.concatenate(self._rows(own), axis=1).reshape(-1),)
            return (jnp.concatenate([x.reshape(-1) for x in own]),) if self.is_flat else (*own,)

        return self._locally(local, self._before, self._crossing, parts)

    @property
    def names(self) -> tuple[Name, ...]:
        """The names of what `total` returns."""
        if self.stays_packed:
            return (Name("packed", self.bucket),)
        return tuple(Name("grad", i) for i in self.bucket.operands)

    def total(self, packed: Sequence[Any], avals: Sequence[Aval]) -> Sequence[Any]:
        """Return the sums, or of those that are scattered this replica's share.

        Args:
            packed: what `packed` returns.
            avals: the gradients' types.
        """

        def local(*packed: Any) -> tuple[Any, ...]:
            if self._scatters:
                packed = (jax.lax.psum_scatter(packed[0], DATA, tiled=True),)
            else:
                packed = jax.lax.psum(packed, DATA)
            return packed if self.stays_packed else self._unpacked(packed, avals)

        after = [_of_replica(self.layout, i) for i in self.bucket.operands]
        after = self._crossing if self.stays_packed else after
        return self._locally(local, self._crossing, after, packed)

    def gradients(self, total: Any, avals: Sequence[Aval]) -> list[Any]:
        """Return the gradients, with the specs of `Layout.gradient`, not as one replica has them.

        Args:
            total: what `total` returns packed, of all replicas: `[replicas, elements]`.
            avals: the gradients' types.
        """
        operands = self.bucket.operands
        after = [_summed_spec(self.layout, i) for i in operands]
        found = _locally(
            self.layout,
            lambda total: self._unpacked((total[0],), avals),
            [(DATA, *spec) for spec in self._crossing],
            after,
            [total],
        )
        specs = map(self.layout.gradient, operands)
        return [constrained(self.layout, x, spec) for x, spec in zip(found, specs, strict=True)]

    def _unpacked(self, packed: Sequence[Any], avals: Sequence[Aval]) -> tuple[Any, ...]:
        """Return a device's shards of the sums; `avals`: the gradients' types."""
        sizes = self.layout.sizes
        cut = [zip(x.shape, spec, strict=True) for x, spec in zip(avals, self._before, strict=True)]
        shapes = [tuple(n // count_parts((axis,), sizes) for n, axis in each) for each in cut]
        if self._scatters:
            packed = self._shards(packed[0], shapes)
        elif self.is_flat:
            packed = _pieces(packed[0], shapes)
        return tuple(x.astype(of.dtype) for x, of in zip(packed, avals, strict=True))

    @property
    def _scatters(self) -> bool:
        return self.bucket.collective == "reduce-scatter"

    @property
    def _before(self) -> list[Spec]:
        return [self.layout.operand(i) for i in self.bucket.operands]

    @property
    def _crossing(self) -> list[Spec]:
        """The specs of the arrays that cross."""
        return [packed_form(self.bucket, self.layout)[1]] if self.is_flat else self._before

    def _locally(
        self, fun: Callable[..., Any], ins: Sequence[Spec], outs: Sequence[Spec], of: Sequence[Any]
    ) -> Sequence[Any]:
        with jax.named_scope(f"{GRADIENT_SUM}_{self.number}"):
            return _locally(self.layout, fun, ins, outs, of)

    def _rows(self, own: Sequence[Any]) -> list[Any]:
        """Return gradients with a row for each replica.

        The collective leaves replica r with row r of its operand: a gradient enters it with its
        scattered dimension first.
        """
        at = [scatter_dim(self.layout, i) or 0 for i in self.bucket.operands]
        replicas = self.layout.sizes[DATA]
        return [jnp.moveaxis(x, d, 0).reshape(replicas, -1) for x, d in zip(own, at, strict=True)]

    def _shards(self, total: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Return this device's shard of each sum; `shapes`: of its gradients."""
        sizes, found = self.layout.sizes, []
        at = [scatter_dim(self.layout, i) or 0 for i in self.bucket.operands]
        first = [
            (n[d] // sizes[DATA], *n[:d], *n[d + 1 :]) for n, d in zip(shapes, at, strict=True)
        ]
        for i, d, piece in zip(self.bucket.operands, at, _pieces(total, first), strict=True):
            shard = jnp.moveaxis(piece, 0, d)
            if ROWS in axes(self.layout.gradient(i)[d]):
                size = shard.shape[d] // sizes[ROWS]
                start = jax.lax.axis_index(ROWS) * size
                shard = jax.lax.dynamic_slice_in_dim(shard, start, size, d)
            found.append(shard)
        return found


def bucket_sums(
    layout: Layout, buckets: Sequence[Bucket], packed: Set[Bucket] = frozenset()
) -> list[BucketSum]:
    """Return the sums of a program's buckets, of which some stay `packed`."""
    return [
        BucketSum(layout, bucket, n, is_flat(bucket, buckets, layout.between), bucket in packed)
        for n, bucket in enumerate(buckets)
    ]


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

        def summed(own: Sequence[Any], each: BucketSum = each) -> Sequence[Any]:
            return each.total(each.packed(own), list(map(jax.typeof, own)))

        operands = each.bucket.operands
        totals = jax.vmap(summed, spmd_axis_name=DATA)([parts[i] for i in operands])
        found.update((i, of_replicas(layout, i, x)) for i, x in zip(operands, totals, strict=True))
    return found


def with_sums(
    program: TaskProgram, sums: Sequence[BucketSum]
) -> Callable[..., tuple[Sequence[Any], list[Any]]]:
    """Return a replica's program with its buckets summed where `sum_places` says.

    It is `fun(summand, *inputs) -> (the program's results, each bucket's `total`)`; a bucket gets
    `summand(name, value)` of each of its gradients.
    """
    closed, places = program.closed, sum_places(program, [each.bucket.operands for each in sums])
    grads = dict(zip(program.outputs, closed.outvars, strict=True))

    def fun(summand: Callable[[Name, Any], Any], *given: Any) -> tuple[Any, list[Any]]:
        known = dict(zip(closed.invars, (*program.constants, *given), strict=True))

        def run(equations: Sequence[Equation], outs: Sequence[Atom]) -> Sequence[Any]:
            reads = free_vars(equations, outs)
            body = jaxpr_as_fun(Jaxpr(reads, equations, outs))
            return list(body(*(known[v] for v in reads)))

        totals: dict[int, Any] = {}
        latest: dict[int, Any] = {}
        begin = 0
        for here in places:
            now = closed.eqns[begin : here.place]
            made = [v for eqn in now for v in eqn.outvars]
            known.update(zip(made, run(now, made), strict=True))
            parts, packed = [], []
            for each in (sums[k] for k in here.buckets):
                names = [Name("grad", i) for i in each.bucket.operands]
                own = run((), [grads[n] for n in names])
                parts.append(list(map(summand, names, own)))
                packed.append(each.packed(parts[-1]))
            ties = [known[v] for v in here.ties]
            if ties:
                _, latest, ties = jax.lax.optimization_barrier((packed, latest, ties))
            elif latest:  # nothing else keeps the order of the last two
                packed, latest = jax.lax.optimization_barrier((packed, latest))
            known.update(zip(here.ties, ties, strict=True))
            totals |= latest
            latest = {}
            for k, own, arrays in zip(here.buckets, parts, packed, strict=True):
                latest[k] = sums[k].total(arrays, list(map(jax.typeof, own)))
            begin = here.place
        totals |= latest
        return run(closed.eqns[begin:], closed.outvars), [totals[k] for k in range(len(sums))]

    return fun


def of_replicas(layout: Layout, operand: int, each: Any) -> Any:
    """Return a gradient's sum with the spec of `Layout.gradient`.

    Args:
        layout: the layout of the submesh.
        operand: what it is the gradient of.
        each: `[replicas, …]`, each replica's copy, or its share of what is scattered.
    """
    before, whole = _of_replica(layout, operand), _summed_spec(layout, operand)
    (total,) = _locally(layout, lambda x: (x[0],), [(DATA, *before)], [whole], [each])
    return constrained(layout, total, layout.gradient(operand))


def _summed_spec(layout: Layout, operand: int) -> Spec:
    """Return the spec of a gradient's sum once its replicas' shares are one array."""
    is_whole = scatter_dim(layout, operand) is None
    return layout.operand(operand) if is_whole else layout.gradient(operand)


def _of_replica(layout: Layout, operand: int) -> Spec:
    """Return the spec of a gradient's sum as one replica has it."""
    if scatter_dim(layout, operand) is None:
        return layout.operand(operand)
    return without(layout.gradient(operand), DATA)


def _locally(
    layout: Layout,
    fun: Callable[..., Any],
    ins: Sequence[Spec],
    outs: Sequence[Spec],
    values: Sequence[Any],
) -> Sequence[Any]:
    made: Sequence[Any] = jax.shard_map(
        fun,
        mesh=abstract_mesh(layout.sizes),
        in_specs=tuple(PartitionSpec(*spec) for spec in ins),
        out_specs=tuple(PartitionSpec(*spec) for spec in outs),
        check_vma=False,  # packed with one cut along `model`, any seems to vary along it
    )(*values)
    return made


def _pieces(total: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return the arrays of these shapes in a flat one."""
    pieces = jnp.split(total, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Return the axes of a submesh, without its devices."""
    auto = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
