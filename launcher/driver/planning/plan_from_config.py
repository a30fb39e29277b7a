"""The plan that the `parallel` section asks for, and advice where it does not fit the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax

from launcher.config.errors import ConfigError
from launcher.config.parallel import (
    Auto,
    Data,
    Manual,
    Parallel,
    Pipelined,
    Planned,
    Replay,
    Served,
    Shard,
    ThreeD,
    Zero2,
    Zero3,
)
from launcher.driver.planning.replay import (
    another_program,
    check_replay_devices,
    no_plan,
    read_plan,
)
from launcher.partition import Reduction
from launcher.plan import ClusterShape, Plan, PlanError, TooLargeError, describe_plan
from launcher.plan.build import build_plan, repriced
from launcher.plan.methods import (
    DataParallel,
    ParameterServer,
    PipeshardParallel,
    ShardParallel,
    ThreeDParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
    auto_plans,
)
from launcher.plan.options import numbered_layers
from launcher.plan.profile.measure_layers import measure_layers
from launcher.report.text import bytes_text
from launcher.trace import BatchError, TracedStep

_FITS = "This would fit: "  # a search's errors say it, too


def plan_of(
    parallel: Parallel,
    step: TracedStep,
    cluster: ClusterShape,
    nothing_fits: Callable[[str], None] | None = None,
) -> Plan:
    """Return the plan that the settings ask for; see `plans_of`."""
    return plans_of(parallel, step, cluster, nothing_fits=nothing_fits)[0]


def plans_of(
    parallel: Parallel,
    step: TracedStep,
    cluster: ClusterShape,
    progress: Callable[[float], None] = lambda share: None,
    nothing_fits: Callable[[str], None] | None = None,
    how_many: Callable[[Plan], int] = lambda best: 1,
) -> list[Plan]:
    """Return the plan that the settings ask for and, of a search, others that are worth trying.

    Args:
        parallel: the settings.
        step: the traced train step.
        cluster: the devices to plan for.
        progress: called with the share of a search that is done, 0 … 1.
        nothing_fits: called with the reason if no plan that a search finds fits the memory; the one
            that exceeds it least is then returned. None: that is an error, unless
            `parallel.allow_over_memory`.
        how_many: returns how many plans a search returns, given the best.

    Raises:
        ConfigError: the plan to replay cannot be read, or is not one for this program and cluster.
        PlanError, BatchError: there is no such plan.
    """
    if isinstance(parallel, Replay):
        return [_replayed(parallel, step, cluster)]
    if isinstance(parallel, Pipelined):
        step = step.opened
    if isinstance(parallel, Auto):
        step = numbered_layers(step, parallel.num_layers, parallel.num_stages).layered(step)
        try:
            return auto_plans(
                step,
                cluster,
                parallel.num_micro_batches,
                parallel.schedule,
                parallel.remat,
                parallel.cost,
                progress,
                parallel.num_stages,
                Reduction(parallel.bucket_bytes, parallel.reduce_dtype),
                how_many,
            )
        except TooLargeError as error:
            if nothing_fits:
                nothing_fits(str(error))
            elif not parallel.allow_over_memory:
                raise
            return [build_plan(step, error.assignment, cluster)]
    assert isinstance(parallel, Planned)
    plan = _planned(parallel, step, cluster)
    if parallel.cost != "profile":
        return [plan]
    step = step.cut_at(plan.layer_ends)
    sizes = sorted({stage.logical_mesh[1] for stage in plan.stages})
    measured = measure_layers(step, cluster, sizes, plan.num_micro_batches, progress)
    return [repriced(step, plan, measured)]


def _planned(parallel: Planned, step: TracedStep, cluster: ClusterShape) -> Plan:
    """Return the plan of a method that searches for nothing."""
    sums = {"bucket_bytes": parallel.bucket_bytes, "reduce_dtype": parallel.reduce_dtype}
    common: Any = {"num_micro_batches": parallel.num_micro_batches or 1, **sums}
    common["remat"] = parallel.remat
    match parallel:
        case Manual():
            layers = numbered_layers(step, parallel.num_layers, parallel.num_stages)
            stages = UniformStageOption(parallel.num_stages, parallel.stages_per_mesh)
            options: Any = {"layer_option": layers, "stage_option": stages, **common}
            method = PipeshardParallel(schedule=parallel.schedule, **options)
            return method.plan(step, cluster)
        case ThreeD():
            step = numbered_layers(step, parallel.num_layers, parallel.pipeline).layered(step)
            sizes = _sizes(parallel, cluster.num_devices)
            return ThreeDParallel(*sizes, schedule=parallel.schedule, **common).plan(step, cluster)
        case Shard():
            shape = _shape(parallel, cluster.num_devices)
            return ShardParallel(logical_mesh_shape=shape, **common).plan(step, cluster)
        case Served():
            return ParameterServer(servers=parallel.servers, **common).plan(step, cluster)
        case Zero3():
            return Zero3Parallel(**common).plan(step, cluster)
        case Zero2():
            return Zero2Parallel(**common).plan(step, cluster)
        case Data():
            return DataParallel(**common).plan(step, cluster)
    raise TypeError(f"{type(parallel).__name__} has no plan here")


def _shape(parallel: Shard, num_devices: int) -> tuple[int, int] | None:
    """Return (data, model), or None if neither is given."""
    if parallel.data is None and parallel.model is None:
        return None
    data = parallel.data or max(1, num_devices // (parallel.model or 1))
    return data, parallel.model or max(1, num_devices // data)


def _sizes(parallel: ThreeD, num_devices: int) -> tuple[int, int, int]:
    """Return (data, model, pipeline), with the sizes that are not given filled in.

    The remaining devices go to data, otherwise to pipeline, otherwise to model.
    """
    data, model, pipeline = parallel.data, parallel.model, parallel.pipeline
    left = max(1, num_devices // ((data or 1) * (model or 1) * (pipeline or 1)))
    if data is None:
        return left, model or 1, pipeline or 1
    if pipeline is None:
        return data, model or 1, left
    return data, model or left, pipeline


def _replayed(parallel: Replay, step: TracedStep, cluster: ClusterShape) -> Plan:
    path = parallel.plan
    tree = read_plan(path)
    try:
        plan = Plan.from_dict(tree)
    except ValueError as error:  # DamagedError and PlanError are one
        raise no_plan(path, str(error)) from error
    step = step.planned_as(plan.fingerprint)
    if plan.fingerprint != step.fingerprint:
        raise another_program(path, made_by=plan.jax_version, here=jax.__version__)
    check_replay_devices(path, tree, cluster.hosts, cluster.devices_per_host)
    try:
        plan.validate(step)
    except PlanError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"parallel.plan={path}: {reason}") from error
    return plan


def too_large(plan: Plan) -> str:
    """Return how much memory the largest stage lacks, in words; empty if all stages fit."""
    if plan.missing_bytes <= 0:
        return ""
    stage = max(range(len(plan.stages)), key=lambda s: plan.stages[s].memory_bytes)
    needed, missing = plan.stages[stage].memory_bytes, plan.missing_bytes
    return (
        f"the plan does not fit: stage {stage} needs {bytes_text(needed)} a device, "
        f"{bytes_text(missing)} more than its {bytes_text(needed - missing)}"
    )


def what_fits(parallel: Parallel, step: TracedStep, cluster: ClusterShape, plan: Plan) -> str:
    """Return a sentence with the smallest changes that make the step fit; each one was planned."""
    options = []
    for words, changed in _changes(parallel, step, plan):
        try:
            fits = plan_of(changed, step, cluster).missing_bytes <= 0
        except (PlanError, BatchError):  # such as a batch that does not divide
            continue
        if fits:
            options.append(words)
            break
    try:
        num_layers = getattr(parallel, "num_layers", None)
        automatic = plan_of(Auto(num_layers=num_layers), step, cluster)
        options.append(f"parallel=auto ({describe_plan(automatic)})")
    except PlanError as error:
        if advice := str(error).partition(_FITS)[2]:
            options.append(f"parallel=auto with {advice}")
    return (
        f"{_FITS if options else ''}"
        f"{'; or '.join(options) or 'Take a smaller model, or larger devices'}. "
        "To run it anyway, set parallel.allow_over_memory=true"
    )


def _changes(parallel: Parallel, step: TracedStep, plan: Plan) -> Iterator[tuple[str, Parallel]]:
    """Yield changes that take less memory under the same or a similar method, small ones first."""
    if isinstance(parallel, Auto) or not isinstance(parallel, Planned):
        return
    most = step.batch_size // max(stage.logical_mesh[0] for stage in plan.stages)
    methods: list[Planned] = [parallel]
    if isinstance(parallel, Data) and not isinstance(parallel, Zero3):
        kept = {name: value for name, value in vars(parallel).items() if name != "method"}
        methods.append(Zero3(**kept))
    ways = (
        {"remat": "full"},
        {"num_micro_batches": most},
        {"remat": "full", "num_micro_batches": most},
    )
    for method in methods:
        is_other = method is not parallel
        for way in ({}, *ways) if is_other else ways:
            settings = {f"parallel.{key}={value}" for key, value in way.items()}
            words = ([f"parallel={method.method}"] if is_other else []) + sorted(settings)
            yield " ".join(words), replace(method, **way)
