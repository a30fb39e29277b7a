"""The cost of a stage of any layers on any submesh, for one number of microbatches.

For each number of devices the logical mesh, ZeRO level and rematerialisation that fit the memory
are chosen here, so that the stage search sees few prices. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.inter_op.cost_table import CostTable
from launcher.plan.inter_op.many_stage_costs import ManyStageCosts
from launcher.plan.inter_op.stage_costs import Setting, StageCosts
from launcher.plan.inter_op.stage_dp import Candidates, rests, with_others
from launcher.schedule import SCHEDULES

ZERO_LEVELS = (0, 2, 3)
_ROUNDING = 1e-9  # relative, of sums in another order


@dataclass(frozen=True)
class StageChoice:
    """How a stage uses its devices."""

    logical_mesh: tuple[int, int]
    zero: int
    remat: str
    sequence: bool = False


@dataclass(frozen=True, eq=False)
class Priced:
    """The candidates, and the choice behind each.

    Attributes:
        candidates: the candidates.
        choices: the choices.
        chosen: the choice of each candidate, as a position in `choices`.
        memory: the memory of each candidate.
    """

    candidates: Candidates
    choices: tuple[StageChoice, ...]
    chosen: np.ndarray
    memory: np.ndarray


def submesh_sizes(cluster: ClusterShape) -> tuple[int, ...]:
    """Return the numbers of devices that a stage may have.

    On one host of at most 16 devices these are all; otherwise the divisors of a host's number of
    devices, and whole hosts by powers of two, so that the submeshes can be placed.
    """
    each, hosts = cluster.devices_per_host, cluster.hosts
    if hosts == 1 and each <= 16:
        return tuple(range(1, each + 1))
    within = [n for n in range(1, each + 1) if each % n == 0]
    counts = {2**k for k in range(hosts.bit_length()) if 2**k <= hosts} | {hosts}
    return tuple(sorted({*within, *(each * n for n in counts)}))


def in_flight(setting: Setting, depth: int) -> list[int]:
    """Return the microbatches whose activations a stage holds, by the number of stages behind it.

    The stage is taken to be the first, which gives a lower bound, since the number of all stages is
    not known here.
    """
    schedule, most = SCHEDULES[setting.schedule], setting.num_micro_batches
    return [schedule.in_flight_bound(0, behind + 1, most) for behind in range(depth)]


def hidden_forwards(setting: Setting, depth: int, cluster: ClusterShape) -> list[int]:
    """Return the forward passes that the first round trip hides, by the number of stages behind.

    Devices that share a machine are faster while others wait: there nothing is a bound.
    """
    if cluster.shares_machine:
        return [0] * depth
    schedule, most = SCHEDULES[setting.schedule], setting.num_micro_batches
    return [schedule.hidden_forwards(behind, most) for behind in range(depth)]


@dataclass(frozen=True, eq=False)
class Outline:
    """What each stage costs at least, wherever in a pipeline it is.

    Attributes:
        candidates: the costs as if one number of stages were behind it, of every way to use devices
            in the order of `ways`.
        choices: the choice behind each.
        device_seconds: `[first, end]`: the least time that a stage takes of its devices together in
            a step, under any schedule that holds no fewer microbatches.
    """

    candidates: Candidates
    choices: tuple[StageChoice, ...]
    device_seconds: np.ndarray

    def useful(self, num_devices: int, limit: float) -> np.ndarray:
        """Return which stages may be part of a plan below `limit` seconds, `[first, end, way]`."""
        of = self.candidates
        if not of.seconds.size:
            return np.zeros((0, 0, 0), bool)
        seconds, rest = of.seconds[0], rests(of)[0]
        taken = rest * np.array(of.sizes)
        least = with_others(seconds) + np.maximum(rest, with_others(taken) / num_devices)
        return np.asarray(least < limit * (1 + _ROUNDING))


def outline(
    table: CostTable, cluster: ClusterShape, setting: Setting, sizes: tuple[int, ...]
) -> Outline:
    """Return the least prices of every stage of the table's layers, in a fraction of the time."""
    depth, shape = min(table.num_layers, cluster.num_devices), table.num_layers
    hidden, held = hidden_forwards(setting, depth, cluster), in_flight(setting, depth)
    meshes = [
        (m_index, size // model)
        for size in sizes
        for m_index, model in enumerate(table.model_sizes)
        if size % model == 0 and splits(setting, size // model)
    ]
    if not meshes:
        none = np.zeros((0, 0, 0, 0))
        return Outline(Candidates((), none, none), (), np.full((shape, shape + 1), np.inf))
    goes_back = SCHEDULES[setting.schedule].last_stage_alternates(setting.num_micro_batches)
    stages = ManyStageCosts(table, meshes, cluster, setting, goes_back)
    found: list[tuple[np.ndarray, ...]] = []
    for zero, remat in itertools.product(ZERO_LEVELS, setting.remats):
        needs = stages.memory(zero, remat, [min(held)])
        fits = needs <= (setting.memory_bytes or np.inf)
        lost = np.where(fits, 0.0, np.inf)
        every = stages.seconds(zero, remat, [max(hidden)]) if fits.any() else (lost, lost, lost)
        found.append(tuple(one + lost for one in every))
    # By the mesh first, as `ways` has them, and without ZeRO levels of one replica.
    kept = [
        (k, way)
        for k, (_, data) in enumerate(meshes)
        for way in range(len(found))
        if data > 1 or way < len(setting.remats)
    ]
    at = tuple(way for _, way in kept), tuple(k for k, _ in kept)
    seconds, rest, work = (np.stack(of)[at] for of in zip(*found, strict=True))
    counts = tuple(table.model_sizes[meshes[k][0]] * meshes[k][1] for k, _ in kept)
    device_seconds = (work * np.array(counts)[:, None, None]).min(0)
    laid = (np.moveaxis(of, 0, -1)[None] for of in (seconds, rest))
    uses = list(itertools.product(ZERO_LEVELS, setting.remats))
    axes = [(data, table.model_sizes[m], table.is_sequence(m)) for m, data in meshes]
    choices = [StageChoice(axes[k][:2], *uses[way], axes[k][2]) for k, way in kept]
    return Outline(Candidates(counts, *laid), tuple(choices), device_seconds)


def price(
    table: CostTable,
    cluster: ClusterShape,
    setting: Setting,
    sizes: tuple[int, ...],
    beaten: bool = False,
    useful: np.ndarray | None = None,
) -> Priced:
    """Price every stage of the table's layers.

    Of the ways to use a number of devices those are kept that no other beats both in seconds and in
    rest: which of them is best depends on the other stages. The first is the fastest.

    Args:
        table: the costs of the layers.
        cluster: the devices.
        setting: what is fixed.
        sizes: the numbers of devices that a stage may have.
        beaten: whether to keep all ways.
        useful: which stages to price, `[first, end, way]` in the order of `ways`; None: all.
    """
    depth = min(table.num_layers, cluster.num_devices)
    choices: list[StageChoice] = []
    fronts: list[tuple[int, Way]] = []
    for size in sizes:
        listed = list(ways(table, cluster, setting, size, depth, choices, useful=useful))
        fronts.extend((size, way) for way in (listed if beaten else _fronts(listed)))
    if not fronts:
        none = np.zeros((0, 0, 0, 0))
        return Priced(Candidates((), none, none), (), none, none)
    stacked = {name: np.stack([front[name] for _, front in fronts], -1) for name in fronts[0][1]}
    of_sizes = tuple(size for size, _ in fronts)
    found = Candidates(of_sizes, stacked["seconds"], stacked["rest"], stacked["once"])
    chosen = stacked["chosen"].astype(np.int32)
    return Priced(found, tuple(choices), chosen, stacked["memory"])


Way = dict[str, np.ndarray]  # seconds, rest, once, memory, chosen, `[stages behind, first, end]`


def ways(
    table: CostTable,
    cluster: ClusterShape,
    setting: Setting,
    size: int,
    depth: int,
    choices: list[StageChoice],
    useful: np.ndarray | None = None,
) -> Iterator[Way]:
    """Yield every use of `size` devices, infinite where it does not fit; extend `choices`.

    Of what is not `useful` (`[first, end, way]`, by the position in `choices`) all is infinite, and
    a way of which nothing is useful is left out.
    """
    schedule = SCHEDULES[setting.schedule]
    goes_back = schedule.last_stage_alternates(setting.num_micro_batches)
    hidden, held = hidden_forwards(setting, depth, cluster), in_flight(setting, depth)
    for m_index, model in enumerate(table.model_sizes):
        data = size // model
        if size % model or not splits(setting, data):
            continue
        stage = StageCosts(table, m_index, cluster, setting, data, goes_back)
        for zero, remat in itertools.product(ZERO_LEVELS, setting.remats):
            if zero and data == 1:
                continue
            at = len(choices)
            choices.append(StageChoice((data, model), zero, remat, table.is_sequence(m_index)))
            lost: np.ndarray | float = 0.0
            if useful is not None:
                if not useful[:, :, at].any():
                    continue
                lost = np.where(useful[:, :, at], 0.0, np.inf)
            one, other, _ = stage.seconds(zero, remat, hidden)
            needs = stage.memory(zero, remat, held)
            lost = lost + np.where(needs <= (setting.memory_bytes or np.inf), 0.0, np.inf)
            chosen = np.full(needs.shape, at)
            timed = {"seconds": one + lost, "rest": other + lost}
            once = np.broadcast_to(stage.once(zero, remat), needs.shape)
            yield {**timed, "once": once, "memory": needs, "chosen": chosen}


def _fronts(listed: Sequence[Way]) -> Iterator[Way]:
    """Yield the ways that no other beats, by growing seconds and falling rest."""
    if not listed:
        return
    all_of = {name: np.stack([way[name] for way in listed]) for name in listed[0]}
    while np.isfinite(all_of["seconds"]).any():
        fastest = all_of["seconds"].min(0)
        tied = np.where(all_of["seconds"] <= fastest, all_of["rest"], np.inf)
        at = tied.argmin(0)[None]
        front = {name: np.take_along_axis(of, at, 0)[0] for name, of in all_of.items()}
        yield front
        beaten = all_of["rest"] >= front["rest"][None]
        all_of["seconds"] = np.where(beaten, np.inf, all_of["seconds"])


def splits(setting: Setting, data: int) -> bool:
    """Return whether a microbatch can be cut along so many devices, and they into the replicas."""
    rows = setting.batch_size // setting.num_micro_batches
    return data % setting.replicas == 0 and rows % data == 0
