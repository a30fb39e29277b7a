"""The cost of each run of layers as a stage on one logical mesh.

Pure numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.partition.reduction import DEFAULT_REDUCTION, Reduction
from launcher.partition.task_programs import MOST_INSIDE
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.cost.formulas import (
    Amount,
    Links,
    PassParts,
    PassSeconds,
    activation_bytes,
    all_reduce_seconds,
    beside_seconds,
    bucket_count,
    exposed_seconds,
    gather_seconds,
    pass_seconds,
    ring_links,
    sharded_bytes,
    update_seconds,
)
from launcher.plan.inter_op.cost_table import PARAMETER_FIELDS, CostTable
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
        reduction: how gradients are summed over the replicas.
    """

    num_micro_batches: int
    batch_size: int
    replicas: int
    schedule: str
    remats: tuple[str, ...]
    memory_bytes: float | None
    reduction: Reduction = DEFAULT_REDUCTION


@functools.cache
def links_within(data: int, model: int, cluster: ClusterShape) -> Links:
    """Return the links of a submesh that takes the devices in order, from the first of a host."""
    hosts = [cluster.host_of(device) for device in range(data * model)]
    return ring_links(hosts, model, cluster)


class StageCosts:
    """Costs of all stages on one logical mesh: arrays `[first, end]`, in seconds and bytes."""

    # Numbers; of several meshes (`ManyStageCosts`) arrays.
    _data: Any
    _model: Any
    _slices: Any
    _rings: tuple[Any, Any]  # bytes/s along model and along data
    _of: Mapping[str, np.ndarray]

    def __init__(
        self,
        table: CostTable,
        m_index: int,
        cluster: ClusterShape,
        setting: Setting,
        data: int,
        back_at_once: bool,
        links: Links | None = None,
    ) -> None:
        """Add up the costs of the table's layers.

        Args:
            table: the costs of the layers.
            m_index: the number of the model axis in the table.
            cluster: the rates of the devices.
            setting: what is fixed.
            data: size of the data axis.
            back_at_once: whether each backward pass of the last stage directly follows its forward
                pass.
            links: the links of the submesh; by default those of `links_within`.
        """
        self._share(table, cluster, setting, back_at_once)
        self._m_index = m_index
        self._data, self._model = data, table.model_sizes[m_index]
        links = links or links_within(data, self._model, cluster)
        self._rings = links.model, links.data
        self._slices = setting.num_micro_batches * data
        self._of = table.spans[m_index]

    def _share(
        self, table: CostTable, cluster: ClusterShape, setting: Setting, back_at_once: bool
    ) -> None:
        """Keep what does not depend on the logical mesh."""
        self._cluster, self._setting, self._table = cluster, setting, table
        self._schedule = SCHEDULES[setting.schedule]
        first, end = np.arange(table.num_layers)[:, None], np.arange(table.num_layers + 1)[None]
        self._valid = np.where(first < end, 0.0, np.inf)
        self._is_first = np.broadcast_to(first == 0, self._valid.shape)
        is_last = np.broadcast_to(end == table.num_layers, self._valid.shape)
        self._goes_back = is_last & back_at_once

    def _as_one(self, remat: str) -> np.ndarray:
        """Return whether both passes are one task program: see `task_programs.runs_as_one`."""
        left = self._a_slice("residual_bytes")
        if remat != "none":
            left = self._a_slice("checkpoint_bytes") - self._a_slice("input_bytes")
        return np.asarray(self._goes_back & (left <= MOST_INSIDE))

    def _a_slice(self, name: str) -> np.ndarray:
        """Return the share of one slice of what is of the whole batch."""
        return np.asarray(self._of[name] / self._slices)

    def seconds(self, zero: int, remat: str, hidden: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Return the seconds of the first microbatch, of everything else, and of all work.

        A pipeline takes no less than the sum of the first over its stages and the most of the
        second. For the first microbatch goes through all stages and back; where a stage works on
        others meanwhile (`Schedule.hidden_forwards`), that is not part of everything else, nor is
        what it may do while the last gradient goes on. A stage takes as long as its devices work,
        or as long as it sends, whichever is more.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            remat: name of the rematerialisation policy.
            hidden: the forward passes that the first round trip hides, by the stages behind.

        Returns:
            The seconds of one microbatch with its transfers to and from the next stage,
            `[first, end]`; of everything else, `[stages behind, first, end]`; and those in which a
            device works or is done once a step, `[first, end]`.
        """
        passes, others = self.passes(zero, remat), self._setting.num_micro_batches - 1
        out, back = self._crossing_seconds()
        latency = np.where(out > 0, self._cluster.latency, 0.0)
        whole = passes.forward + passes.backward
        once, work, sends = whole, others * whole, others * (out + back)
        if self._schedule.splits_backward and not self._cluster.shares_machine:
            once = np.where(self._is_first, whole, whole - passes.weight)
            # Its own weights, and one more for each stage before, are left to do while the last
            # gradient goes back there.
            later = np.minimum(np.arange(self._table.num_layers), others)[:, None]
            work = work - np.where(self._is_first, 0.0, later * passes.weight)
        done = np.array(hidden, float)[:, None, None]
        rest = np.maximum(work - done * passes.forward, sends - done * out)
        update = self.once(zero, remat)
        first = once + 2 * (out + latency)
        every = whole * self._setting.num_micro_batches + update
        return first + self._valid, rest + update + self._valid, every + self._valid

    @functools.cached_property
    def passes(self) -> Callable[[int, str], PassSeconds]:
        """The seconds of a microbatch's passes, by ZeRO level and rematerialisation policy."""
        return functools.cache(self._passes)

    def _passes(self, zero: int, remat: str) -> PassSeconds:
        of = self._of
        work, back = self._work()
        sums = self._along_model(self._a_slice("forward_bytes"), of["forward_sums"])
        sums_back = self._along_model(
            self._a_slice("backward_bytes") + of["fixed_backward_bytes"], of["backward_sums"]
        )
        repeated = self._along_model(self._a_slice("repeated_bytes"), of["repeated_sums"])
        as_one = self._as_one(remat)
        sums_back = sums_back + np.where(as_one, 0.0, repeated)
        again = np.zeros_like(work)
        if remat != "none":
            again, sums_back = work, sums_back + sums
        rows_axis = self._data // self._setting.replicas  # if there is one, in every microbatch
        sums_back = sums_back + all_reduce_seconds(
            of["parameter_bytes"], rows_axis, *self._ring, of["parameters"]
        )
        cut = self._sharded(zero if zero == 3 else 0)
        scattered = self._buckets(cut["gradient_bytes"], cut["gradients"])
        crossing = self._crossing(cut["gradient_bytes"])
        gather = gather_seconds(cut["parameter_bytes"], self._data, *self._ring, cut["parameters"])
        scatter = gather_seconds(crossing, self._data, *self._ring, scattered)
        parts = PassParts(work, back, again, sums, sums_back, gather, scatter)
        splits = self._schedule.splits_backward
        return pass_seconds(parts, self._cluster.dispatch_overhead, as_one, self._is_first, splits)

    def _work(self) -> tuple[np.ndarray, np.ndarray]:
        rows = self._setting.batch_size / self._slices
        return self._table.work_seconds(self._m_index, self._slices, rows)

    def _peak(self, name: str) -> np.ndarray:
        return self._table.peak_bytes(self._m_index, name, self._slices)

    def _layer_peak(self) -> np.ndarray:
        return self._table.layer_peak_bytes(self._m_index, self._slices)

    def _divisible(self) -> Mapping[str, np.ndarray]:
        return self._table.parameter_spans(self._m_index, self._data)

    def sent(self) -> np.ndarray:
        """Return the bytes of one microbatch to the next stage."""
        return np.asarray(self._of["sent_bytes"] / self._setting.num_micro_batches)

    def held(self, zero: int) -> np.ndarray:
        """Return the bytes that a device holds all through the step."""
        return self._held(zero)

    @functools.cached_property
    def _held(self) -> Callable[[int], np.ndarray]:
        return functools.cache(self._held_bytes)

    def _held_bytes(self, zero: int) -> np.ndarray:
        of, cut, data = self._of, self._sharded(zero), self._data
        parameters: Amount = of["parameter_bytes"]
        gradients: Amount = of["gradient_bytes"]
        optimizer = sharded_bytes(of["optimizer_bytes"], cut["optimizer_bytes"], data)
        if zero == 3:  # a pass has them whole, and their gradients
            whole = 2 * cut["parameter_bytes"]
            parameters = sharded_bytes(parameters, cut["parameter_bytes"], data) + whole
            gradients = sharded_bytes(gradients, cut["gradient_bytes"], data)
        return np.asarray(of["batch_bytes"] / data + parameters + optimizer + gradients)

    @functools.cached_property
    def working(self) -> Callable[[str], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What a forward pass leaves, and what either pass needs on top, in bytes, by policy."""
        return functools.cache(self._working)

    def _working(self, remat: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if remat == "none":
            whole, forward, backward = map(self._peak, ("whole", "forward", "backward"))
            left = self._a_slice("left_bytes")
        else:  # the layers' inputs are left, and one layer at a time is computed again
            left = self._a_slice("checkpoint_bytes")
            backward = self._layer_peak()
            whole, forward = left + backward, left
        # One program of both passes leaves what the second part of a backward pass in two needs.
        as_one, kept = self._as_one(remat), left if self._schedule.splits_backward else 0.0
        return (
            np.where(as_one, kept, left),
            np.where(as_one, whole, forward),
            np.where(as_one, whole - kept, backward),
        )

    def memory(self, zero: int, remat: str, in_flight: Sequence[int]) -> np.ndarray:
        """Return the peak bytes on a device, `[stages behind, first, end]`.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            remat: name of the rematerialisation policy.
            in_flight: the microbatches whose activations a stage holds, by the stages behind it.
        """
        held = np.array(in_flight)[:, None, None]
        return np.asarray(self.held(zero) + activation_bytes(held, *self.working(remat)))

    @functools.cached_property
    def once(self) -> Callable[[int, str], np.ndarray]:
        """The seconds of what is done once a step, by ZeRO level and rematerialisation policy.

        Gradients are summed over the replicas beside the backward pass, and the update reads and
        writes the state.
        """
        return functools.cache(self._once)

    def _once(self, zero: int, remat: str) -> np.ndarray:
        backward = self.passes(zero, remat).backward
        of, cut, replicas = self._of, self._sharded(zero), self._setting.replicas
        state = of["owned_bytes"] + of["optimizer_bytes"]
        sharded = cut["optimizer_bytes"] + (cut["owned_bytes"] if zero == 3 else 0.0)
        summed = of["gradient_bytes"] - cut["gradient_bytes"]
        count = of["gradients"] - cut["gradients"]
        buckets = self._buckets(summed, count)
        sums = all_reduce_seconds(self._crossing(summed), replicas, *self._ring, buckets)
        gathers = np.zeros_like(state)
        if zero == 2:  # scattered, and gathered after the update
            scattered = self._buckets(cut["gradient_bytes"], cut["gradients"])
            crossing = self._crossing(cut["gradient_bytes"])
            sums = sums + gather_seconds(crossing, self._data, *self._ring, scattered)
            buckets = buckets + scattered
            gathers = gather_seconds(
                cut["parameter_bytes"], self._data, *self._ring, cut["parameters"]
            )
        exposed = exposed_seconds(sums, buckets, beside_seconds(backward, self._cluster))
        held = sharded_bytes(state, sharded, self._data)
        return np.asarray(update_seconds(exposed + gathers, held, self._cluster.memory_bandwidth))

    def _buckets(self, size: Amount, count: Amount) -> Amount:
        """Return the number of buckets of gradients, by their bytes as they are accumulated."""
        limit = self._setting.reduction.bucket_bytes
        return bucket_count(self._crossing(size), count, limit)

    def _crossing(self, size: Amount) -> Amount:
        """Return the bytes that cross, of gradients of 32 bits."""
        return size / 2 if self._setting.reduction.dtype == "bf16" else size

    @property
    def _ring(self) -> tuple[float, float]:
        """Bytes/s and latency of the rings along data."""
        return self._rings[1], self._cluster.latency

    def _sharded(self, zero: int) -> Mapping[str, np.ndarray]:
        """Return what is sharded along data at a ZeRO level, by the fields of `ParameterCost`.

        Level 2 follows the optimizer's state: without any, it is the same as level 0.
        """
        if zero == 3 or (zero == 2 and self._table.has_optimizer):
            return self._divisible()
        return dict.fromkeys(PARAMETER_FIELDS, np.zeros(self._valid.shape))

    def _along_model(self, size: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return the seconds to all-reduce so many arrays along the model axis."""
        latency = self._cluster.latency
        return np.asarray(all_reduce_seconds(size, self._model, self._rings[0], latency, count))

    def _crossing_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for how long one microbatch occupies the links, `[first, end]`.

        They are those to the next stage, and those of its gradient to the one before. The other
        stage is taken to be no slower than this one, and on the same host if both fit there.
        """
        out = np.asarray(self.sent() / self._bandwidth / self._senders)
        return out, np.broadcast_to(out[..., 0, :-1, None], out.shape)

    @property
    def _bandwidth(self) -> Any:
        """Bytes/s of a link to the next stage."""
        return self._cluster.intra_host if self._is_local else self._cluster.inter_host

    @property
    def _senders(self) -> Any:
        """The links to the next stage."""
        devices = self._data * self._model
        hosts = -(-devices // self._cluster.devices_per_host)
        return self._data if self._is_local else min(self._data, hosts)

    @property
    def _is_local(self) -> bool:
        cluster, devices = self._cluster, self._data * self._model
        return cluster.hosts == 1 or devices < cluster.devices_per_host
