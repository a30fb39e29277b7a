"""Decide when, where and how each gradient is summed over the replicas.

- How: gradients are packed into buckets in the order in which the backward pass makes them, so that
  a bucket's sum can run under the rest of the pass (Li et al., "PyTorch Distributed", VLDB 2020).
  Behind a large one that would be last, such as an embedding's, others follow to hide its sum.
- When: in every microbatch or once a step, inside a backward pass or after it (`GradientSync`).
  XLA's schedulers would make all gradients of weights last, to hide sums behind them, so a pass
  states where each bucket must be complete and the sums before it done (`sum_places`).
- Where: in place of each replica's gradient, or in a buffer of its own (`is_summed_in_place`), or
  packed until the update reads it (`stays_packed`).

Pure. The cost model prices these decisions and the runtime carries them out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import jax.numpy as jnp

from launcher.partition.assignment import Reduction, Slicing, accumulator_dtype
from launcher.partition.layout import DATA, ROWS, Between, Layout
from launcher.partition.named_dims import Spec, axes, parts
from launcher.partition.task_programs import TaskProgram
from launcher.trace import (
    GRADIENT_SUMS,
    Equation,
    Loss,
    Var,
    dependents,
    is_var,
    matmul_flops,
    nbytes,
    needed,
)


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


@dataclass(frozen=True)
class GradientSync:
    """The sums of the gradients that one or more task programs of a stage make.

    Attributes:
        every: the buckets that every microbatch sums, first complete first.
        once: the buckets that are summed once a step, first complete first.
        slicing: how the batch is cut.
        between: the medium between the replicas.
    """

    every: tuple[Bucket, ...]
    once: tuple[Bucket, ...]
    slicing: Slicing
    between: Between = Between.LINKS

    @property
    def backward_sums_once(self) -> bool:
        """Whether the last microbatch's backward pass sums `once`, not a program after it.

        A single bucket of several microbatches would wait for the whole pass. Memory that processes
        share is read and written between programs.
        """
        by_programs = self.between is not Between.MEMORY
        return by_programs and (self.slicing.micro_batches == 1 or len(self.once) > 1)

    def in_pass(self, last: bool) -> tuple[Bucket, ...]:
        """Return the buckets that the backward pass of a microbatch sums by collectives.

        A worker of one replica leaves those of `once` to the parameter servers.

        Args:
            last: whether it is the step's last microbatch.
        """
        sums_once = last and self.backward_sums_once and self.slicing.own_replicas > 1
        return (*self.every, *self.once) if sums_once else self.every

    @property
    def after_pass(self) -> tuple[Bucket, ...]:
        """The buckets that are summed after the backward passes."""
        is_after = self.slicing.own_replicas > 1 and not self.backward_sums_once
        return self.once if is_after else ()


def gradient_order(program: TaskProgram) -> tuple[int, ...]:
    """Return the operands whose gradients a task program makes, first complete first.

    A gradient is complete with the last of its parts: wherever the parts are added up, the order is
    the same. Ties keep the order of the program's results.
    """
    made = {v: (n, eqn) for n, eqn in enumerate(program.closed.eqns) for v in eqn.outvars}
    results = zip(program.outputs, program.closed.outvars, strict=True)
    grads = [(name.of, v) for name, v in results if name.kind == "grad"]
    complete = {i: _complete(v, made) if is_var(v) else -1 for i, v in grads}
    return tuple(sorted(complete, key=complete.__getitem__))


def _complete(gradient: Var, made: Mapping[Var, tuple[int, Equation]]) -> int:
    """Return the place of the equation that makes the last part of a gradient; -1 if none does."""
    last, parts, seen = -1, [gradient], {gradient}
    while parts:
        place, eqn = made.get(parts.pop(), (-1, None))
        if eqn is not None and eqn.primitive.name in GRADIENT_SUMS:
            parts += (new := {v for v in eqn.invars if is_var(v)} - seen)
            seen |= new
        else:
            last = max(last, place)
    return last


def largest_ahead(program: TaskProgram, loss: Loss, layout: Layout, by: Reduction) -> TaskProgram:
    """Return a task program that makes its largest gradient before others, if it is a bucket alone.

    An embedding's is complete when the pass is over, and its sum would run beside nothing. So
    gradients before it that are products of matrices follow it, until they have as many bytes.

    Args:
        program: the task program.
        loss: the loss, of one slice of the batch.
        layout: the specs on the submesh.
        by: how the gradients are summed.
    """
    order = gradient_order(program)
    sizes = [_crossing(loss, layout, i, by)[1] for i in order]
    at, late = _largest(sizes, by.bucket_bytes), set[int]()
    behind = sum(sizes[at + 1 :])
    for i, size in reversed([*zip(order[:at], sizes[:at], strict=True)]):
        if behind < sizes[at] and matmul_flops(_only_of(program, {i})):
            behind += size
            late.add(i)
    equations = sorted(program.closed.eqns, key=_only_of(program, late).__contains__)
    return dataclasses.replace(program, closed=dataclasses.replace(program.closed, eqns=equations))


def _largest(sizes: Sequence[int], limit: int) -> int:
    """Return the place of the largest gradient, the last of equal ones; 0 if it is in a bucket."""
    at = max(range(len(sizes)), key=lambda n: (sizes[n], n), default=0)
    return at if at and sizes[at] > limit > 0 else 0


def _only_of(program: TaskProgram, gradients: Set[int]) -> set[Equation]:
    """Return the equations that nothing but the gradients of these operands needs."""
    outs = zip(program.outputs, program.closed.outvars, strict=True)
    others = [v for name, v in outs if name.kind != "grad" or name.of not in gradients]
    return {*program.closed.eqns} - {*needed(program.closed.eqns, others)}


def in_buckets(
    operands: Iterable[int], loss: Loss, layout: Layout, by: Reduction
) -> tuple[Bucket, ...]:
    """Return the buckets of these gradients, first complete first.

    A bucket has one dtype and one collective. It is complete when its last gradient is made. One
    too large for a bucket is alone, and those around it share one: wide layers would else sum
    each bias by itself, at the latency of a large sum. Behind the largest, which their products
    hide (`largest_ahead`), each bucket has about half of what is left, for the next to hide it.

    Args:
        operands: the operands that the gradients belong to, in the order in which they are made.
        loss: the loss, of one slice of the batch.
        layout: the specs on the submesh.
        by: how the gradients are summed.
    """
    done: list[tuple[int, Bucket]] = []  # with the place of its last gradient
    filling: dict[tuple[str, str], tuple[int, Bucket]] = {}
    sized = [(i, *_crossing(loss, layout, i, by)) for i in operands]
    sizes = [size for *_, size in sized]
    limit = by.bucket_limit(sum(sizes))
    at = _largest(sizes, limit)
    halves = at and sum(sizes[at + 1 :]) <= 2 * sizes[at]
    for place, (i, dtype, size) in enumerate(sized):
        kind = "all-reduce" if scatter_dim(layout, i) is None else "reduce-scatter", dtype
        if size > limit and not (halves and place > at):
            done.append((place, Bucket(*kind, (i,), size)))
            continue
        last, bucket = filling.get(kind, (-1, Bucket(*kind, (), 0)))
        least = sum(sizes[place:]) if halves and last > at else 1
        if bucket.nbytes + size > limit and bucket.nbytes >= least:
            done.append((last, bucket))
            bucket = Bucket(*kind, (), 0)
        filling[kind] = place, Bucket(*kind, (*bucket.operands, i), bucket.nbytes + size)
    done += filling.values()
    return tuple(bucket for _, bucket in sorted(done, key=lambda one: one[0]))


@dataclass(frozen=True, eq=False)
class SumPlace:
    """Where a task program sums some of its buckets.

    Attributes:
        place: how many of its equations run before.
        buckets: the buckets, by number.
        ties: the cotangents that the rest of the backward pass starts from. It must not start
            before these buckets are packed, and those of the place before are summed: nothing else
            keeps a scheduler from packing at the end, with all that gradients are made of in
            memory until then.
    """

    place: int
    buckets: tuple[int, ...]
    ties: tuple[Var, ...]


def sum_places(program: TaskProgram, buckets: Sequence[Iterable[int]]) -> tuple[SumPlace, ...]:
    """Return where a task program sums its buckets, in order; `buckets` are their operands.

    Buckets that are complete together are summed together: where the fewest bytes of the chain of
    cotangents are live before the next ones are complete, or at once where the chain is over.
    """
    equations, outs = program.closed.eqns, program.closed.outvars
    named = zip(program.outputs, outs, strict=True)
    grads = {name.of: v for name, v in named if name.kind == "grad"}
    made = {v: n for n, eqn in enumerate(equations, 1) for v in eqn.outvars}
    by_end: dict[int, list[int]] = {}
    for k, bucket in enumerate(buckets):
        parts = [grads[i] for i in bucket]
        end = max(made.get(v, 0) if is_var(v) else 0 for v in parts)
        by_end.setdefault(end, []).append(k)
    chain = _chain(program, made)
    found = []
    for end, following in itertools.pairwise([*sorted(by_end), len(equations)]):
        goes_on = not {*chain[following]} <= {*chain[end]}
        places = [n for n in range(end, following) if goes_on and chain[n]]
        place = min(places, key=lambda n: sum(nbytes(v.aval) for v in chain[n]), default=end)
        found.append(SumPlace(place, tuple(by_end[end]), tuple(chain[place])))
    return tuple(found)


def _chain(program: TaskProgram, made: Mapping[Var, int]) -> list[list[Var]]:
    """Return the cotangents made and read later, where so many equations have run."""
    equations, given = program.closed.eqns, program.closed.invars[len(program.constants) :]
    named = zip(program.inputs, given, strict=True)
    back = [v for name, v in named if name.kind in ("seed", "cotangent")]
    last = {v: n for n, eqn in enumerate(equations) for v in eqn.invars if is_var(v)}
    live: list[list[Var]] = [[] for _ in (*equations, None)]
    reached = dependents(equations, back)
    for v in (v for v in made if v in reached):  # in order: all processes run the same program
        for n in range(made[v], last.get(v, 0) + 1):
            live[n].append(v)
    return live


def is_flat(bucket: Bucket, buckets: Sequence[Bucket], between: Between = Between.LINKS) -> bool:
    """Return whether one flat array crosses, not each of a bucket's gradients in its own shape.

    XLA combines those of a single all-reduce without a copy; through sockets they cross one by one.

    Args:
        bucket: the bucket.
        buckets: all of its program.
        between: the medium between the replicas.
    """
    packs = len(buckets) > 1 or between is not Between.LINKS
    return (packs and len(bucket.operands) > 1) or bucket.collective == "reduce-scatter"


def stays_packed(
    bucket: Bucket,
    buckets: Sequence[Bucket],
    slicing: Slicing,
    leaving: Set[int],
    between: Between = Between.LINKS,
) -> bool:
    """Return whether a bucket's sum leaves the backward pass packed, and the update unpacks it.

    There it is a part of what reads it, where the pass would copy it. Of several microbatches it
    takes the accumulators' place: packed, it would be there beside them.

    `leaving`: see `PartitionedStep.leaving`; the others are as for `is_flat`.
    """
    alone = slicing.micro_batches == 1 and leaving.isdisjoint(bucket.operands)
    return alone and is_flat(bucket, buckets, between)


def packed_form(bucket: Bucket, layout: Layout) -> tuple[int, Spec]:
    """Return the elements of a replica's packed sum, and its spec: each device packs its shards."""
    others = tuple(axis for axis in layout.sizes if axis != DATA)
    own = bucket.nbytes // jnp.dtype(bucket.dtype).itemsize
    if bucket.collective == "reduce-scatter":
        own //= layout.sizes[DATA]
    return own * parts((others,), layout.sizes), (others,)


