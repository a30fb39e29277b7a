"""Predicted seconds of a stage: of its tasks for a microbatch, and of its update once a step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from launcher.hardware import ClusterShape
from launcher.partition import (
    DATA,
    MODEL,
    ROWS,
    Layout,
    Recomputed,
    StageGraph,
    Submesh,
    UpdateProgram,
    parts,
)
from launcher.plan.cost import formulas
from launcher.plan.cost.collectives import (
    Collective,
    backward_work_seconds,
    flow,
    is_active,
    loads,
    loads_again,
    product_seconds,
    work_seconds,
)
from launcher.plan.cost.formulas import (
    Links,
    PassParts,
    gather_count,
    gather_seconds,
    pass_seconds,
    ring_links,
    stage_parallelism,
)
from launcher.plan.stage_plan import NO_RINGS, Collectives, RingSeconds
from launcher.trace import Loss, is_var, nbytes


def links_of(submesh: Submesh, cluster: ClusterShape) -> Links:
    """Return the links of a submesh; see `formulas.ring_links`."""
    return ring_links(submesh.devices, submesh.logical_mesh[1], cluster)


@dataclass(frozen=True)
class StageSeconds:
    """Predicted seconds and collectives of one stage for one microbatch; see `StagePlan`."""

    forward_seconds: float
    backward_seconds: float
    backward_weight_seconds: float
    collectives: tuple[Collectives, ...]
    effective_parallelism: float | None = None
    pass_rings: RingSeconds = NO_RINGS


def stage_seconds(
    graph: StageGraph,
    loss: Loss,
    layout: Layout,
    cluster: ClusterShape,
    links: Links,
    again: Recomputed,
    as_one: bool,
    split: bool,
    gathered: Sequence[Mapping[int, str]],
    sums_in_every: Sequence[Collective] = (),
    measured: tuple[float, float] | None = None,
) -> StageSeconds:
    """Return what a stage takes for a microbatch, on each of its devices.

    Args:
        graph: the stage.
        loss: the loss that it is a part of.
        layout: the specs on its submesh.
        cluster: the rates of the devices.
        links: the links of its submesh.
        again: what its backward pass recomputes.
        as_one: whether both passes are one program.
        split: whether the backward pass is two programs, of which the second may wait.
        gathered: what each of its programs gathers with the types, the forward pass's first.
        sums_in_every: the collectives that sum gradients in every microbatch (ZeRO-3).
        measured: seconds of the forward and the backward pass, instead of the cost model's.
    """

    def seconds(found: Sequence[Collective]) -> float:
        return _crossing_seconds(found, layout, cluster, links)

    def gathering(found: Sequence[Collective]) -> float:
        size, devices = sum(one.size for one in found), parts(((DATA, ROWS),), layout.sizes)
        count = gather_count(size, len(found), cluster)
        return float(gather_seconds(size, devices, links.data, cluster.latency, count))

    seeds = {loss.invars[i]: layout.operand(i) for i in graph.operands}
    seeds |= {v: layout.activation(v) for v in graph.activations_in}
    flows = flow(graph.equations, [*(loss.invars[i] for i in graph.wrt), *graph.active_in])
    program = loads(layout.inside(graph.equations, seeds), flows)
    trained = bool(graph.wrt or graph.active_in)
    repeated = loads_again(again, layout.activation, layout.sizes, flows) if trained else []
    active = [found for use, found in program if trained and is_active(use, flows)]
    forward = [c for _, found in program for c in found.forward]
    backward = [c for found in active for c in found.backward]
    if as_one:  # what the forward pass gathered is still there
        backward = [c for c in backward if not c.again]
    backward += [c for _, found in repeated for c in found.forward]
    ahead, *later = [gathers(types, loss, layout) for types in gathered]
    first = gathers(_read_first(graph, loss, gathered[0]), loss, layout)
    anew = [*itertools.chain(*later)] if trained else []
    work = sum(work_seconds(found, cluster) for _, found in program)
    own = sum(backward_work_seconds(found, cluster) for found in active)
    more = sum(work_seconds(found, cluster) for _, found in repeated)
    products = sum(product_seconds(found, cluster) for _, found in [*program, *repeated])
    products += sum(found.backward_share * product_seconds(found, cluster) for found in active)
    summed, summed_back = forward, backward
    if measured:  # on meshes without replicas, whose sums along the model axis are in it
        more = more * measured[0] / work if work else 0.0
        work, own = measured
        summed, summed_back = ([c for c in sums if c.axis != MODEL] for sums in (forward, backward))
    made = pass_seconds(
        PassParts(
            work=work,
            work_back=own,
            again=more,
            sums=seconds(summed),
            sums_back=seconds(summed_back),
            gather=gathering(ahead),
            first=gathering(first),
            crossing=gathering(anew) + seconds(sums_in_every),
            last=seconds(sums_in_every[-1:]),
        ),
        cluster,
        as_one,
        is_first=not graph.active_in,
        splits=split and bool(graph.wrt),
    )
    total = float(made.forward + (made.backward if trained else 0.0))
    return StageSeconds(
        forward_seconds=float(made.forward),
        backward_seconds=float(made.backward) if trained else 0.0,
        backward_weight_seconds=float(made.weight) if graph.wrt else 0.0,
        collectives=_summary("forward", [*forward, *ahead])
        + _summary("backward", [*backward, *anew, *sums_in_every]),
        effective_parallelism=None if measured else stage_parallelism(products, total, cluster),
        pass_rings=_ring_seconds(
            [*summed, *ahead, *summed_back, *anew, *sums_in_every], layout, links
        ),
    )


def _read_first(graph: StageGraph, loss: Loss, types: Mapping[int, str]) -> dict[int, str]:
    """Return those of the operands that a stage's first layer reads."""
    read = {v for eqn in graph.layers[0] for v in eqn.invars if is_var(v)}
    return {i: dtype for i, dtype in types.items() if loss.invars[i] in read}


