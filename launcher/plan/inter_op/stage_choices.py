"""The cost of a stage of any layers on any submesh, for one number of microbatches.

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

from launcher.hardware.cluster_shape import ClusterShape
from launcher.plan.inter_op.cost_table import CostTable
from launcher.plan.inter_op.layers_again import FEWEST, layers_again
from launcher.plan.inter_op.many_stage_costs import ManyStageCosts
from launcher.plan.inter_op.setting import Setting
from launcher.plan.inter_op.stage_costs import StageCosts
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
        again: what each candidate computes again, as a number (`layers_again`).
    """

    candidates: Candidates
    choices: tuple[StageChoice, ...]
    chosen: np.ndarray
    memory: np.ndarray
    again: np.ndarray


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


class Outlines:
    """Outlines of every stage of the table's layers, in a fraction of the time of their prices.

    They are of settings that differ in their replicas alone: what these do not change is computed
    once, when the first is asked for.
    """

    def __init__(
        self, table: CostTable, cluster: ClusterShape, sizes: tuple[int, ...], setting: Setting
    ) -> None:
        """Keep the problem.

        Args:
            table: the costs of the layers.
            cluster: the devices.
            sizes: the numbers of devices that a stage may have.
            setting: one of the settings.
        """
        self._table, self._cluster, self._setting = table, cluster, setting
        every = dataclasses.replace(setting, replicas=1)
        self._meshes = [
            (m_index, size // model)
            for size in sizes
            for m_index, model in enumerate(table.model_sizes)
            if size % model == 0 and splits(every, size // model)
        ]
        self._uses = list(itertools.product(ZERO_LEVELS, setting.remats))

    @functools.cached_property
    def _stages(self) -> ManyStageCosts:
        setting = self._setting
        goes_back = SCHEDULES[setting.schedule].last_stage_alternates(setting.num_micro_batches)
        return ManyStageCosts(self._table, self._meshes, self._cluster, setting, goes_back)

    @functools.cached_property
    def _lost(self) -> list[np.ndarray]:
        """For each use 0 where it may fit the memory, else infinite, `[mesh, first, end]`."""
        held = min(in_flight(self._setting, self._depth))
        most = self._setting.memory_bytes or np.inf
        needs = (
            self._needs(zero, count_again(remat, self._table), held) for zero, remat in self._uses
        )
        return [np.where(needed <= most, 0.0, np.inf) for needed in needs]

    def _needs(self, zero: int, again: int | None, held: int) -> np.ndarray:
        """Return the peak bytes on a device at least, `[mesh, first, end]`."""
        if again is None:
            return self._stages.least_memory(zero)
        return self._stages.memory(zero, again, [held])

    @property
    def _depth(self) -> int:
        return min(self._table.num_layers, self._cluster.num_devices)

    def of(self, setting: Setting) -> Outline:
        """Return the outline in one of the settings."""
        table, count = self._table, self._table.num_layers
        at = [k for k, (_, data) in enumerate(self._meshes) if splits(setting, data)]
        meshes = [self._meshes[k] for k in at]
        if not meshes:
            none = np.zeros((0, 0, 0, 0))
            return Outline(Candidates((), none, none), (), np.full((count, count + 1), np.inf))
        stages = self._stages.of_replicas(setting, at)
        hidden = max(hidden_forwards(setting, self._depth, self._cluster))
        found: list[tuple[np.ndarray, ...]] = []
        for (zero, remat), every in zip(self._uses, self._lost, strict=True):
            lost = every[at]
            fits = np.isfinite(lost).any()
            again = count_again(remat, table)
            seconds = stages.seconds(zero, again, [hidden]) if fits else (lost,) * 3
            found.append(tuple(one + lost for one in seconds))
        # By the mesh first, as `ways` has them, and without ZeRO levels of one replica.
        kept = [
            (k, way)
            for k, (_, data) in enumerate(meshes)
            for way in range(len(found))
            if data > 1 or way < len(setting.remats)
        ]
        by_way = tuple(way for _, way in kept), tuple(k for k, _ in kept)
        first, rest, work = (np.stack(of)[by_way] for of in zip(*found, strict=True))
        counts = tuple(table.model_sizes[meshes[k][0]] * meshes[k][1] for k, _ in kept)
        device_seconds = (work * np.array(counts)[:, None, None]).min(0)
        laid = (np.moveaxis(of, 0, -1)[None] for of in (first, rest))
        axes = [(data, table.model_sizes[m], table.is_sequence(m)) for m, data in meshes]
        choices = [StageChoice(axes[k][:2], *self._uses[way], axes[k][2]) for k, way in kept]
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
        return Priced(Candidates((), none, none), (), none, none, none)
    stacked = {name: np.stack([front[name] for _, front in fronts], -1) for name in fronts[0][1]}
    of_sizes = tuple(size for size, _ in fronts)
    found = Candidates(of_sizes, stacked["seconds"], stacked["rest"], stacked["once"])
    chosen = stacked["chosen"].astype(np.int32)
    return Priced(found, tuple(choices), chosen, stacked["memory"], stacked["again"])


# seconds, rest, once, memory, chosen, again, each `[stages behind, first, end]`
Way = dict[str, np.ndarray]


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
            count = count_again(remat, table)
            if count is None:
                wanted = None if useful is None else useful[:, :, at]
                again, needs = stage.fewest_again(zero, held, wanted)
            else:
                again, needs = count, stage.memory(zero, count, held)
            one, other, _ = stage.seconds(zero, again, hidden)
            _, once = stage.timed(zero, again)
            lost = lost + np.where(needs <= (setting.memory_bytes or np.inf), 0.0, np.inf)
            timed = {"seconds": one + lost, "rest": other + lost, "memory": needs}
            fixed = {"once": once, "chosen": np.array(at), "again": np.asarray(again)}
            yield timed | {name: np.broadcast_to(of, needs.shape) for name, of in fixed.items()}


def count_again(remat: str, table: CostTable) -> int | None:
    """Return what of each stage is computed again, as a number; None: as little as fits."""
    if remat == FEWEST:
        return None
    groups = table.groups or [(i,) for i in range(table.num_layers)]
    return layers_again(remat, groups, table.selective)


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
