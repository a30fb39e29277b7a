"""The table of the layers' costs, which the stage search adds up for every run of layers.

Pure numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.plan.cost.formulas import peak_in_turn
from launcher.plan.inter_op.layer_cost import LARGEST
from launcher.plan.profile.measured_layers import MeasuredLayers


@dataclass(frozen=True)
class ParameterCost:
    """What parameters cost on one device, where they are not sharded along data.

    Attributes:
        parameters: number of arrays.
        parameter_bytes: bytes of the parameters.
        owned_bytes: those of the parameters that no earlier layer reads.
        optimizer_bytes: what the optimizer keeps for the latter.
        gradients: number of the arrays whose gradients the step uses.
        gradient_bytes: bytes of these gradients, accumulated.
    """

    parameters: float
    parameter_bytes: float
    owned_bytes: float
    optimizer_bytes: float
    gradients: float
    gradient_bytes: float


PARAMETER_FIELDS = tuple(f.name for f in dataclasses.fields(ParameterCost))
# What a stage has once of a parameter that several of its layers read.
_ONCE = "parameters", "parameter_bytes", "gradients", "gradient_bytes"


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters that are read by one layer, or by the same several, and are as long.

    Attributes:
        layers: the layers that read each of them.
        lengths: for every model axis, the lengths of their dimensions on one device.
        of: arrays `[model axis]` for each of `layers`, by the field of `ParameterCost`.
    """

    layers: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    of: Mapping[str, np.ndarray]

    def divides(self, m_index: int, data: int) -> bool:
        """Return whether they can be sharded along `data` devices."""
        return any(n and n % data == 0 for n in self.lengths[m_index])


