"""The cost of a stage of any layers on any submesh, for one number of microbatches.

For each number of devices the logical mesh, ZeRO level and rematerialisation that fit the memory
are chosen here, so that the stage search sees few prices. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.inter_op.cost_table import CostTable
from launcher.plan.inter_op.stage_costs import Setting, StageCosts, in_flight
from launcher.plan.inter_op.stage_dp import Candidates
from launcher.schedule import SCHEDULES

ZERO_LEVELS = (0, 2, 3)


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


def price(
    table: CostTable, cluster: ClusterShape, setting: Setting, sizes: tuple[int, ...]
) -> Priced:
    """Price every stage of the table's layers.

    Of the ways to use a number of devices those are kept that no other beats both in seconds and in
    rest: which of them is best depends on the other stages. The first is the fastest.
    """
    depth = min(table.num_layers, cluster.num_devices)
    choices: list[StageChoice] = []
    fronts = [
        front
        for size in sizes
        for front in _fronts(size, ways(table, cluster, setting, size, depth, choices))
    ]
    if not fronts:
        none = np.zeros((0, 0, 0, 0))
        return Priced(Candidates((), none, none), (), none, none)
    stacked = {name: np.stack([front[name] for _, front in fronts], -1) for name in fronts[0][1]}
    found = Candidates(tuple(size for size, _ in fronts), stacked["seconds"], stacked["rest"])
    return Priced(found, tuple(choices), stacked["chosen"].astype(np.int32), stacked["memory"])


Way = dict[str, np.ndarray]  # seconds, rest, memory and chosen, `[stages behind, first, end]`


def ways(
    table: CostTable,
    cluster: ClusterShape,
    setting: Setting,
    size: int,
    depth: int,
    choices: list[StageChoice],
) -> Iterator[Way]:
    """Yield every use of `size` devices, infinite where it does not fit; extend `choices`."""
    schedule = SCHEDULES[setting.schedule]
    goes_back = schedule.last_stage_alternates(setting.num_micro_batches)
    for m_index, model in enumerate(table.model_sizes):
        data = size // model
        if size % model or not _splits(setting, data):
            continue
        stage = StageCosts(table, m_index, cluster, setting, data, goes_back)
        for zero, remat in itertools.product(ZERO_LEVELS, setting.remats):
            if zero and data == 1:
                continue
            one, other = stage.seconds(zero, remat)
            needs = stage.memory(zero, remat, in_flight(setting, depth))
            lost = np.where(needs <= (setting.memory_bytes or np.inf), 0.0, np.inf)
            chosen = np.full(needs.shape, len(choices))
            choices.append(StageChoice((data, model), zero, remat, table.is_sequence(m_index)))
            yield {"seconds": one + lost, "rest": other + lost, "memory": needs, "chosen": chosen}


def _fronts(size: int, ways: Iterable[Way]) -> Iterator[tuple[int, Way]]:
    """Yield the ways that no other beats, by growing seconds and falling rest."""
    listed = list(ways)
    if not listed:
        return
    all_of = {name: np.stack([way[name] for way in listed]) for name in listed[0]}
    while np.isfinite(all_of["seconds"]).any():
        fastest = all_of["seconds"].min(0)
        tied = np.where(all_of["seconds"] <= fastest, all_of["rest"], np.inf)
        at = tied.argmin(0)[None]
        front = {name: np.take_along_axis(of, at, 0)[0] for name, of in all_of.items()}
        yield size, front
        beaten = all_of["rest"] >= front["rest"][None]
        all_of["seconds"] = np.where(beaten, np.inf, all_of["seconds"])


def _splits(setting: Setting, data: int) -> bool:
    rows = setting.batch_size // setting.num_micro_batches
    return data % setting.replicas == 0 and rows % data == 0
