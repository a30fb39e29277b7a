"""The links that a plan's transfers and collectives occupy, and for how long.

A host sends by one link and receives by another, whatever its devices send and receive. Inside a
host each mesh has a link in either direction. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from launcher.hardware import ClusterShape
from launcher.plan.cost import formulas
from launcher.plan.stage_plan import NO_RINGS, RingSeconds, Staged, StagePlan, Transfer
from launcher.schedule import Route, Routes


def transfer_routes(plan: Staged) -> Routes:
    """Return how a microbatch gets from stage to stage."""
    found = _by_transfer(plan, lambda one: one.bytes_per_microbatch)
    return {(one.src_stage, one.dst_stage): way for one, way in found}


def microbatch_transfer_seconds(plan: Staged) -> dict[tuple[int, int], float]:
    """Return the seconds of a microbatch's transfer, by (source, destination) stage."""
    return {pair: way.seconds + way.latency for pair, way in transfer_routes(plan).items()}


def once_seconds(plan: Staged) -> float:
    """Return the seconds of the transfers that are made once a step.

    They are those of what several stages share, such as a tied embedding and its gradient. What
    crosses different links does so at the same time.
    """
    busy: dict[str, float] = {}
    for _, way in _by_transfer(plan, lambda one: one.bytes_per_step):
        _add(busy, way.links, way.seconds + way.latency)
    return max(busy.values(), default=0.0)


def longest_update(plan: Staged) -> float:
    """Return the seconds of the sums of gradients and of the update, once all passes are over.

    They are those of the mesh that takes longest or, if that is more, of the sums that cross one
    link, which wait for one another.
    """
    of_mesh: dict[tuple[int, ...], float] = {}
    for stage in plan.stages:
        of_mesh[stage.devices] = of_mesh.get(stage.devices, 0.0) + stage.update_seconds
    busy: dict[str, float] = {}
    for link, seconds in _by_ring(plan, _not_hidden):
        _add(busy, [link], seconds)
    return max([*of_mesh.values(), *busy.values()])


def _not_hidden(stage: StagePlan) -> RingSeconds:
    rings = stage.once_rings  # the sums are along data
    return RingSeconds(rings.model, max(0.0, rings.data - stage.hidden_seconds))


def link_seconds(plan: Staged) -> dict[str, float]:
    """Return for how many seconds of a step each link is occupied, by its name."""
    busy: dict[str, float] = {}
    for _, way in _by_transfer(plan, lambda one: one.bytes_per_microbatch):
        _add(busy, way.links, way.seconds * plan.num_micro_batches)
    for _, way in _by_transfer(plan, lambda one: one.bytes_per_step):
        _add(busy, way.links, way.seconds)
    for link, seconds in _by_ring(plan, lambda stage: stage.pass_rings):
        _add(busy, [link], seconds * plan.num_micro_batches)
    for link, seconds in _by_ring(plan, lambda stage: stage.once_rings):
        _add(busy, [link], seconds)
    return busy


def _add(busy: dict[str, float], links: Iterable[str], seconds: float) -> None:
    busy.update((link, busy.get(link, 0.0) + seconds) for link in links)


def _by_ring(
    plan: Staged, rings_of: Callable[[StagePlan], RingSeconds]
) -> Iterator[tuple[str, float]]:
    """Yield the links that the stages' collectives occupy, with the seconds.

    Devices that share a machine have no links: what moves the bytes is what computes.
    """
    cluster, mesh_of = ClusterShape(**plan.cluster), plan.mesh_of
    for stage, mesh in zip(plan.stages, mesh_of, strict=True):
        rings = rings_of(stage)
        if cluster.shares_machine or rings == NO_RINGS:
            continue
        hosts = tuple(map(cluster.host_of, stage.devices))
        every = formulas.ring_hops(hosts, stage.logical_mesh[1])
        for seconds, hops in zip((rings.model, rings.data), every, strict=True):
            if not seconds:
                continue
            # A ring has the rate of the link that it shares with most others.
            most = max(hops.values(), default=0)
            ends = {f"host {host}": n / most for host, n in hops.items()}
            for end, share in (ends or {f"mesh {mesh}": 1.0}).items():
                yield f"from {end}", share * seconds
                yield f"to {end}", share * seconds


def _by_transfer(
    plan: Staged, size_of: Callable[[Transfer], int]
) -> Iterator[tuple[Transfer, Route]]:
    cluster, mesh_of = ClusterShape(**plan.cluster), plan.mesh_of
    for one in plan.transfers:
        size, ends = size_of(one), (one.src_stage, one.dst_stage)
        if not size:
            continue
        src, dst = (plan.stages[s] for s in ends)
        is_local = src.hosts == dst.hosts
        seconds = formulas.transfer_seconds(
            size,
            parts=(src.logical_mesh[0], dst.logical_mesh[0]),
            hosts=(len(src.hosts), len(dst.hosts)),
            is_local=is_local,
            cluster=cluster,
        )
        if is_local:
            out, into = ([f"mesh {mesh_of[s]}"] for s in ends)
        else:
            out, into = ([f"host {host}" for host in stage.hosts] for stage in (src, dst))
        links = *(f"from {end}" for end in out), *(f"to {end}" for end in into)
        yield one, Route(links, float(seconds) - cluster.latency, cluster.latency)
