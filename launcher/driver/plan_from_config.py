"""From the settings of `parallel` to a plan."""

from __future__ import annotations

from collections.abc import Callable

from launcher.config.errors import ConfigError
from launcher.config.schema import Parallel
from launcher.driver.replay import another_program, check_devices, no_plan, read_plan
from launcher.plan import ClusterShape, Plan, PlanError, make_plan
from launcher.schedule import DEFAULT_SCHEDULE
from launcher.trace import TracedStep


def plan_of(
    parallel: Parallel,
    step: TracedStep,
    cluster: ClusterShape,
    progress: Callable[[float], None] = lambda share: None,
    say: Callable[[str], None] = lambda text: None,
    nothing_fits: Callable[[str], None] | None = None,
) -> Plan:
    """The plan that the settings ask for. What is left to the launcher, only `auto` searches for;
    the other methods take one microbatch, the default schedule and no rematerialisation.
    `progress` is told the share of a search that is done, `say` what happened to measurements, and
    `nothing_fits` why a search plans what lacks least memory; without it, that takes
    `parallel.allow_over_memory`.

    Raises:
        ConfigError: the plan to replay cannot be read, or is not one for this program and cluster.
        PlanError, BatchError: there is no such plan.
    """
    if parallel.method == "replay":
        return _replayed(parallel, step, cluster)
    searched = parallel.method == "auto"
    if nothing_fits is None and parallel.allow_over_memory:
        nothing_fits = _as_allowed
    chosen = {"schedule": parallel.schedule, "remat": parallel.remat}
    if not searched:
        usual = {"schedule": DEFAULT_SCHEDULE, "remat": "none"}
        chosen = {key: usual[key] if word == "auto" else word for key, word in chosen.items()}
    return make_plan(
        step,
        method=parallel.method,
        num_layers=parallel.num_layers,
        num_stages=parallel.num_stages,
        stages_per_mesh=parallel.stages_per_mesh,
        num_micro_batches=parallel.num_micro_batches or (None if searched else 1),
        **chosen,
        data=parallel.data,
        model=parallel.model,
        pipeline=parallel.pipeline,
        cluster=cluster,
        cost=parallel.cost,
        nothing_fits=nothing_fits,
        progress=progress,
        say=say,
    )


def _as_allowed(why: str) -> None:
    """Say nothing of what was allowed."""


def _replayed(parallel: Parallel, step: TracedStep, cluster: ClusterShape) -> Plan:
    path = str(parallel.plan)
    tree = read_plan(path)
    try:
        plan = Plan.from_dict(tree)
    except ValueError as error:  # DamagedError and PlanError are one
        raise no_plan(path, str(error)) from error
    if plan.fingerprint != step.fingerprint:
        raise another_program(path)
    check_devices(path, tree, cluster.hosts, cluster.devices_per_host)
    try:
        plan.validate(step)
    except PlanError as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"parallel.plan={path}: {told}", "", ["parallel.plan"]) from error
    return plan
