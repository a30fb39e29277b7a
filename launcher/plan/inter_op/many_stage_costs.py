"""The costs of stages on several logical meshes at once: a tenth of the time of one by one.

Pure numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.inter_op.cost_table import PARAMETER_FIELDS, CostTable
from launcher.plan.inter_op.stage_costs import Setting, StageCosts


class ManyStageCosts(StageCosts):
    """Costs of all stages on several logical meshes: arrays `[mesh, first, end]`.

    Where costs depend on the number of stages behind there can be one such number alone.
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

    def _work(self) -> tuple[np.ndarray, np.ndarray]:
        forward, backward = zip(*(one._work() for one in self._every), strict=True)
        return np.stack(forward), np.stack(backward)

    def _peak(self, name: str) -> np.ndarray:
        return np.stack([one._peak(name) for one in self._every])

    def _layer_peak(self) -> np.ndarray:
        return np.stack([one._layer_peak() for one in self._every])

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
