"""The cost of each run of layers as a stage on one logical mesh.

Pure numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.partition.task_programs import MOST_INSIDE
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.inter_op.layer_costs import CostTable
from launcher.schedule import SCHEDULES


@dataclass(frozen=True)
class Setting:
    """What is fixed for one run of the stage search.

    Attributes:
        num_micro_batches: number of microbatches a step.
        batch_size: rows of the whole batch.
        replicas: number of replicas that all stages have in common.
        schedule: name of the schedule.
        remats: the names of the rematerialisation policies to choose from.
        memory_bytes: memory of a device; None: no limit.
    """

    num_micro_batches: int
    batch_size: int
    replicas: int
    schedule: str
    remats: tuple[str, ...]
    memory_bytes: float | None


def in_flight(setting: Setting, depth: int) -> list[int]:
    """Return the microbatches whose activations a stage holds, by the number of stages behind it.

    The stage is taken to be the first, which gives a lower bound, since the number of all stages is
    not known here.
    """
    schedule, most = SCHEDULES[setting.schedule], setting.num_micro_batches
    return [schedule.in_flight_bound(0, behind + 1, most) for behind in range(depth)]


class StageCosts:
    """Costs of all stages on one logical mesh: arrays `[first, end]`, in seconds and bytes."""

    def __init__(
        self,
        table: CostTable,
        m_index: int,
        cluster: ClusterShape,
        setting: Setting,
        data: int,
        model: int,
        back_at_once: bool,
    ) -> None:
        """Add up the costs of the table's layers.

        Args:
            table: the costs of the layers.
            m_index: the number of the model axis in the table.
            cluster: the rates of the devices.
            setting: what is fixed.
            data: size of the data axis.
            model: size of the model axis.
            back_at_once: whether each backward pass of the last stage directly follows its forward
                pass.
        """
        self._cluster, self._setting = cluster, setting
        self._table, self._m_index = table, m_index
        self._data, self._model, self._back_at_once = data, model, back_at_once
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
        """Return the seconds of the first microbatch with its transfer, and of everything else.

        The transfer is the one to the next stage.
        """
        one = sum(self.passes(zero, remat))
        rest = (self._setting.num_micro_batches - 1) * one + self.once(zero)
        return one + self._sending() + self._valid, rest + self._valid

    def passes(self, zero: int, remat: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a microbatch's forward and backward pass."""
        cluster, of, data = self._cluster, self._of, self._data
        forward = self.work() + self._summed("forward")
        backward = 2 * self.work() + self._summed("backward", of["fixed_backward_bytes"])
        if remat != "none":
            backward = backward + forward
        rows = data // self._setting.replicas
        if rows > 1:  # summed in every microbatch
            backward = backward + self._along_data("gradient_bytes", rows)
        if zero == 3:  # gathered in both passes, once if they are one; scattered in the second
            gather = self._along_data("parameter_bytes", data) / 2
            scatter = self._along_data("gradient_bytes", data) / 2
            again = np.where(self._as_one(), 0.0, gather)
            forward, backward = forward + gather, backward + again + scatter
        launch = np.where(self._as_one(), 0.0, cluster.launch)
        return forward + cluster.launch, backward + launch

    def _as_one(self) -> np.ndarray:
        """Return whether both passes will be one task program; see `task_programs.runs_as_one`."""
        last = np.arange(self._valid.shape[1]) == self._valid.shape[0]
        small = self._of["residual_bytes"] / self._slices <= MOST_INSIDE
        return last[None, :] & small & self._back_at_once

    def work(self) -> np.ndarray:
        """Return the seconds of a microbatch's forward pass without communication."""
        return self._of["work_seconds"] / self._slices + self._of["fixed_seconds"]

    def sent(self) -> np.ndarray:
        """Return the bytes of one microbatch to the next stage."""
        return self._sent / self._setting.num_micro_batches

    def memory(self, zero: int, remat: str, in_flight: Sequence[int]) -> np.ndarray:
        """Return the peak bytes on a device, `[stages behind, first, end]`.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            remat: name of the rematerialisation policy.
            in_flight: the microbatches whose activations a stage holds, by the stages behind it.
        """
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
        held = np.array(in_flight)[:, None, None]
        activations = held * kept[None] + held_to_work[None]
        if in_flight[0] == 1:  # the last stage goes back at once
            activations[0] = (
                self._first_input / self._slices + np.maximum(again, residual) + working
            )
        return (state + gradients)[None] + activations

    def _most(self, name: str) -> np.ndarray:
        """Return the most of any layer of a stage."""
        row = self._table.of[name][self._m_index]
        count = len(row)
        ends = [np.maximum.accumulate(row[first:]) for first in range(count)]
        found = np.zeros((count, count + 1))
        for first, most in enumerate(ends):
            found[first, first + 1 :] = most
        return found

    def once(self, zero: int) -> np.ndarray:
        """Return the seconds of what is done once a step.

        Gradients are summed over the replicas, and the update reads and writes the state.
        """
        state, common = self._of["state_bytes"], self._setting.replicas
        kept = self._of["parameter_bytes"] if zero == 2 else 0.0
        held = kept + (state - kept) / (self._data if zero else 1)
        update = 2 * held / self._cluster.memory_bandwidth
        if zero == 3:
            return update
        return update + self._along_data("gradient_bytes", common)

    def _along_data(self, name: str, devices: int) -> np.ndarray:
        """Return the seconds to all-reduce along data as many arrays as there are parameters."""
        cluster = self._cluster
        beside = min(self._model, cluster.devices_per_host)
        link = cluster.link_of_axis(self._data * self._model, beside)
        waits = 2 * (devices - 1) * cluster.latency
        return _ring(self._of[name], devices, link) + waits * self._of["parameters"]

    def _summed(self, name: str, fixed: np.ndarray | float = 0.0) -> np.ndarray:
        """Return the seconds to all-reduce along the model axis, for one microbatch.

        Args:
            name: "forward" or "backward".
            fixed: bytes of any microbatch.
        """
        if self._model == 1:
            return np.zeros_like(self._of["work_seconds"])
        link = self._cluster.link_of_axis(self._model)
        size = self._of[f"{name}_bytes"] / self._slices + fixed
        moved = _ring(size, self._model, link)
        waits = 2 * (self._model - 1) * self._cluster.latency
        return moved + waits * self._of[f"{name}_sums"]

    def _sending(self) -> np.ndarray:
        """Return the seconds to send one microbatch to the next stage, and its gradient back."""
        cluster = self._cluster
        across = cluster.hosts > 1 and self._data * self._model >= cluster.devices_per_host
        links = cluster.inter_host if across else cluster.intra_host * self._data
        size = self.sent()
        return np.where(size > 0, 2 * (size / links + cluster.latency), 0.0)


def _spans(values: np.ndarray) -> np.ndarray:
    """Return the sums over `[first, end)`."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(np.maximum(total[None, :] - total[:-1, None], 0.0))


def _ring(size: np.ndarray, devices: int, link: float) -> np.ndarray:
    """Return the seconds of `cost.collectives.all_reduce_seconds`, without the latency."""
    return 2 * (devices - 1) * size / devices / link
