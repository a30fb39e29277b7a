"""What a stage of any layers on any submesh would cost, for one number of microbatches. Pure.

For each number of devices the logical mesh, ZeRO level and rematerialisation that fit the memory
are chosen here, so that the stage search sees few prices. Used by `search.auto`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.search.layers import CostTable
from launcher.plan.search.stages import Candidates

ZERO_LEVELS = (0, 2, 3)


@dataclass(frozen=True)
class Choice:
    """How a stage uses its devices."""

    logical_mesh: tuple[int, int]
    zero: int
    remat: str


@dataclass(frozen=True)
class Setting:
    """What is fixed for one run of the stage search.

    Attributes:
        replicas: that all stages have in common. remats: the names to choose from.
        memory_bytes: of a device; None: without bound.
    """

    num_micro_batches: int
    batch_size: int
    replicas: int
    schedule: str
    remats: tuple[str, ...]
    memory_bytes: float | None


@dataclass(frozen=True, eq=False)
class Priced:
    """The candidates, and the choice behind each: a position in `choices`, and the memory."""

    candidates: Candidates
    choices: tuple[Choice, ...]
    chosen: np.ndarray
    memory: np.ndarray


def submesh_sizes(cluster: ClusterShape) -> tuple[int, ...]:
    """The numbers of devices that a stage may have: on one host any, on several the divisors of a
    host's number and whole hosts by powers of two, so that they can be placed."""
    each, hosts = cluster.devices_per_host, cluster.hosts
    if hosts == 1 and each <= 16:
        return tuple(range(1, each + 1))
    within = [n for n in range(1, each + 1) if each % n == 0]
    counts = {2**k for k in range(hosts.bit_length()) if 2**k <= hosts} | {hosts}
    return tuple(sorted({*within, *(each * n for n in counts)}))


def price(
    table: CostTable, cluster: ClusterShape, setting: Setting, sizes: tuple[int, ...]
) -> Priced:
    """Price every stage. Layers are the table's.

    Of the ways to use a number of devices those stay that no other beats both in seconds and in
    rest: which of them is best depends on the other stages. The first is the fastest.
    """
    depth = min(table.of["work_seconds"].shape[1], cluster.num_devices)
    choices: list[Choice] = []
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
    choices: list[Choice],
) -> Iterator[Way]:
    """Every use of so many devices, infinite where it does not fit; adds to `choices`."""
    for m_index, model in enumerate(table.model_sizes):
        data = size // model
        if size % model or not _splits(setting, data):
            continue
        stage = _Stage(table, m_index, cluster, setting, data, model)
        for zero, remat in itertools.product(ZERO_LEVELS, setting.remats):
            if zero and data == 1:
                continue
            one, other = stage.seconds(zero, remat)
            needs = stage.memory(zero, remat, depth)
            lost = np.where(needs <= (setting.memory_bytes or np.inf), 0.0, np.inf)
            chosen = np.full(needs.shape, len(choices))
            choices.append(Choice((data, model), zero, remat))
            yield {"seconds": one + lost, "rest": other + lost, "memory": needs, "chosen": chosen}


def _fronts(size: int, ways: Iterable[Way]) -> Iterator[tuple[int, Way]]:
    """The ways that are not beaten, by growing seconds and falling rest."""
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


