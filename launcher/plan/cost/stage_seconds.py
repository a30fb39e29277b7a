"""Predicted seconds of a stage: of its tasks for a microbatch, and of its update once a step."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from launcher.hardware import ClusterShape
from launcher.partition import (
    DATA,
    MODEL,
    ROWS,
    Layout,
    Recomputed,
    Reduction,
    StageGraph,
    Submesh,
    UpdateProgram,
    parts,
)
from launcher.plan.cost import formulas
from launcher.plan.cost.collectives import (
    Collective,
    Load,
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
    launch_seconds,
    pass_seconds,
    ring_links,
    ring_seconds,
    stage_parallelism,
)
from launcher.plan.stage_plan import NO_RINGS, Collectives, RingSeconds, ServerExchange
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


@dataclass(frozen=True)
class StageLoads:
    """What a stage does for a microbatch on each of its devices, whatever their rates.

    Attributes:
        forward: the equations of the forward pass, and how many are the same.
        active: those of them that gradients flow through.
        again: what the backward pass recomputes.
        sums: the collectives of the forward pass.
        sums_back: those of the backward pass, with those of what it recomputes.
        ahead: the gathers of parameters before the forward pass (ZeRO-3).
        first: those of what its first layer reads.
        anew: the gathers of the backward pass.
        scatters: the sums of gradients in every microbatch.
        is_first: whether no other stage waits for the gradient of its input.
        has_parameters: whether it has gradients of its own.
        is_trained: whether it has a backward pass.
        as_one: whether both passes are one program.
        sizes: the devices along each axis.
    """

    forward: Mapping[Load, int]
    active: Mapping[Load, int]
    again: Mapping[Load, int]
    sums: Sequence[Collective]
    sums_back: Sequence[Collective]
    ahead: Sequence[Collective]
    first: Sequence[Collective]
    anew: Sequence[Collective]
    scatters: Sequence[Collective]
    is_first: bool
    has_parameters: bool
    is_trained: bool
    as_one: bool
    sizes: Mapping[str, int]


def stage_loads(
    graph: StageGraph,
    loss: Loss,
    layout: Layout,
    again: Recomputed,
    as_one: bool,
    gathered: Sequence[Mapping[int, str]],
    sums_in_every: Sequence[Collective] = (),
) -> StageLoads:
    """Return what a stage does for a microbatch.

    Args:
        graph: the stage.
        loss: the loss that it is a part of.
        layout: the specs on its submesh.
        again: what its backward pass recomputes.
        as_one: whether both passes are one program.
        gathered: what each of its programs gathers with the types, the forward pass's first.
        sums_in_every: the collectives that sum gradients in every microbatch (ZeRO-3).
    """
    seeds = {loss.invars[i]: layout.operand(i) for i in graph.operands}
    seeds |= {v: layout.activation(v) for v in graph.activations_in}
    flows = flow(graph.equations, [*(loss.invars[i] for i in graph.wrt), *graph.active_in])
    program = loads(layout.inside(graph.equations, seeds), flows)
    trained = bool(graph.wrt or graph.active_in)
    repeated = loads_again(again, layout.activation, layout.sizes, flows) if trained else []
    active = [found for use, found in program if trained and is_active(use, flows)]
    backward = [c for found in active for c in found.backward]
    if as_one:  # what the forward pass gathered is still there
        backward = [c for c in backward if not c.again]
    backward += [c for _, found in repeated for c in found.forward]
    ahead, *later = [gathers(types, loss, layout) for types in gathered]
    return StageLoads(
        forward=_counted(found for _, found in program),
        active=_counted(active),
        again=_counted(found for _, found in repeated),
        sums=[c for _, found in program for c in found.forward],
        sums_back=backward,
        ahead=ahead,
        first=gathers(_read_first(graph, loss, gathered[0]), loss, layout),
        anew=[*itertools.chain(*later)] if trained else [],
        scatters=sums_in_every,
        is_first=not graph.active_in,
        has_parameters=bool(graph.wrt),
        is_trained=trained,
        as_one=as_one,
        sizes=layout.sizes,
    )


def pass_parts(
    of: StageLoads,
    cluster: ClusterShape,
    links: Links,
    measured: tuple[float, float] | None = None,
) -> PassParts:
    """Return the seconds of the parts of a stage's passes over a microbatch, on each device.

    Args:
        of: what it does.
        cluster: the rates of the devices.
        links: the links of its submesh.
        measured: seconds of the forward and the backward pass, instead of the cost model's.
    """

    def seconds(found: Sequence[Collective]) -> float:
        return _crossing_seconds(found, of.sizes, cluster, links)

    def gathering(found: Sequence[Collective]) -> float:
        size, devices = sum(one.size for one in found), parts(((DATA, ROWS),), of.sizes)
        count = gather_count(size, len(found), cluster)
        return float(ring_seconds("all-gather", size, devices, links.data, cluster, count))

    work, more = (_total(work_seconds, on, cluster) for on in (of.forward, of.again))
    own = _total(backward_work_seconds, of.active, cluster)
    if measured:
        more = more * measured[0] / work if work else 0.0
        work, own = measured
    ahead, again = (
        _total(lambda one, _: one.launches, on, cluster) for on in (of.forward, of.again)
    )
    launch, launch_back = launch_seconds(ahead, again, cluster)
    return PassParts(
        work=work,
        work_back=own,
        again=more,
        sums=seconds(_summed(of.sums, measured)),
        sums_back=seconds(_summed(of.sums_back, measured)),
        gather=gathering(of.ahead),
        first=gathering(of.first),
        crossing=gathering(of.anew) + seconds(of.scatters),
        last=seconds(of.scatters[-1:]),
        launch=launch,
        launch_back=launch_back,
    )


def _total(
    each: Callable[[Load, ClusterShape], float], found: Mapping[Load, int], cluster: ClusterShape
) -> float:
    return sum((count * each(one, cluster) for one, count in found.items()), 0.0)


def _summed(found: Sequence[Collective], measured: object) -> Sequence[Collective]:
    """Return the sums that take their own time.

    A stage is measured on a mesh without replicas, whose sums along the model axis are in it.
    """
    return [one for one in found if one.axis != MODEL] if measured else found


def stage_seconds(
    of: StageLoads,
    cluster: ClusterShape,
    links: Links,
    split: bool,
    measured: tuple[float, float] | None = None,
) -> StageSeconds:
    """Return what a stage takes for a microbatch, on each of its devices.

    Args:
        of: what it does.
        cluster: the rates of the devices.
        links: the links of its submesh.
        split: whether the backward pass is two programs, of which the second may wait.
        measured: see `pass_parts`.
    """
    found = pass_parts(of, cluster, links, measured)
    splits = split and of.has_parameters
    made = pass_seconds(found, cluster, of.as_one, of.is_first, splits)
    spent = float(made.forward + (made.backward if of.is_trained else 0.0))
    products = sum(_total(product_seconds, on, cluster) for on in (of.forward, of.again))
    products += _total(
        lambda one, at: one.backward_share * product_seconds(one, at), of.active, cluster
    )
    every = [*_summed(of.sums, measured), *of.ahead, *_summed(of.sums_back, measured)]
    return StageSeconds(
        forward_seconds=float(made.forward),
        backward_seconds=float(made.backward) if of.is_trained else 0.0,
        backward_weight_seconds=float(made.weight) if of.has_parameters else 0.0,
        collectives=_summary("forward", [*of.sums, *of.ahead])
        + _summary("backward", [*of.sums_back, *of.anew, *of.scatters]),
        effective_parallelism=None if measured else stage_parallelism(products, spent, cluster),
        pass_rings=_ring_seconds([*every, *of.anew, *of.scatters], of.sizes, cluster, links),
    )


def _counted(found: Iterable[Load]) -> Mapping[Load, int]:
    """Return the loads without their collectives, and how many are the same."""
    return Counter(dataclasses.replace(one, forward=(), backward=()) for one in found)


def _read_first(graph: StageGraph, loss: Loss, types: Mapping[int, str]) -> dict[int, str]:
    """Return those of the operands that a stage's first layer reads."""
    read = {v for eqn in graph.layers[0] for v in eqn.invars if is_var(v)}
    return {i: dtype for i, dtype in types.items() if loss.invars[i] in read}


