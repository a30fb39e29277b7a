"""Layer options and stage options of a pipeline, and what follows from them.

Pure. The names are those of Alpa's API.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.hardware import ClusterShape
from launcher.partition import PlanError, Spec, Submesh, group_layers, layer_flops
from launcher.schedule import SCHEDULES, training_schedules
from launcher.trace import LayerCountError, TracedStep, cluster_layers

_ZERO = {"zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class Cut:
    """Stages and submeshes: the part of an `Assignment` that a stage option decides."""

    layers: tuple[tuple[int, ...], ...]
    submeshes: tuple[Submesh, ...]
    mesh_of: tuple[int, ...]
    shardings: tuple[Mapping[str, Spec] | None, ...] = ()
    zero: tuple[int, ...] = ()


@dataclass(frozen=True)
class ManualLayerOption:
    """Layers that end at the model's own `mark_pipeline_boundary()` calls."""

    def layered(self, step: TracedStep) -> TracedStep:
        """Return the step cut into its layers."""
        others = tuple(map(self.layered, step.other_losses))
        return dataclasses.replace(step.cut_at(None), other_losses=others)


@dataclass(frozen=True)
class AutoLayerOption:
    """Layers that end where few bytes cross and that have balanced work; marks are ignored.

    Attributes:
        layer_num: number of layers; None: as many as suit (`trace.auto_layers`).
        eps: a layer has at most `1 + eps` times the mean work.
    """

    layer_num: int | None = None
    eps: float = 0.6

    def layered(self, step: TracedStep) -> TracedStep:
        """Return the step cut into its layers.

        Raises:
            PlanError: there are to be more layers than there are equations.
        """
        try:
            ends = cluster_layers(step.loss(1), self.layer_num, self.eps)
        except LayerCountError as error:
            raise PlanError(str(error)) from error
        others = tuple(map(self.layered, step.other_losses))
        return dataclasses.replace(step.cut_at(ends), other_losses=others)


@dataclass(frozen=True)
class AutoStageOption:
    """Stages, submeshes and shardings as the search finds them best (`plan.inter_op`).

    Attributes:
        cost: where a layer's seconds come from: "measured", its operations over the devices' rates,
            which the first search measures in some seconds if they are this machine's CPU devices;
            "model", over nominal rates, whatever was measured; or "profile", compiled and timed on
            this machine's devices (`plan.profile`).
    """

    cost: str = "measured"


@dataclass(frozen=True)
class UniformStageOption:
    """Stages of about equal work, each on an equal share of the devices.

    Attributes:
        num_stages: number of stages; None: as many as layers and devices allow.
        stages_per_mesh: how many stages share a submesh; None: one or, with a schedule that
            interleaves, as few as fit, at least two.
        logical_mesh_shape: (data, model) of every submesh; None: all of its devices in data.
    """

    num_stages: int | None = None
    stages_per_mesh: int | None = None
    logical_mesh_shape: tuple[int, int] | None = None

    def cut(self, step: TracedStep, cluster: ClusterShape, schedule: str) -> Cut:
        """Return the stages and their submeshes.

        Raises:
            PlanError: there are to be more stages than layers or devices, the devices do not
                divide, or the schedule cannot run so many stages on a submesh.
        """
        loss = step.loss(1)
        count, num_meshes = self._counts(schedule, loss.num_layers, cluster.num_devices)
        each = cluster.num_devices // num_meshes
        shape = pair("logical_mesh_shape", self.logical_mesh_shape or (each, 1))
        if math.prod(shape) != each:
            raise PlanError(
                f"a logical mesh of {shape[0]} × {shape[1]} does not fit the {each} devices of "
                f"each of {num_meshes} submeshes"
            )
        return Cut(
            layers=group_layers(layer_flops(loss), count),
            submeshes=tuple(
                Submesh(tuple(range(m * each, (m + 1) * each)), shape) for m in range(num_meshes)
            ),
            mesh_of=tuple(s % num_meshes for s in range(count)),
        )

    def _counts(self, schedule: str, num_layers: int, num_devices: int) -> tuple[int, int]:
        """Return the number of stages and of equal meshes: as many meshes as fit the request."""
        asked, stages_per_mesh = self.num_stages, self.stages_per_mesh
        several = SCHEDULES[schedule].interleaves
        if stages_per_mesh is not None and stages_per_mesh > 1 and not several:
            raise PlanError(
                f"parallel.stages_per_mesh={stages_per_mesh} needs "
                f"parallel.schedule={' or '.join(training_schedules(interleaves=True))}; "
                f"{schedule} runs one stage on each submesh"
            )
        for key, number in (("num_stages", asked), ("stages_per_mesh", stages_per_mesh)):
            if number is not None and number < 1:
                raise PlanError(f"parallel.{key}={number} must be at least 1")
            if number is not None and number > num_layers:
                raise PlanError(
                    f"parallel.{key}={number} is more than the model's {num_layers} layers (one "
                    "more than its mark_pipeline_boundary() calls); ask for fewer stages, mark "
                    "more boundaries, or ask for more layers with parallel.num_layers"
                )
        each: Sequence[int] = (stages_per_mesh,) if stages_per_mesh else (1,)
        if stages_per_mesh is None and several and asked != 1 and num_layers > 1:
            each = range(2, num_layers + 1)
        meshes = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        fits = [(n, k) for n in meshes for k in each if n * k <= num_layers]
        found = [(n, k) for n, k in fits if asked in (None, n * k)]
        if found:
            n, k = max(found, key=lambda fit: (fit[0], -fit[1]))
            return n * k, n
        options = ", ".join(str(total) for total in sorted({n * k for n, k in fits}))
        shared = f" with {stages_per_mesh} stages on each" if each[0] > 1 else ""
        raise PlanError(
            f"{num_devices} devices (cluster.gpus) do not divide into equal submeshes for "
            f"parallel.num_stages={asked}{shared}; possible here: {options}"
        )


