"""Prices of a stage of any layers on any submesh, for one point of the search.

For each number of devices the logical mesh, ZeRO level and rematerialisation that fit the memory
are chosen here, so that the stage search sees few prices. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.hardware import ClusterShape
from launcher.partition import MODEL
from launcher.plan.inter_op.layer_table import LayerTable, Recompute, recompute_of
from launcher.plan.inter_op.stage_construction import StageTables, rests, with_others
from launcher.plan.inter_op.stage_cost import StageCosts
from launcher.plan.inter_op.submeshes import Mesh, SearchPoint
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
        recomputed: what each recomputes where its choice is `FEWEST`, as a position in the table's
            `recomputes`.
    """

    candidates: StageTables
    choices: tuple[StageChoice, ...]
    chosen: np.ndarray
    memory: np.ndarray
    recomputed: np.ndarray


def in_flight(point: SearchPoint, depth: int) -> list[int]:
    """Return the microbatches whose activations a stage holds, by the number of stages behind it.

    The stage is taken to be the first, which gives a lower bound, since the number of all stages is
    not known here.
    """
    schedule, most = SCHEDULES[point.schedule], point.num_micro_batches
    return [schedule.in_flight_bound(0, behind + 1, most) for behind in range(depth)]


def hidden_forwards(point: SearchPoint, depth: int, cluster: ClusterShape) -> list[int]:
    """Return the forward passes that the first round trip hides, by the number of stages behind.

    Devices that share a machine are faster while others wait: there nothing is a bound.
    """
    if cluster.shares_machine:
        return [0] * depth
    schedule, most = SCHEDULES[point.schedule], point.num_micro_batches
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

    candidates: StageTables
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


class Outlines:
    """Outlines of every stage of the table's layers, in a fraction of the time of their prices.

    They are of settings that differ in their replicas alone: what these do not change is computed
    once, when the first is asked for.
    """

    def __init__(
        self, table: LayerTable, cluster: ClusterShape, sizes: tuple[int, ...], point: SearchPoint
    ) -> None:
        """Keep the problem.

        Args:
            table: the costs of the layers.
            cluster: the devices.
            sizes: the numbers of devices that a stage may have.
            point: one of the settings.
        """
        self._table, self._cluster = table, cluster
        self._point = dataclasses.replace(point, replicas=None)
        self._meshes = [mesh for size in sizes for mesh in meshes_of(table, self._point, size)]
        self._uses = list(itertools.product(ZERO_LEVELS, point.remats))

    @functools.cached_property
    def _stages(self) -> StageCosts:
        point = self._point
        goes_back = SCHEDULES[point.schedule].last_stage_alternates(point.num_micro_batches)
        return StageCosts(self._table, self._meshes, self._cluster, point, goes_back)

    @functools.cached_property
    def _lost(self) -> list[np.ndarray]:
        """For each use 0 where it may fit the memory, else infinite, `[mesh, first, end]`."""
        held = min(in_flight(self._point, self._depth))
        most = self._point.memory_bytes or np.inf
        needs = (
            self._stages.memory(zero, recompute_in(remat, self._table), [held])[0]
            for zero, remat in self._uses
        )
        return [np.where(needed <= most, 0.0, np.inf) for needed in needs]

    @property
    def _depth(self) -> int:
        return min(self._table.num_layers, self._cluster.num_devices)

    def of(self, point: SearchPoint) -> Outline:
        """Return the outline in one of the settings."""
        table, count = self._table, self._table.num_layers
        at = [k for k, mesh in enumerate(self._meshes) if splits(point, mesh.data)]
        meshes = [self._meshes[k] for k in at]
        if not meshes:
            none = np.zeros((0, 0, 0, 0))
            return Outline(StageTables((), none, none), (), np.full((count, count + 1), np.inf))
        stages = self._stages.among(at, point)
        hidden = max(hidden_forwards(point, self._depth, self._cluster))
        found: list[tuple[np.ndarray, ...]] = []
        for (zero, remat), every in zip(self._uses, self._lost, strict=True):
            lost = every[at]
            fits = np.isfinite(lost).any()
            recompute = recompute_in(remat, table)
            seconds: tuple[np.ndarray, ...] = (lost, lost[None], lost)
            if fits:
                seconds = stages.seconds(zero, recompute, [hidden])[:3]
            first, rest, work = seconds
            found.append((first + lost, rest[0] + lost, work + lost))
        # By the mesh first, as `ways` has them, and without ZeRO levels of one replica.
        kept = [
            (k, way)
            for k, mesh in enumerate(meshes)
            for way in range(len(found))
            if mesh.data > 1 or way < len(point.remats)
        ]
        by_way = tuple(way for _, way in kept), tuple(k for k, _ in kept)
        first, rest, work = (np.stack(of)[by_way] for of in zip(*found, strict=True))
        counts = tuple(meshes[k].devices for k, _ in kept)
        device_seconds = (work * np.array(counts)[:, None, None]).min(0)
        laid = (np.moveaxis(of, 0, -1)[None] for of in (first, rest))
        choices = [choice_on(meshes[k], *self._uses[way], table) for k, way in kept]
        return Outline(StageTables(counts, *laid), tuple(choices), device_seconds)


