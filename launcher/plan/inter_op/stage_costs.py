"""The cost of each run of layers as a stage on one logical mesh.

Pure numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.hardware.cluster_shape import ClusterShape
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
    sharded_bytes,
    update_seconds,
)
from launcher.plan.inter_op.cost_table import CostTable
from launcher.plan.inter_op.setting import Setting
from launcher.plan.inter_op.stage_rings import StageRings
from launcher.plan.inter_op.submeshes import links_within


class StageCosts(StageRings):
    """Costs of all stages on one logical mesh: arrays `[first, end]`, in seconds and bytes."""

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

    def seconds(
        self, zero: int, again: int | np.ndarray | None, hidden: Sequence[int]
    ) -> tuple[np.ndarray, ...]:
        """Return the seconds of the first microbatch, of everything else, and of all work.

        A pipeline takes no less than the sum of the first over its stages and the most of the
        second. For the first microbatch goes through all stages and back; where a stage works on
        others meanwhile (`Schedule.hidden_forwards`), that is not part of everything else, nor is
        what it may do while the last gradient goes on. A stage takes as long as its devices work,
        or as long as it sends, whichever is more.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            again: what of a stage is computed again (`layers_again`); or the same of each stage,
                `[stages behind, first, end]`.
            hidden: the forward passes that the first round trip hides, by the stages behind.

        Returns:
            The seconds of one microbatch with its transfers to and from the next stage,
            `[first, end]`; of everything else, `[stages behind, first, end]`; and those in which a
            device works or is done once a step, `[first, end]`.
        """
        passes, update = self.timed(zero, again)
        others = self._setting.num_micro_batches - 1
        out, back, latency = self._crossing_seconds
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
        first = once + 2 * (out + latency)
        every = whole * self._setting.num_micro_batches + update
        return first + self._valid, rest + update + self._valid, every + self._valid

    def timed(self, zero: int, again: int | np.ndarray | None) -> tuple[PassSeconds, np.ndarray]:
        """Return the seconds of the passes, and of what is done once a step; see `seconds`."""
        if not isinstance(again, np.ndarray):
            return self.passes(zero, again), self.once(zero, again)
        of, at = self.passes(zero, None), (again, self._first, self._end)
        chosen = PassSeconds(of.forward, np.asarray(of.backward)[at], np.asarray(of.weight)[at])
        return chosen, self.once(zero, None)[at]

    def passes(self, zero: int, again: int | None) -> PassSeconds:
        """Return the seconds of a microbatch's passes.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            again: what of a stage is computed again (`layers_again`); None: each number, along a
                leading axis.
        """
        return self._passes(zero == 3, again)  # the other levels are the update's

    @functools.cached_property
    def _passes(self) -> Callable[[bool, int | None], PassSeconds]:
        return functools.cache(self._pass_seconds)

    def _pass_seconds(self, gathers: bool, again: int | None) -> PassSeconds:
        """Return the seconds of the passes, by whether they gather the parameters."""
        work, back, sums, sums_back, repeated = self._both_passes
        as_one = self._as_one(again)
        sums_back = sums_back + np.where(as_one, 0.0, repeated) + self._again(sums, again)
        sums_back, more = sums_back + self._row_sums, self._again(work, again)
        if self._may_be_selective(again):
            own, own_sums = (self._selectively(of, again) for of in self._selective_parts)
            sums_back, more = sums_back + own_sums, more + own
        gather: Amount = 0.0
        scatter: Amount = 0.0
        if gathers:
            cut = self._sharded(3)
            size, count = cut["parameter_bytes"], cut["parameters"]
            gather = gather_seconds(size, self._data, *self._ring, count)
            scatter = self._scatter_seconds(cut)
        parts = PassParts(work, back, more, sums, sums_back, gather, scatter)
        splits = self._schedule.splits_backward
        return pass_seconds(parts, self._cluster.dispatch_overhead, as_one, self._is_first, splits)

    @functools.cached_property
    def _both_passes(self) -> tuple[np.ndarray, ...]:
        """The seconds of the passes' parts that are the same for every ZeRO level and policy.

        They are work and sums along model of both, and what the backward pass sums once more.
        """
        of = self._of
        sums = self._along_model(self._a_slice("forward_bytes"), of["forward_sums"])
        sums_back = self._along_model(
            self._a_slice("backward_bytes") + of["fixed_backward_bytes"], of["backward_sums"]
        )
        repeated = self._along_model(self._a_slice("repeated_bytes"), of["repeated_sums"])
        return *self._work(), sums, sums_back, repeated

    @functools.cached_property
    def _selective_parts(self) -> tuple[np.ndarray, ...]:
        """The seconds of what layers compute and sum again selectively."""
        bytes_again = self._a_slice("selective_bytes")
        sums = self._along_model(bytes_again, self._of["selective_sums"])
        return self._selective_work(), sums

    @functools.cached_property
    def _row_sums(self) -> Amount:
        """The seconds to sum gradients along the axis that cuts the rows of every microbatch."""
        of, rows_axis = self._of, self._data // self._setting.replicas
        return all_reduce_seconds(of["parameter_bytes"], rows_axis, *self._ring, of["parameters"])

    def _scatter_seconds(self, cut: Mapping[str, np.ndarray]) -> Amount:
        """Return the seconds to reduce and scatter the gradients that are sharded along data."""
        buckets = self._buckets(cut["gradient_bytes"], cut["gradients"])
        crossing = self._crossing(cut["gradient_bytes"])
        return gather_seconds(crossing, self._data, *self._ring, buckets)

    def _work(self) -> tuple[np.ndarray, np.ndarray]:
        rows = self._setting.batch_size / self._slices
        return self._table.work_seconds(self._m_index, self._slices, rows)

    def _selective_work(self) -> np.ndarray:
        share = self._table.selective_share(self._m_index, self._slices)
        return np.asarray(self._work()[0] * share)

    def sent(self) -> np.ndarray:
        """Return the bytes of one microbatch to the next stage."""
        return np.asarray(self._of["sent_bytes"] / self._setting.num_micro_batches)

    def fewest_again(
        self, zero: int, in_flight: Sequence[int], wanted: np.ndarray | None
    ) -> tuple[int | np.ndarray, np.ndarray]:
        """Return what each stage computes again, so that it fits at the least time.

        Where nothing fits, it computes none again.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            in_flight: see `memory`.
            wanted: the stages that matter, `[first, end]`; None: all.

        Returns:
            The numbers for it (`layers_again`), and the peak bytes, both `[stages behind, first,
            end]`.
        """
        most, needs = self._setting.memory_bytes or np.inf, self.memory(zero, 0, in_flight)
        change = needs > most
        # The last stage may become one program, and so faster, the less it leaves inside.
        change[0] |= self._as_one(self._table.num_layers) & ~self._as_one(0)
        change &= self._valid == 0 if wanted is None else wanted
        if not change.any():
            return 0, needs
        behind, first, end = at = np.nonzero(change)
        held = np.array(in_flight)[behind]
        working = (of[:, first, end] for of in self.working(None))
        each = self.held(zero)[first, end] + activation_bytes(held, *working)
        each = np.maximum(each, self.around(zero)[first, end])
        backward = np.asarray(self.passes(zero, None).backward)[:, first, end]
        fewest = np.where(each <= most, backward, np.inf).argmin(0)
        if not fewest.any():
            return 0, needs
        again = np.zeros(needs.shape, int)
        again[at] = np.asarray(self._numbers(None))[fewest]
        needs[at] = np.take_along_axis(each, fewest[None], 0)[0]
        return again, needs

    @functools.cached_property
    def once(self) -> Callable[[int, int | None], np.ndarray]:
        """The seconds of what is done once a step, by ZeRO level and what is computed again.

        Gradients are summed over the replicas beside the backward pass, and the update reads and
        writes the state.
        """
        return functools.cache(self._once)

    def _once(self, zero: int, again: int | None) -> np.ndarray:
        sums, buckets, gathers, held = self._once_parts(zero)
        backward = self.passes(zero, again).backward
        exposed = exposed_seconds(sums, buckets, beside_seconds(backward, self._cluster))
        return np.asarray(update_seconds(exposed + gathers, held, self._cluster.memory_bandwidth))

    def hidden(self, zero: int, again: int) -> np.ndarray:
        """Return the seconds of the sums once a step that run under a backward pass."""
        sums, buckets, _, _ = self._once_parts(zero)
        backward = beside_seconds(self.passes(zero, again).backward, self._cluster)
        return np.asarray(sums - exposed_seconds(sums, buckets, backward))

    @functools.cached_property
    def _once_parts(self) -> Callable[[int], tuple[Amount, Amount, Amount, Amount]]:
        return functools.cache(self._parts_of_once)

    def _parts_of_once(self, zero: int) -> tuple[Amount, Amount, Amount, Amount]:
        """Return the seconds of sums, their buckets, the seconds of gathers, the state's bytes."""
        of, cut, replicas = self._of, self._sharded(zero), self._setting.replicas
        state = of["owned_bytes"] + of["optimizer_bytes"]
        sharded = cut["optimizer_bytes"] + (cut["owned_bytes"] if zero == 3 else 0.0)
        summed = of["gradient_bytes"] - cut["gradient_bytes"]
        count = of["gradients"] - cut["gradients"]
        buckets = self._buckets(summed, count)
        sums = all_reduce_seconds(self._crossing(summed), replicas, *self._ring, buckets)
        gathers: Amount = 0.0
        if zero == 2:  # scattered, and gathered after the update
            sums = sums + self._scatter_seconds(cut)
            buckets = buckets + self._buckets(cut["gradient_bytes"], cut["gradients"])
            size, names = cut["parameter_bytes"], cut["parameters"]
            gathers = gather_seconds(size, self._data, *self._ring, names)
        return sums, buckets, gathers, sharded_bytes(state, sharded, self._data)

    def _buckets(self, size: Amount, count: Amount) -> Amount:
        """Return the number of buckets of gradients, by their bytes as they are accumulated."""
        limit = self._setting.reduction.bucket_bytes
        return bucket_count(self._crossing(size), count, limit)

    @property
    def _ring(self) -> tuple[float, float]:
        """Bytes/s and latency of the rings along data."""
        return self._rings[1], self._cluster.latency

    def _along_model(self, size: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return the seconds to all-reduce so many arrays along the model axis."""
        latency = self._cluster.latency
        return np.asarray(all_reduce_seconds(size, self._model, self._rings[0], latency, count))

    @functools.cached_property
    def _crossing_seconds(self) -> tuple[np.ndarray, ...]:
        """For how long one microbatch occupies the links, and its latency, `[first, end]`.

        They are those to the next stage, and those of its gradient to the one before. The other
        stage is taken to be no slower than this one, and on the same host if both fit there.
        """
        out = np.asarray(self.sent() / self._bandwidth / self._senders)
        back = np.broadcast_to(out[..., 0, :-1, None], out.shape)
        return out, back, np.where(out > 0, self._cluster.latency, 0.0)

    @property
    def _bandwidth(self) -> Any:
        """Bytes/s of a link to the next stage."""
        return self._cluster.intra_host if self._is_local else self._cluster.inter_host

    @property
    def _senders(self) -> Any:
        """The links to the next stage, at most: part of a host may be on two of them."""
        devices, each = self._data * self._model, self._cluster.devices_per_host
        hosts = (devices - 2) // each + 2 if devices % each else devices // each
        return self._data if self._is_local else min(self._data, hosts)

    @property
    def _is_local(self) -> bool:
        cluster, devices = self._cluster, self._data * self._model
        return cluster.hosts == 1 or devices < cluster.devices_per_host