@dataclass(frozen=True)
class ManualStageOption:
    """Stages that are all given by hand; submeshes take the devices in order, host by host.

    Attributes:
        forward_stage_layer_ids: the layers of each stage, e.g. `[[0, 1], [2, 3]]`.
        submesh_shapes: (hosts, devices on each) of each stage.
        logical_mesh_shapes: (data, model) of each stage; None: all of its devices in data.
        sharding_options: for each stage None (chosen), "zero2", "zero3" or `{argument leaf: spec}`
            as in `plan.json`; None: chosen for all.
    """

    forward_stage_layer_ids: Sequence[Sequence[int]]
    submesh_shapes: Sequence[tuple[int, int]]
    logical_mesh_shapes: Sequence[tuple[int, int]] | None = None
    sharding_options: Sequence[Any] | None = None

    def cut(self, step: TracedStep, cluster: ClusterShape, schedule: str) -> Cut:
        """Return the stages and their submeshes.

        Raises:
            PlanError: the options do not cover the layers, or do not fit the devices.
        """
        del schedule
        layers = tuple(map(tuple, self.forward_stage_layer_ids))
        self._check_counts(len(layers))
        _check_layers(layers, step.loss(1).num_layers)
        submeshes = self._submeshes(cluster)
        options = tuple(self.sharding_options or (None,) * len(layers))
        known = (None, *_ZERO)
        unknown = [o for o in options if not isinstance(o, Mapping) and o not in known]
        if unknown:
            raise PlanError(
                f'sharding_options: {unknown[0]!r} is not None, "zero2", "zero3" or a mapping'
            )
        return Cut(
            layers=layers,
            submeshes=submeshes,
            mesh_of=tuple(range(len(layers))),
            shardings=tuple(None if isinstance(o, str) else o for o in options),
            zero=tuple(_ZERO[o] if isinstance(o, str) else 0 for o in options),
        )

    def _check_counts(self, count: int) -> None:
        for name in ("submesh_shapes", "logical_mesh_shapes", "sharding_options"):
            given = getattr(self, name)
            if given is not None and len(given) != count:
                raise PlanError(
                    f"{name} has {len(given)} entries and forward_stage_layer_ids {count}; give "
                    "one for each stage"
                )

    def _submeshes(self, cluster: ClusterShape) -> tuple[Submesh, ...]:
        found, first = [], 0
        for s, submesh in enumerate(self.submesh_shapes):
            hosts, each = pair(f"stage {s}: its submesh_shapes", submesh)
            shape = hosts * each, 1
            if self.logical_mesh_shapes is not None:
                shape = pair(f"stage {s}: its logical_mesh_shapes", self.logical_mesh_shapes[s])
            if math.prod(shape) != hosts * each:
                raise PlanError(
                    f"stage {s}: a logical mesh of {shape[0]} × {shape[1]} does not fit a submesh "
                    f"of {hosts * each} devices"
                )
            found.append(Submesh(tuple(range(first, first + hosts * each)), shape))
            first += hosts * each
        if first != cluster.num_devices:
            raise PlanError(
                f"submesh_shapes take {first} devices and there are {cluster.num_devices}; they "
                "must cover the cluster"
            )
        return tuple(found)


