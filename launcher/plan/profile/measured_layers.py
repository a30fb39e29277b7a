"""Measured seconds of layers, and what follows from them for stages.

Pure numbers.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.hardware import ClusterShape
from launcher.plan.errors import UnmeasuredError
from launcher.plan.plan import ProfiledLayers

_NEVER = 1e9  # seconds of what could not be measured: finite, so that sums and differences are


@dataclass(frozen=True)
class Timing:
    """Measured seconds of one layer on one mesh.

    Attributes:
        points: with all devices at work, `(rows of a slice, forward, backward)`, by rows.
        dispatch_overhead: seconds that a program takes beside its work: its start, and the wait for
            the last of its devices. A stage has it once.
        alone: both passes of the most rows on one mesh while the other devices are idle; None where
            that was not measured.
        failure: why it could not be measured.
    """

    points: tuple[tuple[int, float, float], ...] = ()
    dispatch_overhead: float = 0.0
    alone: float | None = None
    failure: str = ""

    def at(self, rows: float) -> tuple[float, float]:
        """Return the forward and backward seconds for `rows` rows.

        They are on the line through the points.
        """
        if self.failure:
            return _NEVER, _NEVER
        if len(self.points) == 1:
            only, *seconds = self.points[0]
            return seconds[0] * rows / only, seconds[1] * rows / only
        (few, *low), (many, *high) = self.points[0], self.points[-1]
        share = (rows - few) / (many - few)
        least = min(
            1.0, rows / few
        )  # a line through noise must not fall below what is in proportion
        forward, backward = (
            max(a + (b - a) * share, least * min(a, b)) for a, b in zip(low, high, strict=True)
        )
        return forward, backward


@dataclass(frozen=True)
class MeasuredLayers:
    """The timings of a step's layers.

    Attributes:
        kind_of: for every layer the number of its distinct program.
        timings: timings by that number and the size of the model axis.
        batch_size: rows of the whole batch.
    """

    kind_of: tuple[int, ...]
    timings: Mapping[tuple[int, int], Timing]
    batch_size: int

    def shape(self, cluster: ClusterShape) -> ClusterShape:
        """Return the cluster with the measured dispatch overhead of a program."""
        known = [timing for timing in self.timings.values() if not timing.failure]
        if not known:
            return cluster
        dispatch_overhead = statistics.median(timing.dispatch_overhead for timing in known)
        return dataclasses.replace(cluster, dispatch_overhead=dispatch_overhead)

    def effective_parallelism(self, layers: Sequence[int], cluster: ClusterShape) -> float | None:
        """Return that of a stage with these layers, as in `StagePlan`; None if not measured."""
        alone: dict[int, float] = {}  # by the size of the mesh that was alone
        together: dict[int, float] = {}
        for layer in layers:
            for (kind, model), timing in self.timings.items():
                if kind == self.kind_of[layer] and timing.alone is not None:
                    alone[model] = alone.get(model, 0.0) + timing.alone
                    together[model] = together.get(model, 0.0) + sum(timing.points[-1][1:])
        if cluster.effective_parallelism is None or not alone:
            return None
        busy, count = min(alone), cluster.num_devices
        # That of one device, on the line through what was measured: see `schedule.shared_machine`.
        others = (busy - 1) / (count - 1)
        share = (alone[busy] / together[busy] - others) / (1.0 - others)
        return min(max(1.0, count * share), float(count))

    def stage(self, layers: Sequence[int], num_slices: int, model: int) -> tuple[float, float]:
        """Return the forward and backward seconds of a stage for one slice on each of its replicas.

        Raises:
            UnmeasuredError: see `check`.
        """
        self.check(layers, model)
        forward = backward = 0.0
        for layer in layers:
            more = self.timings[self.kind_of[layer], model].at(self.batch_size / num_slices)
            forward, backward = forward + more[0], backward + more[1]
        return forward, backward

    def check(self, layers: Sequence[int], model: int) -> None:
        """Check that layers are measured on `model` devices of a model axis.

        Raises:
            UnmeasuredError: one of them could not be measured; the message says why.
        """
        for layer in layers:
            timing = self.timings[self.kind_of[layer], model]
            if timing.failure:
                raise UnmeasuredError(
                    f"layer {layer} could not be measured on {model} devices of a model axis: "
                    f"{timing.failure}. Use parallel.cost=model, or other devices"
                )

    def account(self) -> tuple[ProfiledLayers, ...]:
        """Return what was measured, to be listed in the plan."""
        found = []
        for (kind, model), timing in sorted(self.timings.items()):
            layers = tuple(i for i, of in enumerate(self.kind_of) if of == kind)
            if timing.failure:
                found.append(ProfiledLayers(layers, model, 0, 0.0, 0.0, timing.failure))
            found += [ProfiledLayers(layers, model, *point) for point in timing.points]
        return tuple(found)