def _crossing(loss: Loss, layout: Layout, i: int, by: Reduction) -> tuple[str, int]:
    """Return the dtype in which a gradient crosses, and its bytes in it."""
    wide: jnp.dtype = jnp.dtype(accumulator_dtype(loss.invars[i].aval.dtype))
    dtype = jnp.dtype(jnp.bfloat16) if by.dtype == "bf16" and wide == jnp.float32 else wide
    count = loss.invars[i].aval.size // parts(layout.operand(i), layout.sizes)
    return dtype.name, count * dtype.itemsize


def scatter_dim(layout: Layout, i: int) -> int | None:
    """Return the dimension along which a gradient is reduce-scattered over the replicas.

    None: it is all-reduced, because each replica keeps all of it, or because its shards do not
    subdivide those of the operand and are sliced from the sum.
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
    """Return whether every microbatch sums a gradient, rather than the step once.

    It does where every pass gathers the parameter: neither may fit in memory whole.
    """
    return layout.is_gathered(i) and layout.is_scattered(i)


def is_summed_in_place(layout: Layout, i: int, leaving: Set[int]) -> bool:
    """Return whether a gradient's sum takes the place of each replica's gradient.

    A gradient that leaves the submesh or the step, or is sharded over the replicas, does not.

    Args:
        layout: the specs on the submesh.
        i: the operand.
        leaving: see `PartitionedStep.leaving`.
    """
    return i not in leaving and not layout.is_scattered(i)
