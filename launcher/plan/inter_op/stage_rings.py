"""For how long the collectives of each run of layers, as a stage, occupy their links.

Pure numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from launcher.plan.cost.formulas import Amount, all_reduce_seconds, gather_seconds
from launcher.plan.inter_op.stage_bytes import StageBytes


class StageRings(StageBytes):
    """Seconds of the collectives of all stages on one logical mesh, without latency.

    They are arrays `[first, end]`; see `StagePlan`.
    """

    @functools.cached_property
    def pass_rings(self) -> Callable[[int, int], tuple[Amount, Amount]]:
        """Those of a microbatch's passes along model, and along data.

        By ZeRO level and what of a stage is computed again (`layers_again`).
        """
        return functools.cache(self._pass_rings)

    def _pass_rings(self, zero: int, again: int) -> tuple[Amount, Amount]:
        of, as_one = self._of, self._as_one(again)
        forward = self._a_slice("forward_bytes")
        backward = self._a_slice("backward_bytes") + of["fixed_backward_bytes"]
        backward = backward + np.where(as_one, 0.0, self._a_slice("repeated_bytes"))
        backward = backward + self._again(forward, again)
        if self._may_be_selective(again):
            backward = backward + self._selectively(self._a_slice("selective_bytes"), again)
        model, data = self._rings
        along_model = all_reduce_seconds(forward + backward, self._model, model, 0.0)
        rows_axis = self._data // self._setting.replicas
        along_data = all_reduce_seconds(of["parameter_bytes"], rows_axis, data, 0.0)
        if zero == 3:
            cut = self._sharded(3)
            gathered = np.where(as_one, 1, 2) * cut["parameter_bytes"]
            scattered = self._crossing(cut["gradient_bytes"])
            along_data = along_data + gather_seconds(gathered + scattered, self._data, data, 0.0)
        return along_model, along_data

    def once_rings(self, zero: int) -> Amount:
        """Return those of the collectives once a step, which are along data."""
        whole, cut, data = self._of["gradient_bytes"], self._sharded(zero), self._rings[1]
        summed = self._crossing(whole - cut["gradient_bytes"])
        found = all_reduce_seconds(summed, self._setting.replicas, data, 0.0)
        if zero == 2:  # scattered, and gathered after the update
            moved = self._crossing(cut["gradient_bytes"]) + cut["parameter_bytes"]
            found = found + gather_seconds(moved, self._data, data, 0.0)
        return found

    def _crossing(self, size: Amount) -> Amount:
        """Return the bytes that cross, of gradients of 32 bits."""
        return size / 2 if self._setting.reduction.dtype == "bf16" else size