def _crossing_seconds(
    found: Sequence[Collective], layout: Layout, cluster: ClusterShape, links: Links
) -> float:
    """Return the seconds of collectives, one after another, each on the links of its axis."""
    return sum(
        one.seconds(layout.sizes, links.model if one.axis == MODEL else links.data, cluster.latency)
        for one in found
    )


def _ring_seconds(found: Sequence[Collective], layout: Layout, links: Links) -> RingSeconds:
    """Return for how long collectives occupy the links of their rings."""
    along_model = [one for one in found if one.axis == MODEL]
    along_data = [one for one in found if one.axis != MODEL]
    return RingSeconds(
        *(
            sum((one.seconds(layout.sizes, rate, 0.0) for one in of), 0.0)
            for of, rate in ((along_model, links.model), (along_data, links.data))
        )
    )


def gathers(types: Mapping[int, str], loss: Loss, layout: Layout) -> list[Collective]:
    """Return the all-gathers of operands that are sharded along data, in these types."""
    counts = {i: loss.invars[i].aval.size / parts(layout.operand(i), layout.sizes) for i in types}
    sizes = (counts[i] * jnp.dtype(dtype).itemsize for i, dtype in types.items())
    return [Collective("all-gather", (DATA, ROWS), size) for size in sizes]


def _summary(when: str, found: Sequence[Collective]) -> tuple[Collectives, ...]:
    count: dict[tuple[str, str], int] = {}
    size: dict[tuple[str, str], float] = {}
    for one in found:
        key = one.kind, "model" if one.axis == MODEL else "data"
        count[key] = count.get(key, 0) + one.times
        size[key] = size.get(key, 0.0) + one.times * one.size
    return tuple(Collectives(when, *key, count[key], int(size[key])) for key in sorted(count))


@dataclass(frozen=True)
class UpdateSeconds:
    """Predicted seconds and collectives of one stage once a step.

    Attributes:
        update_seconds: see `StagePlan`.
        hidden_seconds: see `StagePlan`.
        exchange_seconds: see `StagePlan`.
        collectives: see `StagePlan`.
        once_rings: see `StagePlan`.
    """

    update_seconds: float
    hidden_seconds: float
    exchange_seconds: float
    collectives: tuple[Collectives, ...]
    once_rings: RingSeconds = NO_RINGS


def stage_update_seconds(
    graph: StageGraph,
    loss: Loss,
    outer: UpdateProgram,
    layout: Layout,
    cluster: ClusterShape,
    links: Links,
    share: float,
    sums: Sequence[Collective],
    backward_seconds: float,
    exchange_seconds: float,
) -> UpdateSeconds:
    """Return what a stage takes once a step.

    Gradients are summed over the replicas, while the backward pass of the last microbatch runs,
    and the stage has its `share` of the mesh's update, which reads and writes the state once. The
    single numbers that an optimizer may sum, such as the global norm, are not included.

    Args:
        graph: the stage.
        loss: the loss that it is a part of.
        outer: what runs around the pipeline.
        layout: the specs on its submesh.
        cluster: the rates of the devices.
        links: the links of its submesh.
        share: its share of the mesh's update.
        sums: the collectives that sum its gradients once a step, one a bucket.
        backward_seconds: its backward pass of a microbatch.
        exchange_seconds: what its worker takes to exchange through parameter servers.
    """
    if not loss.wrt:
        return UpdateSeconds(exchange_seconds, 0.0, exchange_seconds, ())
    beside = formulas.beside_seconds(backward_seconds, cluster)
    summing = _crossing_seconds(sums, layout, cluster, links)
    last = _crossing_seconds(sums[-1:], layout, cluster, links)
    exposed = float(formulas.exposed_seconds(summing, len(sums), beside, last))
    # The update is sharded, and the parameters are whole (ZeRO-2).
    updated = [i for i in graph.wrt if layout.is_scattered(i) and not layout.is_gathered(i)]
    made = gathers({i: loss.invars[i].aval.dtype.name for i in updated}, loss, layout)
    crossing = exposed + _crossing_seconds(made, layout, cluster, links)
    state = sum(
        nbytes(v.aval) / parts(layout.outer(v), layout.sizes)
        for v, home in outer.homes.items()
        if home == graph.mesh
    )
    once = formulas.update_seconds(crossing, share * state, cluster.memory_bandwidth)
    summary = _summary("update", [*sums, *made])
    once = float(once) + exchange_seconds
    rings = _ring_seconds([*sums, *made], layout, links)
    return UpdateSeconds(once, summing - exposed, exchange_seconds, summary, rings)