@dataclass(frozen=True, eq=False)
class CostTable:
    """The layers' costs.

    Attributes:
        model_sizes: sizes of the model axes.
        of: arrays `[model axis, layer]`, by the field of `LayerCost`.
        parameters: the layers' parameters.
        num_distinct: number of layers that are different programs.
        sequence: whether each model axis cuts the data along its sequence, and not the parameters;
            empty: none does.
        selective: whether it is known what layers cost that are computed again selectively.
        update_share: bytes that the update stores, of those of the gradients.
        groups: the step's layers in each layer of the table; empty: the same.
        measured: the layers' measured seconds, instead of the cost model's.
    """

    model_sizes: tuple[int, ...]
    of: Mapping[str, np.ndarray]
    parameters: tuple[Parameters, ...]
    num_distinct: int
    sequence: tuple[bool, ...] = ()
    selective: bool = False
    update_share: float = 0.0
    groups: tuple[tuple[int, ...], ...] = ()
    measured: MeasuredLayers | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers of the table."""
        return int(self.of["work_seconds"].shape[1])

    @functools.cached_property
    def has_optimizer(self) -> bool:
        """Whether the optimizer keeps anything for the parameters."""
        return any(one.of["optimizer_bytes"].any() for one in self.parameters)

    def is_sequence(self, at: int) -> bool:
        """Return whether the model axis number `at` cuts the data along its sequence."""
        return bool(self.sequence) and self.sequence[at]

    def index(self, model: int, sequence: bool) -> int:
        """Return the number of a model axis."""
        every = range(len(self.model_sizes))
        return next(
            k for k in every if (self.model_sizes[k], self.is_sequence(k)) == (model, sequence)
        )

    @functools.cached_property
    def spans(self) -> tuple[dict[str, np.ndarray], ...]:
        """For every model axis the costs of the layers `first … end - 1`, `[first, end]`.

        They are by the fields of `LayerCost` and of `ParameterCost`.
        """
        return tuple(
            self._layer_spans(k) | self.parameter_spans(k, 1) for k in range(len(self.model_sizes))
        )

    @functools.cached_property
    def stacked_spans(self) -> dict[str, np.ndarray]:
        """The same by the field, `[model axis, first, end]`."""
        return {name: np.stack([of[name] for of in self.spans]) for name in self.spans[0]}

    def _layer_spans(self, m_index: int) -> dict[str, np.ndarray]:
        rows = {name: row[m_index] for name, row in self.of.items()}
        found = {name: sums(row) for name, row in rows.items()}
        count = self.num_layers
        found["input_bytes"] = np.repeat(rows["input_bytes"][:, None], count + 1, 1)
        sent = np.concatenate([[0.0], rows["sent_bytes"][:-1], [0.0]])
        found["sent_bytes"] = np.repeat(sent[None, :], count, 0)
        found.update((name, largest(rows[name])) for name in LARGEST)
        return found

    @functools.cached_property
    def peak_bytes(self) -> Callable[[int, str, int | None], np.ndarray]:
        """The peak temporaries of task programs: see `_peak_bytes`."""
        return functools.cache(self._peak_bytes)

    def _peak_bytes(self, m_index: int, name: str, slices: int | None) -> np.ndarray:
        """Return the peak temporaries of a task program, `[first, end]`.

        Its layers run in turn. Each leaves to the others what the backward pass needs, or finds
        what theirs have made already.

        Args:
            m_index: the number of the model axis.
            name: "forward", "backward" or "whole".
            slices: number of slices of the batch; None: what every slice needs.
        """
        peak, early = (self.of[f"fixed_{name}_{of}_bytes"][m_index] for of in ("peak", "early"))
        left = np.zeros(self.num_layers)
        if slices is not None:
            # Gradients are not there at the same time as the most that grows with the rows.
            peak = np.maximum(peak, early + self.of[f"{name}_peak_bytes"][m_index] / slices)
            early = early + self.of[f"{name}_early_bytes"][m_index] / slices
            left = self.of["left_bytes"][m_index] / slices
        if name == "forward":
            return peak_in_turn(peak, left, early)
        return peak_in_turn(peak, early, np.zeros(self.num_layers))

    def layer_peak_bytes(self, m_index: int, name: str, slices: int) -> np.ndarray:
        """Return the most that a layer needs in the backward pass as it runs again, `[first, end]`.

        Args:
            m_index: the number of the model axis.
            name: "layer" where it runs again in full, or "selective".
            slices: number of slices of the batch.
        """
        of = self.spans[m_index]
        by_rows = of[f"fixed_{name}_early_bytes"] + of[f"{name}_peak_bytes"] / slices
        return np.asarray(np.maximum(of[f"fixed_{name}_peak_bytes"], by_rows))

    def selective_share(self, m_index: int, slices: int) -> np.ndarray:
        """Return the share of the forward pass that runs again selectively, `[first, end]`."""
        of = self.spans[m_index]
        again = of["selective_seconds"] / slices + of["fixed_selective_seconds"]
        whole = of["work_seconds"] / slices + of["fixed_seconds"]
        return np.asarray(np.divide(again, whole, out=np.zeros_like(whole), where=whole > 0))

    @functools.cached_property
    def parameter_spans(self) -> Callable[[int, int], dict[str, np.ndarray]]:
        """The costs of the stages' parameters, by model axis and number of devices.

        They are those of the parameters that can be sharded along so many. What several layers of a
        stage read is there once.
        """
        return functools.cache(self._parameter_spans)

    def _parameter_spans(self, m_index: int, data: int) -> dict[str, np.ndarray]:
        count = self.num_layers
        rows = {name: np.zeros(count) for name in PARAMETER_FIELDS}
        shared: dict[tuple[int, ...], dict[str, float]] = {}
        for one in self.parameters:
            if not one.divides(m_index, data):
                continue
            values = {name: float(of[m_index]) for name, of in one.of.items()}
            for name, value in values.items():
                own = "owned_bytes", "optimizer_bytes"
                rows[name][list(one.layers[:1] if name in own else one.layers)] += value
            if len(one.layers) > 1:
                known = shared.setdefault(one.layers, dict.fromkeys(_ONCE, 0.0))
                known.update((name, known[name] + values[name]) for name in _ONCE)
        found = {name: sums(row) for name, row in rows.items()}
        for layers, values in shared.items():
            more = np.maximum(sums(np.bincount(layers, minlength=count).astype(float)) - 1, 0.0)
            for name, value in values.items():
                found[name] -= more * value
        return found

    def work_seconds(self, m_index: int, slices: int, rows: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a slice's two passes without communication, `[first, end]`.

        What was measured includes the collectives along the model axis.

        Args:
            m_index: the number of the model axis.
            slices: number of slices of the batch.
            rows: rows of each.
        """
        if self.measured is None:
            of = self.spans[m_index]
            return (
                of["work_seconds"] / slices + of["fixed_seconds"],
                of["back_seconds"] / slices + of["fixed_back_seconds"],
            )
        model, measured = self.model_sizes[m_index], self.measured
        known = {kind: measured.timings[kind, model].at(rows) for kind in set(measured.kind_of)}
        layers = np.array([known[kind] for kind in measured.kind_of])
        groups = self.groups or tuple((i,) for i in range(len(layers)))
        forward, backward = np.array([layers[list(group)].sum(0) for group in groups]).T
        return sums(forward), sums(backward)

    def grouped(self, groups: Sequence[Sequence[int]]) -> CostTable:
        """Return the table of runs of layers.

        A run reads what its first layer reads, and sends what its last one sends.
        """
        at = [group[0] for group in groups], [group[-1] + 1 for group in groups]
        number = {layer: k for k, group in enumerate(groups) for layer in group}
        of = {name: np.stack([span[name][at] for span in self.spans]) for name in self.of}
        for name in ("forward", "backward", "whole"):
            always, once = (
                np.stack(
                    [self.peak_bytes(k, name, slices)[at] for k in range(len(self.model_sizes))]
                )
                for slices in (None, 1)
            )
            of[f"fixed_{name}_peak_bytes"] = always
            of[f"{name}_peak_bytes"] = once - of[f"fixed_{name}_early_bytes"]
        parameters = joined(
            dataclasses.replace(one, layers=tuple(dict.fromkeys(number[i] for i in one.layers)))
            for one in self.parameters
        )
        given = tuple(tuple(group) for group in groups)
        return dataclasses.replace(self, of=of, parameters=parameters, groups=given)


def joined(parameters: Iterable[Parameters]) -> tuple[Parameters, ...]:
    """Return the parameters, with those as one that are read by the same layers and as long."""
    found: dict[object, Parameters] = {}
    for one in parameters:
        key = one.layers, one.lengths
        if key in found:
            of = {name: values + one.of[name] for name, values in found[key].of.items()}
            one = dataclasses.replace(one, of=of)
        found[key] = one
    return tuple(found.values())


def sums(values: np.ndarray) -> np.ndarray:
    """Return the sums over `[first, end)`."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(np.maximum(total[None, :] - total[:-1, None], 0.0))


def largest(values: np.ndarray) -> np.ndarray:
    """Return the largest over `[first, end)`; 0 of none."""
    count = len(values)
    is_in = np.tri(count, dtype=bool).T  # [first, layer]
    found = np.zeros((count, count + 1))
    found[:, 1:] = np.maximum.accumulate(np.where(is_in, values, 0.0), axis=1)
    return found
