"""Plans by the name of their method and the settings of `parallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher.partition.errors import PlanError
from launcher.plan.build import build_plan, repriced
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.errors import TooLargeError
from launcher.plan.methods import (
    DataParallel,
    PipeshardParallel,
    ShardParallel,
    ThreeDParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
    auto_plan,
    check_cost,
)
from launcher.plan.options import ManualLayerOption, numbered_layers
from launcher.plan.plan import Plan
from launcher.plan.profile.measure_layers import measure_layers
from launcher.schedule import DEFAULT_SCHEDULE
from launcher.trace.step import TracedStep

PIPELINES = ("auto", "manual", "three_d")  # the methods by name that put layers into stages


def make_plan(
    step: TracedStep,
    *,
    method: str,
    cluster: ClusterShape,
    num_layers: int | None = None,
    num_stages: int | None = None,
    stages_per_mesh: int | None = None,
    num_micro_batches: int | None = 1,
    schedule: str = DEFAULT_SCHEDULE,
    remat: str | Sequence[str] = "none",
    data: int | None = None,
    model: int | None = None,
    pipeline: int | None = None,
    cost: str = "model",
    nothing_fits: Callable[[str], None] | None = None,
    progress: Callable[[float], None] = lambda share: None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Return the plan of a method, by its name and the settings of `parallel`.

    Settings that a method does not know are ignored.

    Args:
        step: the traced train step.
        method: "auto", "data", "zero2", "zero3", "shard", "three_d" or "manual".
        cluster: the devices to plan for.
        num_layers: number of automatic layers for a pipeline; None: layers end at the model's
            marks, if it has any.
        num_stages: number of stages (`auto`, `manual`); None: as many as are best (`auto`), or as
            layers and devices allow (`manual`).
        stages_per_mesh: how many stages share a submesh (`manual`); see `UniformStageOption`.
        num_micro_batches: number of microbatches a step; None, for `auto` alone: searched for.
        schedule: name of a pipeline schedule; "auto", for `auto` alone: searched for.
        remat: name of a rematerialisation policy, or one for each stage; "auto", for `auto` alone:
            searched for.
        data: size of the data axis of each stage's logical mesh (`three_d`, `shard`); None: what is
            left of the devices, or 1.
        model: size of the model axis, likewise.
        pipeline: number of stages (`three_d`); None: what is left of the devices, or 1.
        cost: see `AutoStageOption`; the plans of the other methods are predicted from the same
            costs.
        nothing_fits: called with the reason where no plan of `auto` fits the memory; the candidate
            that exceeds it least is then returned. None: that is an error. The other methods have
            no memory limit.
        progress: called with the share of a search that is done, 0 … 1.
        say: called with a message about each measurement that failed or was ignored.

    Raises:
        PlanError: the method is unknown, or has no such plan on these devices.
        BatchError: the batch does not divide into microbatches and replicas.
    """
    some: dict[str, Any] = {"num_micro_batches": num_micro_batches}
    remats: Any = remat if isinstance(remat, str) else tuple(remat)
    layers: Any = ManualLayerOption()
    if method in PIPELINES:
        layers = numbered_layers(step, num_layers, num_stages or pipeline)
    if method != "manual":
        step = layers.layered(step)
    if method == "auto":
        try:
            return auto_plan(
                step, cluster, num_micro_batches, schedule, remat, cost, progress, say, num_stages
            )
        except TooLargeError as error:
            if nothing_fits is None:
                raise
            nothing_fits(str(error))
            return build_plan(step, error.assignment, cluster)
    known: dict[str, Any] = {
        "data": lambda: DataParallel(**some, remat=remats),
        "zero2": lambda: Zero2Parallel(**some, remat=remats),
        "zero3": lambda: Zero3Parallel(**some, remat=remats),
        "shard": lambda: ShardParallel(**some, **_shape(data, model, cluster), remat=remats),
        "three_d": lambda: ThreeDParallel(
            *_sizes(data, model, pipeline, cluster), **some, schedule=schedule, remat=remats
        ),
        "manual": lambda: PipeshardParallel(
            **some,
            layer_option=layers,
            stage_option=UniformStageOption(num_stages, stages_per_mesh),
            schedule=schedule,
            remat=remats,
        ),
    }
    if method not in known:
        raise PlanError(f"parallel.method={method} is not one of auto, {', '.join(known)}")
    check_cost(cost)
    found: Plan = known[method]().plan(step, cluster)
    if cost == "model":
        return found
    sizes = sorted({stage.logical_mesh[1] for stage in found.stages})
    step = step.cut_at(found.layer_ends)
    measured = measure_layers(step, cluster, sizes, found.num_micro_batches, progress, say)
    return repriced(step, found, measured)


def _shape(data: int | None, model: int | None, cluster: ClusterShape) -> dict[str, Any]:
    if data is None and model is None:
        return {}
    count = cluster.num_devices
    data = data or max(1, count // (model or 1))
    return {"logical_mesh_shape": (data, model or max(1, count // data))}


def _sizes(
    data: int | None, model: int | None, pipeline: int | None, cluster: ClusterShape
) -> tuple[int, int, int]:
    """Return (data, model, pipeline), with the sizes that are not given filled in.

    What is left of the devices goes to data, otherwise to pipeline, otherwise to model.
    """
    left = cluster.num_devices // ((data or 1) * (model or 1) * (pipeline or 1))
    if data is None:
        return max(1, left), model or 1, pipeline or 1
    if pipeline is None:
        return data, model or 1, max(1, left)
    return data, model or max(1, left), pipeline