def _crossing_seconds(
    found: Sequence[Collective], sizes: Mapping[str, int], cluster: ClusterShape, links: Links
) -> float:
    """Return the seconds of collectives, one after another, each on the links of its axis."""
    return sum(
        one.seconds(sizes, links.model if one.axis == MODEL else links.data, cluster)
        for one in found
    )


def _ring_seconds(
    found: Sequence[Collective], sizes: Mapping[str, int], cluster: ClusterShape, links: Links
) -> RingSeconds:
    """Return for how long collectives occupy the links of their rings."""
    along_model = [one for one in found if one.axis == MODEL]
    along_data = [one for one in found if one.axis != MODEL]
    return RingSeconds(
        *(
            sum((one.seconds(sizes, rate, cluster, starts=False) for one in of), 0.0)
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
    summing = _crossing_seconds(sums, layout.sizes, cluster, links)
    last = _crossing_seconds(sums[-1:], layout.sizes, cluster, links)
    exposed = float(formulas.exposed_seconds(summing, len(sums), beside, last))
    # The update is sharded, and the parameters are whole (ZeRO-2).
    updated = [i for i in graph.wrt if layout.is_scattered(i) and not layout.is_gathered(i)]
    made = gathers({i: loss.invars[i].aval.dtype.name for i in updated}, loss, layout)
    crossing = exposed + _crossing_seconds(made, layout.sizes, cluster, links)
    state = sum(
        nbytes(v.aval) / parts(layout.outer(v), layout.sizes)
        for v, home in outer.homes.items()
        if home == graph.mesh
    )
    once = formulas.update_seconds(crossing, share * state, cluster.memory_bandwidth)
    summary = _summary("update", [*sums, *made])
    once = float(once) + exchange_seconds
    rings = _ring_seconds([*sums, *made], layout.sizes, cluster, links)
    return UpdateSeconds(once, summing - exposed, exchange_seconds, summary, rings)


def exchange_seconds(
    exchanges: Sequence[ServerExchange], by: Reduction, cluster: ClusterShape
) -> float:
    """Return the seconds of a step's exchanges: of the batch's rows, and of what the loss makes.

    Each goes from the workers to its server and back, one behind the other: a worker puts one
    while a server adds another, and fetches a third. The backward pass hides none of it, since all
    results of a program are ready together.
    """
    total, latency = 0.0, cluster.store_latency / 2  # of either way
    for when in ("before", "update"):
        put = got = 0.0
        busy = [0.0] * by.servers
        for x in exchanges:
            if x.when == when:
                put += latency + x.bytes / cluster.store_put
                added = max(put, busy[x.server]) + by.workers * x.bytes / cluster.store_add
                busy[x.server] = added
                got = max(got, added) + latency + x.whole_bytes(by.workers) / cluster.store_get
        total += got
    return total
