"""The memory of each run of layers as a stage on one logical mesh.

Pure numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.hardware.cluster_shape import ClusterShape
from launcher.partition.task_programs import MOST_INSIDE
from launcher.plan.cost.formulas import Amount, activation_bytes, sharded_bytes
from launcher.plan.inter_op.cost_table import PARAMETER_FIELDS, CostTable
from launcher.plan.inter_op.layers_again import (
    Count,
    at_all,
    every_number,
    first_layers,
    in_full,
    other_layers,
)
from launcher.plan.inter_op.setting import Setting
from launcher.schedule import SCHEDULES


class StageBytes:
    """Bytes of all stages on one logical mesh: arrays `[first, end]`.

    `again` is what of a stage is computed again, as a number (`layers_again`); None: each number,
    along a leading axis.
    """

    # Numbers; of several meshes (`ManyStageCosts`) arrays.
    _data: Any
    _model: Any
    _slices: Any
    _m_index: int  # of one mesh: the number of its model axis in the table
    _rings: tuple[Any, Any]  # bytes/s along model and along data
    _of: Mapping[str, np.ndarray]

    def _share(
        self, table: CostTable, cluster: ClusterShape, setting: Setting, back_at_once: bool
    ) -> None:
        """Keep what does not depend on the logical mesh."""
        self._cluster, self._setting, self._table = cluster, setting, table
        self._schedule = SCHEDULES[setting.schedule]
        first, end = np.arange(table.num_layers)[:, None], np.arange(table.num_layers + 1)[None]
        self._first, self._end = first, end
        self._valid = np.where(first < end, 0.0, np.inf)
        self._is_first = np.broadcast_to(first == 0, self._valid.shape)
        is_last = np.broadcast_to(end == table.num_layers, self._valid.shape)
        self._goes_back = is_last & back_at_once

    def _again(self, of: np.ndarray, again: int | None) -> np.ndarray:
        """Return the costs, `[first, end]`, of the layers that are computed again in full."""
        return first_layers(of, in_full(self._numbers(again)))

    def _kept(self, of: np.ndarray, again: int | None) -> np.ndarray:
        """Return the costs of the layers of a stage that are not computed again."""
        return self._others(of, again, selectively=False)

    def _selectively(self, of: np.ndarray, again: int | None) -> np.ndarray:
        """Return the costs of the layers of a stage that are computed again selectively."""
        return self._others(of, again, selectively=True)

    def _either(self, of: np.ndarray, again: int | None) -> np.ndarray:
        """Return the costs of the layers of a stage that are computed again in either way."""
        return first_layers(of, at_all(self._numbers(again), self._table.num_layers))

    def _others(self, of: np.ndarray, again: int | None, selectively: bool) -> np.ndarray:
        numbers = self._numbers(again)
        if isinstance(numbers, int):
            is_so = (numbers < 0) == selectively
            return other_layers(of, in_full(numbers)) if is_so else np.zeros_like(of)
        is_so = ((numbers < 0) == selectively)[:, None, None]
        return np.where(is_so, other_layers(of, in_full(numbers)), 0.0)

    def _numbers(self, again: int | None) -> Count:
        if again is not None:
            return again
        return every_number(self._table.num_layers, self._table.selective)

    def _may_be_selective(self, again: int | None) -> bool:
        return bool(np.min(self._numbers(again)) < 0)

    def _as_one(self, again: int | None) -> np.ndarray:
        """Return whether both passes are one task program: see `task_programs.runs_as_one`."""
        left = self._kept(self._a_slice("residual_bytes"), again)
        if again != 0:  # the first layer's input is there
            inputs = self._a_slice("checkpoint_bytes") - self._a_slice("input_bytes")
            left = left + np.maximum(self._either(inputs, again), 0.0)
        if self._may_be_selective(again):
            left = left + self._selectively(self._a_slice("kept_bytes"), again)
        return np.asarray(self._goes_back & (left <= MOST_INSIDE))

    def _a_slice(self, name: str) -> np.ndarray:
        """Return the share of one slice of what is of the whole batch."""
        return np.asarray(self._of[name] / self._slices)

    def _peak(self, name: str) -> np.ndarray:
        return self._table.peak_bytes(self._m_index, name, self._slices)

    def _layer_peak(self) -> np.ndarray:
        return self._table.layer_peak_bytes(self._m_index, "layer", self._slices)

    def _selective_peak(self) -> np.ndarray:
        return self._table.layer_peak_bytes(self._m_index, "selective", self._slices)

    def _divisible(self) -> Mapping[str, np.ndarray]:
        return self._table.parameter_spans(self._m_index, self._data)

    def held(self, zero: int) -> np.ndarray:
        """Return the bytes that a device holds while tasks run, beside activations."""
        return self._held(zero)[0]

    def around(self, zero: int) -> np.ndarray:
        """Return the most bytes that a device holds after its last task."""
        return self._held(zero)[1]

    @functools.cached_property
    def _held(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        return functools.cache(self._held_bytes)

    def _held_bytes(self, zero: int) -> tuple[np.ndarray, np.ndarray]:
        of, cut, data = self._of, self._sharded(zero), self._data
        state: Amount = of["parameter_bytes"]
        whole: Amount = 0.0
        if zero == 3:  # a pass has them whole, and their gradients
            state = sharded_bytes(state, cut["parameter_bytes"], data)
            whole = 2 * cut["parameter_bytes"]
        state = state + sharded_bytes(of["optimizer_bytes"], cut["optimizer_bytes"], data)
        running, summing, updating = self._gradients(zero)
        updating = updating * (1 + self._table.update_share)
        return (
            np.asarray(of["batch_bytes"] / data + state + whole + running),
            np.asarray(state + np.maximum(summing, updating)),
        )

    def _gradients(self, zero: int) -> tuple[Amount, Amount, Amount]:
        """Return the bytes of gradients while tasks run, as they are summed, and of the sums.

        See `cost.mesh_memory` about what sums need.
        """
        whole, cut = self._of["gradient_bytes"], self._sharded(zero)["gradient_bytes"]
        summed = sharded_bytes(whole, cut, self._data)
        if zero == 3:
            return summed, summed, summed
        if self._setting.replicas == 1:
            return whole, whole, summed
        limit = self._setting.reduction.bucket_bytes
        alone, largest = whole <= limit, np.minimum(whole, limit)  # one bucket, or several
        if self._setting.num_micro_batches == 1:
            return summed + np.where(alone & (cut == 0), 1, 2) * largest, summed, summed
        packed = cut * (1 + 1 / self._data)
        running = whole + np.where(alone, 0.0, cut / self._data + 2 * largest)
        return running, whole + np.where(alone, summed + packed, 0.0), summed

    @functools.cached_property
    def working(self) -> Callable[[int | None], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What a forward pass leaves, and what either pass needs on top, in bytes.

        By what of a stage is computed again; None: see `passes`.
        """
        return functools.cache(self._working)

    def _working(self, again: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Of what is computed again the layers' inputs are left, and one layer is there at a time.
        inputs = self._either(self._a_slice("checkpoint_bytes"), again)
        one = self._again(self._layer_peak(), again)
        whole, forward, backward = (
            self._kept(self._peak(name), again) for name in ("whole", "forward", "backward")
        )
        if self._may_be_selective(again):
            inputs = inputs + self._selectively(self._a_slice("kept_bytes"), again)
            one = np.maximum(one, self._selectively(self._selective_peak(), again))
        left = inputs + self._kept(self._a_slice("left_bytes"), again)
        whole, forward = inputs + np.maximum(whole, one), inputs + forward
        backward = np.maximum(backward, one)
        # One program of both passes leaves what the second part of a backward pass in two needs.
        as_one, kept = self._as_one(again), left if self._schedule.splits_backward else 0.0
        return (
            np.where(as_one, kept, left),
            np.where(as_one, whole, forward),
            np.where(as_one, whole - kept, backward),
        )

    def memory(self, zero: int, again: int, in_flight: Sequence[int]) -> np.ndarray:
        """Return the peak bytes on a device, `[stages behind, first, end]`.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            again: what of a stage is computed again (`layers_again`).
            in_flight: the microbatches whose activations a stage holds, by the stages behind it.
        """
        held = np.array(in_flight)[:, None, None]
        running = self.held(zero) + activation_bytes(held, *self.working(again))
        return np.asarray(np.maximum(running, self.around(zero)))

    def _sharded(self, zero: int) -> Mapping[str, np.ndarray]:
        """Return what is sharded along data at a ZeRO level, by the fields of `ParameterCost`.

        Level 2 follows the optimizer's state: without any, it is the same as level 0.
        """
        if zero == 3 or (zero == 2 and self._table.has_optimizer):
            return self._divisible()
        return dict.fromkeys(PARAMETER_FIELDS, np.zeros(self._valid.shape))
