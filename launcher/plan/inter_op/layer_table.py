"""The table of layer costs that the stage search adds up for every run of layers.

A stage recomputes its first layers in full, the others selectively or not at all. The search counts
in layers of the table, each of which may stand for several of the step's; remat strings
(`base.names`) count in the step's. Pure numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from launcher.base import parse_remat
from launcher.plan.cost.formulas import peak_in_turn
from launcher.plan.profile.measure_layers import MeasuredLayers

FEWEST = "fewest"  # beside the remat strings: as few layers as fit the memory


class Recompute(NamedTuple):
    """The layers that a stage's backward pass recomputes.

    Attributes:
        full: number of its first layers that are recomputed in full.
        selective: whether its other layers are recomputed selectively.
        is_open: whether the search has yet to choose: costs are then lower bounds over all choices.
    """

    full: int = 0
    selective: bool = False
    is_open: bool = False

    def remat(self, groups: Sequence[Sequence[int]]) -> str:
        """Return the remat string of a stage; `groups` are the step's layers in each of its own."""
        rest = "selective" if self.selective else "none"
        if self.full == 0:
            return rest
        if self.full >= len(groups):
            return "full"
        word = f"full:{sum(map(len, groups[: self.full]))}"
        return f"{word}+{rest}" if self.selective else word


NOTHING, OPEN = Recompute(), Recompute(is_open=True)


def recompute_of(remat: str, groups: Sequence[Sequence[int]], selective: bool) -> Recompute:
    """Return the recomputation that a remat string asks of a stage.

    Args:
        remat: the remat string; `FEWEST` is open.
        groups: the step's layers in each of the stage's.
        selective: whether costs of selective recomputation are known; without them, a selective
            policy counts as full.
    """
    if remat == FEWEST:
        return OPEN
    name = parse_remat(remat)
    if name.policy == "none":
        return NOTHING
    if selective and remat == "selective":
        return Recompute(0, selective=True)
    most, ends = name.first or np.inf, np.cumsum([len(group) for group in groups])
    full = min(int((ends < most).sum()) + 1, len(groups))
    return Recompute(full, selective and name.rest == "selective" and full < len(groups))


def every_recompute(layers: int, selective: bool) -> tuple[Recompute, ...]:
    """Return all choices for stages of up to `layers` layers; the first recomputes nothing."""
    full = [Recompute(n) for n in range(layers + 1)]
    mixed = [Recompute(n, selective=True) for n in reversed(range(layers))]
    return (*full, *mixed) if selective else tuple(full)


def first_layers(of: np.ndarray, count: int | np.ndarray) -> np.ndarray:
    """Return the costs of each stage's first `count` layers.

    Args:
        of: the costs of whole stages, `[mesh, first, end]`.
        count: number of layers; of an array of numbers, each along a leading axis.
    """
    if isinstance(count, int) and count == 0:
        return np.zeros_like(of)
    if isinstance(count, int) and count >= of.shape[-2]:
        return of
    return _taken(of, _places(of, count)[0])


def other_layers(of: np.ndarray, count: int | np.ndarray) -> np.ndarray:
    """Return the costs of each stage's layers behind the first `count`; see `first_layers`."""
    if isinstance(count, int) and count == 0:
        return of
    if isinstance(count, int) and count >= of.shape[-2]:
        return np.zeros_like(of)
    padded = np.concatenate([of, np.zeros_like(of[..., :1, :])], -2)  # no stage begins at the end
    return _taken(padded, _places(of, count)[1])


