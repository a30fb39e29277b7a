"""The costs of stages on several logical meshes at once: a tenth of the time of one by one.

Pure numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.hardware.cluster_shape import ClusterShape
from launcher.partition.task_programs import MOST_INSIDE
from launcher.plan.cost.formulas import Amount, sharded_bytes
from launcher.plan.inter_op.cost_table import PARAMETER_FIELDS, CostTable
from launcher.plan.inter_op.layers_again import Count
from launcher.plan.inter_op.setting import Setting
from launcher.plan.inter_op.stage_costs import StageCosts


class ManyStageCosts(StageCosts):
    """Costs of all stages on several logical meshes: arrays `[mesh, first, end]`.

    Where costs depend on the number of stages behind there can be one such number alone. Where it
    is open how many layers are computed again (None), seconds are a lower bound: nothing is, and
    both passes are one program wherever some number of them may make it so.
    """

    def __init__(
        self,
        table: CostTable,
        meshes: Sequence[tuple[int, int]],
        cluster: ClusterShape,
        setting: Setting,
        back_at_once: bool,
    ) -> None:
        """Add up the costs of the table's layers.

        Args:
            table: the costs of the layers.
            meshes: of each the number of its model axis in the table, and its data axis.
            cluster: the rates of the devices.
            setting: what is fixed.
            back_at_once: see `StageCosts`.
        """
        self._share(table, cluster, setting, back_at_once)
        every = [
            StageCosts(table, m_index, cluster, setting, data, back_at_once)
            for m_index, data in meshes
        ]
        self._every = every

        def each(values: Iterable[float]) -> np.ndarray:
            return np.array(list(values))[:, None, None]

        self._data = each(data for _, data in meshes)
        self._model = each(table.model_sizes[m_index] for m_index, _ in meshes)
        self._slices = setting.num_micro_batches * self._data
        self._rings = each(one._rings[0] for one in every), each(one._rings[1] for one in every)
        self._rates = each(one._bandwidth for one in every), each(one._senders for one in every)
        at = [m_index for m_index, _ in meshes]
        self._of = {name: of[at] for name, of in table.stacked_spans.items()}

    def _numbers(self, again: int | None) -> Count:
        return again or 0

    def _as_one(self, again: int | None) -> np.ndarray:
        if again is not None:
            return super()._as_one(again)
        left = self._least_sums("residual_bytes", "checkpoint_bytes")
        return np.asarray(self._goes_back & (left - self._a_slice("input_bytes") <= MOST_INSIDE))

    def _least_sums(self, *names: str) -> np.ndarray:
        """Return the sums over each stage's layers of the least of these bytes of a layer."""
        layers = np.arange(self._table.num_layers)
        every = [self._a_slice(name)[..., layers, layers + 1] for name in names]
        total = np.pad(np.cumsum(np.minimum.reduce(every), -1), ((0, 0), (1, 0)))
        return np.asarray(total[:, None, :] - total[:, :-1, None])

    def _work(self) -> tuple[np.ndarray, np.ndarray]:
        forward, backward = zip(*(one._work() for one in self._every), strict=True)
        return np.stack(forward), np.stack(backward)

    def _peak(self, name: str) -> np.ndarray:
        return np.stack([one._peak(name) for one in self._every])

    def _layer_peak(self) -> np.ndarray:
        return np.stack([one._layer_peak() for one in self._every])

    def _selective_peak(self) -> np.ndarray:
        return np.stack([one._selective_peak() for one in self._every])

    def _selective_work(self) -> np.ndarray:
        return np.stack([one._selective_work() for one in self._every])

    def least_memory(self, zero: int) -> np.ndarray:
        """Return a lower bound on the peak bytes, whichever layers are computed again.

        One microbatch is in flight. Every layer leaves its residuals or its input, and needs what
        its backward pass does in either case; what both passes of one program leave is not known.
        """
        layers = np.arange(self._table.num_layers)

        peaks = [self._layer_peak(), *(self._peak(name) for name in ("backward", "whole"))]
        if self._table.selective:  # which leaves more than the layers' inputs
            peaks.append(self._selective_peak())
        one = np.minimum.reduce([of[..., layers, layers + 1] for of in peaks])
        left = self._least_sums("checkpoint_bytes", "left_bytes")
        left = np.where(self._as_one(None), 0.0, left)
        inside = np.where(self._end[:, 1:] > self._first, one[:, None, :], 0.0)
        peak = np.pad(np.maximum.accumulate(inside, -1), ((0, 0), (0, 0), (1, 0)))
        return np.asarray(np.maximum(self.held(zero) + left + peak, self.around(zero)))

    def _gradients(self, zero: int) -> tuple[Amount, Amount, Amount]:
        """Return the least of what `StageBytes` returns with any number of replicas."""
        whole, cut = self._of["gradient_bytes"], self._sharded(zero)["gradient_bytes"]
        summed = sharded_bytes(whole, cut, self._data)
        afresh = zero == 3 or self._setting.num_micro_batches == 1
        return summed if afresh else whole, summed, summed

    @functools.cached_property
    def _cut(self) -> Mapping[str, np.ndarray]:
        found = [one._divisible() for one in self._every]
        return {name: np.stack([of[name] for of in found]) for name in PARAMETER_FIELDS}

    def _divisible(self) -> Mapping[str, np.ndarray]:
        return self._cut

    @property
    def _bandwidth(self) -> Any:
        return self._rates[0]

    @property
    def _senders(self) -> Any:
        return self._rates[1]

    def of_replicas(self, setting: Setting, kept: Sequence[int]) -> StageCosts:
        """Return the costs on some of the meshes, in a setting that differs in its replicas alone.

        Args:
            setting: the setting.
            kept: the positions of these meshes.
        """
        return _OfReplicas(self, setting, kept)


class _OfReplicas(StageCosts):
    """The seconds on some of several logical meshes, with so many replicas in common.

    What does not depend on these is that of all meshes, which is computed once.
    """

    def __init__(self, every: ManyStageCosts, setting: Setting, kept: Sequence[int]) -> None:
        self._cluster, self._setting, self._table = every._cluster, setting, every._table
        self._schedule, self._valid, self._is_first = every._schedule, every._valid, every._is_first
        self._data, self._rings = every._data[kept], (every._rings[0][kept], every._rings[1][kept])
        self._of = {name: every._of[name][kept] for name in PARAMETER_FIELDS}
        self._every, self._at = every, kept

    def _numbers(self, again: int | None) -> Count:
        return self._every._numbers(again)

    def _as_one(self, again: int | None) -> np.ndarray:
        return self._every._as_one(again)[self._at]

    @functools.cached_property
    def _both_passes(self) -> tuple[np.ndarray, ...]:
        return tuple(seconds[self._at] for seconds in self._every._both_passes)

    @functools.cached_property
    def _selective_parts(self) -> tuple[np.ndarray, ...]:
        return tuple(seconds[self._at] for seconds in self._every._selective_parts)

    @functools.cached_property
    def _crossing_seconds(self) -> tuple[np.ndarray, ...]:
        return tuple(seconds[self._at] for seconds in self._every._crossing_seconds)

    @functools.cached_property
    def _cut(self) -> Mapping[str, np.ndarray]:
        return {name: of[self._at] for name, of in self._every._divisible().items()}

    def _divisible(self) -> Mapping[str, np.ndarray]:
        return self._cut