def pair(what: str, value: Any) -> tuple[int, int]:
    """Return two numbers of devices; raise PlanError for anything else."""
    listed = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(listed) != 2 or not all(isinstance(n, int) and n > 0 for n in listed):
        raise PlanError(f"{what}={value!r} must be two whole numbers, at least 1")
    return listed


def layer_option_of(
    option: str | ManualLayerOption | AutoLayerOption,
) -> ManualLayerOption | AutoLayerOption:
    """Return the layer option that a word stands for; raise PlanError for an unknown word."""
    words: dict[Any, Any] = {"manual": ManualLayerOption(), "auto": AutoLayerOption()}
    found = words[option] if option in ("manual", "auto") else option
    if isinstance(found, (ManualLayerOption, AutoLayerOption)):
        return found
    raise PlanError(
        f'layer_option={option!r} is not "manual", "auto", a ManualLayerOption or an '
        "AutoLayerOption"
    )


def numbered_layers(
    step: TracedStep, num_layers: int | None, num_stages: int | None = None
) -> ManualLayerOption | AutoLayerOption:
    """Return the option that cuts the step into so many automatic layers.

    If `num_layers` is None, the step is cut at its marks or, where it has none, automatically, into
    at least `num_stages` layers.
    """
    if num_layers is not None:
        return AutoLayerOption(num_layers)
    if step.cut_at(None).loss(1).num_layers > 1:
        return ManualLayerOption()
    usual = AutoLayerOption()
    too_few = num_stages and usual.layered(step).loss(1).num_layers < num_stages
    return AutoLayerOption(num_stages) if too_few else usual


def stage_option_of(
    option: str | UniformStageOption | ManualStageOption | AutoStageOption,
) -> UniformStageOption | ManualStageOption | AutoStageOption:
    """Return the stage option that a word stands for; raise PlanError for an unknown word."""
    words: dict[Any, Any] = {"auto": AutoStageOption(), "uniform": UniformStageOption()}
    found = words[option] if option in ("auto", "uniform") else option
    if isinstance(found, (UniformStageOption, ManualStageOption, AutoStageOption)):
        return found
    raise PlanError(
        f'stage_option={option!r} is not "uniform", "auto", a UniformStageOption, a '
        "ManualStageOption or an AutoStageOption"
    )


def _check_layers(layers: Sequence[Sequence[int]], num_layers: int) -> None:
    if [i for stage in layers for i in stage] != list(range(num_layers)) or not all(layers):
        raise PlanError(
            f"forward_stage_layer_ids={[list(stage) for stage in layers]} does not cover the "
            f"model's {num_layers} layers in order, each once: its layers are 0 to {num_layers - 1}"
        )


def check_product(what: str, sizes: Sequence[int], cluster: ClusterShape) -> None:
    """Raise PlanError unless the product of these sizes is the number of devices."""
    product = math.prod(sizes)
    if product != cluster.num_devices or min(sizes) < 1:
        raise PlanError(
            f"{what} = {' × '.join(map(str, sizes))} needs {product} devices and there are "
            f"{cluster.num_devices} (cluster.gpus); make the product the number of devices"
        )


def checked_micro_batches(number: int) -> int:
    """Return the number of microbatches; raise PlanError if it is less than one."""
    if not isinstance(number, int) or number < 1:
        raise PlanError(f"num_micro_batches={number} must be a whole number, at least 1")
    return number