def price(
    table: LayerTable,
    cluster: ClusterShape,
    point: SearchPoint,
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
        point: what is fixed.
        sizes: the numbers of devices that a stage may have.
        beaten: whether to keep all ways.
        useful: which stages to price, `[first, end, way]` in the order of `ways`; None: all.
    """
    depth = min(table.num_layers, cluster.num_devices)
    choices: list[StageChoice] = []
    fronts: list[tuple[int, Way]] = []
    for size in sizes:
        listed = list(ways(table, cluster, point, size, depth, choices, useful=useful))
        fronts.extend((size, way) for way in (listed if beaten else _fronts(listed)))
    if not fronts:
        none = np.zeros((0, 0, 0, 0))
        return Priced(StageTables((), none, none), (), none, none, none)
    stacked = {name: np.stack([front[name] for _, front in fronts], -1) for name in fronts[0][1]}
    of_sizes = tuple(size for size, _ in fronts)
    found = StageTables(of_sizes, stacked["seconds"], stacked["rest"], stacked["once"])
    chosen = stacked["chosen"].astype(np.int32)
    return Priced(found, tuple(choices), chosen, stacked["memory"], stacked["recomputed"])


# seconds, rest, once, memory, chosen, recomputed, each `[stages behind, first, end]`
Way = dict[str, np.ndarray]


def ways(
    table: LayerTable,
    cluster: ClusterShape,
    point: SearchPoint,
    size: int,
    depth: int,
    choices: list[StageChoice],
    useful: np.ndarray | None = None,
) -> Iterator[Way]:
    """Yield every use of `size` devices, infinite where it does not fit; extend `choices`.

    Of what is not `useful` (`[first, end, way]`, by the position in `choices`) all is infinite, and
    a way of which nothing is useful is left out.
    """
    schedule = SCHEDULES[point.schedule]
    goes_back = schedule.last_stage_alternates(point.num_micro_batches)
    hidden, held = hidden_forwards(point, depth, cluster), in_flight(point, depth)
    for mesh in meshes_of(table, point, size):
        stage = StageCosts(table, [mesh], cluster, point, goes_back)
        for zero, remat in itertools.product(ZERO_LEVELS, point.remats):
            if zero and mesh.data == 1:
                continue
            at = len(choices)
            choices.append(choice_on(mesh, zero, remat, table))
            lost: np.ndarray | float = 0.0
            if useful is not None:
                if not useful[:, :, at].any():
                    continue
                lost = np.where(useful[:, :, at], 0.0, np.inf)
            asked = recompute_in(remat, table)
            chosen: Recompute | np.ndarray = asked
            if asked.is_open:
                wanted = None if useful is None else useful[:, :, at]
                chosen, needs = stage.fewest(zero, held, wanted)
            else:
                needs = stage.memory(zero, asked, held)
            every = needs, *stage.seconds(zero, chosen, hidden)
            needs, one, other, _, once = (of[..., 0, :, :] for of in every)
            positions = chosen[..., 0, :, :] if isinstance(chosen, np.ndarray) else np.array(0)
            lost = lost + np.where(needs <= (point.memory_bytes or np.inf), 0.0, np.inf)
            timed = {"seconds": one + lost, "rest": other + lost, "memory": needs}
            fixed = {"once": once, "chosen": np.array(at), "recomputed": positions}
            yield timed | {name: np.broadcast_to(of, needs.shape) for name, of in fixed.items()}


def recompute_in(remat: str, table: LayerTable) -> Recompute:
    """Return the recomputation that a remat string asks of stages of the table's first layers."""
    groups = table.groups or [(i,) for i in range(table.num_layers)]
    return recompute_of(remat, groups, table.selective)


def choice_on(mesh: Mesh, zero: int, remat: str, table: LayerTable) -> StageChoice:
    """Return a use of the devices of a mesh."""
    return StageChoice((mesh.data, mesh.size(MODEL)), zero, remat, table.is_sequence(mesh.row))


def meshes_of(table: LayerTable, point: SearchPoint, size: int) -> Iterator[Mesh]:
    """Yield the logical meshes of `size` devices that a microbatch can be cut along."""
    for row, model in enumerate(table.model_sizes):
        if size % model == 0 and splits(point, size // model):
            yield Mesh.of(size // model, model, row)


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


def splits(point: SearchPoint, data: int) -> bool:
    """Return whether a microbatch can be cut along so many devices, and they into the replicas."""
    rows = point.batch_size // point.num_micro_batches
    return data % (point.replicas or 1) == 0 and rows % data == 0