def _places(of: np.ndarray, count: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of every stage's first layers and others among flattened stages."""
    counts = count if isinstance(count, int) else tuple(count.tolist())
    return _split(of.shape[-2], of.shape[-1], counts)


@functools.lru_cache(maxsize=4096)
def _split(firsts: int, ends: int, counts: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    count = counts if isinstance(counts, int) else np.array(counts)[:, None, None]
    first, end = np.ogrid[:firsts, :ends]
    others = np.minimum(first + count, np.maximum(first, end))
    return first * ends + others, others * ends + end


def _taken(of: np.ndarray, places: np.ndarray) -> np.ndarray:
    found = np.take(of.reshape(*of.shape[:-2], -1), places, axis=-1)
    return np.moveaxis(found, -3, 0)


_LARGEST = tuple(
    f"{kind}_bytes"
    for name in ("layer", "selective")
    for kind in (f"{name}_peak", f"fixed_{name}_peak", f"fixed_{name}_early")
)
# Fields of layers that are recomputed selectively.
SELECTIVE_FIELDS = (
    *("selective_seconds", "fixed_selective_seconds", "selective_bytes", "selective_sums"),
    *("kept_bytes", "selective_peak_bytes"),
    *("fixed_selective_peak_bytes", "fixed_selective_early_bytes"),
)
PARAMETER_FIELDS = (
    *("parameters", "parameter_bytes", "owned_bytes", "optimizer_bytes"),
    *("gradients", "gradient_bytes"),
    *("gathered_bytes", "gathered_again", "gathered_again_bytes"),
)
# What a stage has once of a parameter that several of its layers read.
_ONCE = tuple(name for name in PARAMETER_FIELDS if name not in ("owned_bytes", "optimizer_bytes"))


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters that are read by one layer, or by the same several, and are as long.

    Attributes:
        layers: the layers that read each of them.
        lengths: for every model axis, the lengths of their dimensions on one device.
        of: arrays `[model axis]` for each of `layers`, by field: costs on one device, where they
            are not sharded along data.

    Fields:
        parameters: number of arrays.
        parameter_bytes: bytes of the parameters.
        owned_bytes: those of the parameters that no earlier layer reads.
        optimizer_bytes: what the optimizer keeps for the latter.
        gradients: number of the arrays whose gradients the step uses.
        gradient_bytes: bytes of these gradients, accumulated.
        gathered_bytes: bytes of the parameters in the types that a forward pass can take them in.
        gathered_again: number of the arrays that a backward pass reads that recomputes nothing.
        gathered_again_bytes: bytes of these arrays in the types that it can take them in.
    """

    layers: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    of: Mapping[str, np.ndarray]

    def divides(self, row: int, data: int) -> bool:
        """Return whether they can be sharded along `data` devices."""
        return any(n and n % data == 0 for n in self.lengths[row])


@dataclass(frozen=True, eq=False)
class LayerTable:
    """The layers' costs.

    Attributes:
        model_sizes: sizes of the model axes.
        of: arrays `[model axis, layer]`, by field: the cost for the whole batch, on one device.
        parameters: the layers' parameters.
        sequence: whether each model axis cuts the data along its sequence, and not the parameters;
            empty: none does.
        selective: whether it is known what layers cost that are selectively recomputed.
        update_share: bytes that the update stores, of those of the gradients.
        groups: the step's layers in each layer of the table; empty: the same.
        measured: the layers' measured seconds, instead of the cost model's.

    Fields:
        work_seconds: seconds of the forward pass without communication.
        fixed_seconds: what every slice takes beside, however few rows it has: to compute something
            of parameters alone.
        back_seconds: the same as `work_seconds` of the backward pass.
        fixed_back_seconds: the same as `fixed_seconds` of the backward pass.
        product_seconds: the part of `work_seconds` and `back_seconds` that matrix products take.
        fixed_product_seconds: the same of `fixed_seconds` and `fixed_back_seconds`.
        launches: number of matrix products that a host launches in every slice's forward pass.
        forward_bytes: bytes all-reduced along the model axis in the forward pass; what is gathered
            or scattered counts half.
        backward_bytes: the same in the backward pass.
        fixed_backward_bytes: the same of every slice, however few rows it has: of parameters.
        repeated_bytes: the same of what the backward pass gathers as the forward pass did.
        forward_sums: number of all-reduces of `forward_bytes`.
        backward_sums: number of all-reduces of the backward pass.
        repeated_sums: number of all-reduces of `repeated_bytes`.
        residual_bytes: what the forward pass computes and leaves for the backward pass.
        left_bytes: `residual_bytes` and the activations that both passes read.
        forward_peak_bytes: most that the forward pass needs on top of what was there; see
            `cost.stage_memory.Temporaries`.
        forward_early_bytes: the part of it that is there as it begins.
        backward_peak_bytes: most that the backward pass needs on top of what was there.
        backward_early_bytes: what it holds when it reads the first gradient.
        whole_peak_bytes: most that both passes need as one program.
        whole_early_bytes: what that holds when it reads the first gradient.
        fixed_forward_peak_bytes: the part of `forward_peak_bytes` that every slice needs, however
            few rows it has; and so on.
        input_bytes: bytes of the activations that the layer reads.
        checkpoint_bytes: the same; of several layers, of all of them.
        layer_peak_bytes: `whole_peak_bytes`; of several layers, the most of any; and so on.
        selective_seconds: the part of `work_seconds` that runs again where the layer is recomputed
            selectively.
        fixed_selective_seconds: the same of `fixed_seconds`.
        selective_bytes: the part of `forward_bytes` that is all-reduced again there.
        selective_sums: number of all-reduces of `selective_bytes`.
        kept_bytes: what the forward pass leaves there beside the activations that the layer reads.
        selective_peak_bytes: `backward_peak_bytes` there; of several layers, the most of any.
        fixed_selective_peak_bytes: the part of it that every slice needs.
        fixed_selective_early_bytes: `fixed_backward_early_bytes` there.
        sent_bytes: bytes of the activations that cross to the next layer, unsharded.
        batch_bytes: bytes of the leaves of the batch that the layer reads.
    """

    model_sizes: tuple[int, ...]
    of: Mapping[str, np.ndarray]
    parameters: tuple[Parameters, ...]
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

    def of_batch(self, share: float) -> LayerTable:
        """Return the table of a batch of `share` times the examples, which cost their share."""
        of = {
            name: values
            if name.startswith("fixed") or name.endswith(("sums", "launches"))
            else share * values
            for name, values in self.of.items()
        }
        return dataclasses.replace(self, of=of)

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
    def recomputes(self) -> tuple[Recompute, ...]:
        """Everything that a stage may recompute."""
        return every_recompute(self.num_layers, self.selective)

    @functools.cached_property
    def spans(self) -> dict[str, np.ndarray]:
        """The costs of the layers `first … end - 1`, `[row, first, end]`.

        They are by the fields of the layers and of `Parameters`.
        """
        rows = range(len(self.model_sizes))
        every = [self._layer_spans(row) | self.parameter_spans(row, 1) for row in rows]
        return {name: np.stack([of[name] for of in every]) for name in every[0]}

    def _layer_spans(self, row: int) -> dict[str, np.ndarray]:
        rows = {name: of[row] for name, of in self.of.items()}
        found = {name: sums(one) for name, one in rows.items()}
        count = self.num_layers
        found["input_bytes"] = np.repeat(rows["input_bytes"][:, None], count + 1, 1)
        sent = np.concatenate([[0.0], rows["sent_bytes"][:-1], [0.0]])
        found["sent_bytes"] = np.repeat(sent[None, :], count, 0)
        found.update((name, largest(rows[name])) for name in _LARGEST)
        return found

    @functools.cached_property
    def peak_bytes(self) -> Callable[[int, str, int | None], np.ndarray]:
        """The peak temporaries of task programs: see `_peak_bytes`."""
        return functools.cache(self._peak_bytes)

    def _peak_bytes(self, row: int, name: str, slices: int | None) -> np.ndarray:
        """Return the peak temporaries of a task program, `[first, end]`.

        Its layers run in turn. Each leaves to the others what the backward pass needs, or finds
        what theirs have made already.

        Args:
            row: the row of the model axis.
            name: "forward", "backward" or "whole".
            slices: number of slices of the batch; None: what every slice needs.
        """
        peak, early = (self.of[f"fixed_{name}_{of}_bytes"][row] for of in ("peak", "early"))
        left = np.zeros(self.num_layers)
        if slices is not None:
            # Gradients are not there at the same time as the most that grows with the rows.
            peak = np.maximum(peak, early + self.of[f"{name}_peak_bytes"][row] / slices)
            early = early + self.of[f"{name}_early_bytes"][row] / slices
            left = self.of["left_bytes"][row] / slices
        if name == "forward":
            return peak_in_turn(peak, left, early)
        return peak_in_turn(peak, early, np.zeros(self.num_layers))

    def layer_peak_bytes(self, row: int, name: str, slices: int) -> np.ndarray:
        """Return the most that a layer needs in the backward pass as it runs again, `[first, end]`.

        Args:
            row: the row of the model axis.
            name: "layer" where it runs again in full, or "selective".
            slices: number of slices of the batch.
        """
        by_rows = self.of_slice(row, slices, f"{name}_peak_bytes", f"fixed_{name}_early_bytes")
        return np.asarray(np.maximum(self.spans[f"fixed_{name}_peak_bytes"][row], by_rows))

    def of_slice(self, row: int, slices: int, name: str, fixed: str) -> np.ndarray:
        """Return the share of a slice of one field, and all of another, `[first, end]`."""
        return np.asarray(self.spans[fixed][row] + self.spans[name][row] / slices)

    def selective_share(self, row: int, slices: int) -> np.ndarray:
        """Return the share of the forward pass that runs again selectively, `[first, end]`."""
        again = self.of_slice(row, slices, "selective_seconds", "fixed_selective_seconds")
        whole = self.of_slice(row, slices, "work_seconds", "fixed_seconds")
        return np.asarray(np.divide(again, whole, out=np.zeros_like(whole), where=whole > 0))

    @functools.cached_property
    def parameter_spans(self) -> Callable[[int, int], dict[str, np.ndarray]]:
        """The costs of the stages' parameters, by model axis and number of devices.

        They are those of the parameters that can be sharded along so many. What several layers of a
        stage read is there once.
        """
        return functools.cache(self._parameter_spans)

    def _parameter_spans(self, row: int, data: int) -> dict[str, np.ndarray]:
        count = self.num_layers
        rows = {name: np.zeros(count) for name in PARAMETER_FIELDS}
        shared: dict[tuple[int, ...], dict[str, float]] = {}
        for one in self.parameters:
            if not one.divides(row, data):
                continue
            values = {name: float(of[row]) for name, of in one.of.items()}
            for name, value in values.items():
                own = "owned_bytes", "optimizer_bytes"
                rows[name][list(one.layers[:1] if name in own else one.layers)] += value
            if len(one.layers) > 1:
                known = shared.setdefault(one.layers, dict.fromkeys(_ONCE, 0.0))
                known.update((name, known[name] + values[name]) for name in _ONCE)
        found = {name: sums(one) for name, one in rows.items()}
        for layers, values in shared.items():
            more = np.maximum(sums(np.bincount(layers, minlength=count).astype(float)) - 1, 0.0)
            for name, value in values.items():
                found[name] -= more * value
        return found

    def work_seconds(self, row: int, slices: int, rows: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a slice's two passes without communication, `[first, end]`.

        What was measured includes the collectives along the model axis.

        Args:
            row: the row of the model axis.
            slices: number of slices of the batch.
            rows: rows of each.
        """
        if self.measured is None:
            return (
                self.of_slice(row, slices, "work_seconds", "fixed_seconds"),
                self.of_slice(row, slices, "back_seconds", "fixed_back_seconds"),
            )
        model, measured = self.model_sizes[row], self.measured
        known = {kind: measured.timings[kind, model].at(rows) for kind in set(measured.kind_of)}
        layers = np.array([known[kind] for kind in measured.kind_of])
        groups = self.groups or tuple((i,) for i in range(len(layers)))
        forward, backward = np.array([layers[list(group)].sum(0) for group in groups]).T
        return sums(forward), sums(backward)

    def grouped(self, groups: Sequence[Sequence[int]]) -> LayerTable:
        """Return the table of runs of layers.

        A run reads what its first layer reads, and sends what its last one sends.
        """
        at = [group[0] for group in groups], [group[-1] + 1 for group in groups]
        number = {layer: k for k, group in enumerate(groups) for layer in group}
        of = {name: self.spans[name][:, *at] for name in self.of}
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
    """Return the largest of `[..., layer]` over `[first, end)`; 0 of none."""
    is_in = np.tri(values.shape[-1], dtype=bool).T  # [first, layer]
    most = np.maximum.accumulate(np.where(is_in, values[..., None, :], 0.0), axis=-1)
    return np.pad(most, [(0, 0)] * values.ndim + [(1, 0)])