class _Stage:
    """All stages, `[first, end]`, on one logical mesh."""

    def __init__(
        self,
        table: CostTable,
        m_index: int,
        cluster: ClusterShape,
        setting: Setting,
        data: int,
        model: int,
    ) -> None:
        self._cluster, self._setting = cluster, setting
        self._table, self._m_index = table, m_index
        self._data, self._model = data, model
        self._slices = setting.num_micro_batches * data
        self._of = {name: _spans(rows[m_index]) for name, rows in table.of.items()}
        count = table.of["work_seconds"].shape[1]
        self._first_input = np.broadcast_to(
            table.of["input_bytes"][m_index][:, None], (count, count + 1)
        )
        sent = np.concatenate([[0.0], table.of["sent_bytes"][m_index]])
        sent[-1] = 0.0  # the last stage sends nothing on
        self._sent = np.broadcast_to(sent[None, :], (count, count + 1))
        ordered = np.arange(count)[:, None] < np.arange(count + 1)[None, :]
        self._valid = np.where(ordered, 0.0, np.inf)

    def seconds(self, zero: int, remat: str) -> tuple[np.ndarray, np.ndarray]:
        """Of the first microbatch with its way to the next stage; of all else."""
        cluster, of, data = self._cluster, self._of, self._data
        work = of["work_seconds"] / self._slices
        forward = work + self._summed("forward")
        backward = 2 * work + self._summed("backward") + (forward if remat != "none" else 0.0)
        one = forward + backward + 2 * cluster.latency
        rows, link = data // self._setting.replicas, self._data_link
        if rows > 1:  # summed in every microbatch
            one = one + _ring(of["gradient_bytes"], rows, link, cluster.latency)
        if zero == 3:  # gathered in both passes, scattered in the second
            one = one + 1.5 * _ring(of["parameter_bytes"], data, link, cluster.latency)
        rest = (self._setting.num_micro_batches - 1) * one + self._once(zero)
        return one + self._sending() + self._valid, rest + self._valid

    def memory(self, zero: int, remat: str, depth: int) -> np.ndarray:
        """Peak bytes on a device, `[stages behind, first, end]`."""
        of, data = self._of, self._data
        parameters, state, gradients = (
            of[f"{name}_bytes"] for name in ("parameter", "state", "gradient")
        )
        if zero == 2:
            state = parameters + (state - parameters) / data
        elif zero == 3:
            state, gradients = state / data + 2 * parameters, gradients / data
        residual = of["residual_bytes"] / self._slices
        working = self._most("working_bytes") / self._slices
        again = of["again_bytes"] / self._slices
        kept, held_to_work = residual, working
        if remat != "none":  # what is computed again is there while it is used
            kept, held_to_work = self._first_input / self._slices, working + again
        most = self._setting.num_micro_batches
        behind = np.arange(1, depth + 1)
        held = np.minimum(behind, most) if self._setting.schedule != "gpipe" else behind * 0 + most
        activations = held[:, None, None] * kept[None] + held_to_work[None]
        if self._setting.schedule != "gpipe":  # the last stage goes back at once
            activations[0] = self._first_input / self._slices + again + working
        return (state + gradients)[None] + activations

    def _most(self, name: str) -> np.ndarray:
        """The most of any layer of a stage."""
        row = self._table.of[name][self._m_index]
        count = len(row)
        ends = [np.maximum.accumulate(row[first:]) for first in range(count)]
        found = np.zeros((count, count + 1))
        for first, most in enumerate(ends):
            found[first, first + 1 :] = most
        return found

    def _once(self, zero: int) -> np.ndarray:
        """Gradients summed over the replicas, and the update, which reads and writes the state."""
        state, common = self._of["state_bytes"], self._setting.replicas
        update = 2 * state / (self._data if zero else 1) / self._cluster.memory_bandwidth
        if zero == 3:
            return update
        gradients = self._of["gradient_bytes"]
        return update + _ring(gradients, common, self._data_link, self._cluster.latency)

    @property
    def _data_link(self) -> float:
        devices = self._data * self._model
        return self._cluster.link_of_axis(devices, min(self._model, self._cluster.devices_per_host))

    def _summed(self, name: str) -> np.ndarray:
        """All-reduced along the model axis, for one microbatch."""
        if self._model == 1:
            return np.zeros_like(self._of["work_seconds"])
        link = self._cluster.link_of_axis(self._model)
        moved = _ring(self._of[f"{name}_bytes"] / self._slices, self._model, link, 0.0)
        waits = 2 * (self._model - 1) * self._cluster.latency
        return moved + waits * self._of[f"{name}_sums"]

    def _sending(self) -> np.ndarray:
        """One microbatch to the next stage and its gradient back."""
        cluster = self._cluster
        across = cluster.hosts > 1 and self._data * self._model >= cluster.devices_per_host
        links = cluster.inter_host if across else cluster.intra_host * self._data
        size = self._sent / self._setting.num_micro_batches
        return np.where(size > 0, 2 * (size / links + cluster.latency), 0.0)


def _spans(values: np.ndarray) -> np.ndarray:
    """Sums over `[first, end)`."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(np.maximum(total[None, :] - total[:-1, None], 0.0))


def _ring(size: np.ndarray, devices: int, link: float, latency: float) -> np.ndarray:
    """See `sharding.cost.all_reduce_seconds`."""
    if devices == 1:
        return np.zeros_like(size)
    return 2 * (devices - 1) * (size / devices / link + latency)
