"""From the settings of `parallel` to a plan. Used by `prepare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from launcher.config.errors import ConfigError
from launcher.config.schema import Parallel
from launcher.plan import ClusterShape, Plan, PlanError, make_plan
from launcher.trace import TracedStep


def plan_of(
    parallel: Parallel,
    step: TracedStep,
    cluster: ClusterShape,
    progress: Callable[[float], None] = lambda share: None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan that the settings ask for. What is left to the launcher, only `auto` searches for;
    the other methods take one microbatch, 1f1b and no rematerialisation. `progress` is told the
    share of a search that is done, `say` what happened to measurements.

    Raises:
        ConfigError: the plan to replay cannot be read, or is not one for this program and cluster.
        PlanError, BatchError: there is no such plan.
    """
    if parallel.method == "replay":
        return _replayed(parallel, step, cluster)
    searched = parallel.method == "auto"
    chosen = {"schedule": parallel.schedule, "remat": parallel.remat}
    if not searched:
        usual = {"schedule": "1f1b", "remat": "none"}
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
        progress=progress,
        say=say,
    )


def _replayed(parallel: Parallel, step: TracedStep, cluster: ClusterShape) -> Plan:
    path = Path(parallel.plan or "")
    try:
        plan = Plan.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # PlanError is one, and so is what json raises
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"parallel.plan={path} cannot be read as a plan: {reason}",
            "Name a plan.json of an earlier run.",
            ["parallel.plan"],
        ) from error
    if plan.fingerprint != step.fingerprint:
        raise ConfigError(
            f"parallel.plan={path} was made for another program",
            "Use the model, data, optimizer and batch size that it was made for, or plan again.",
            ["parallel.plan"],
        )
    here = cluster.hosts, cluster.devices_per_host
    there = plan.cluster["hosts"], plan.cluster["devices_per_host"]
    if here != there:
        raise ConfigError(
            f"parallel.plan={path} is for {there[0]} hosts × {there[1]} devices; here are "
            f"{here[0]} × {here[1]}",
            "Set cluster.hosts and cluster.gpus as they were.",
            ["parallel.plan", "cluster.gpus", "cluster.hosts"],
        )
    try:
        plan.validate(step)
    except PlanError as error:
        raise ConfigError(f"parallel.plan={path}: {error}", "", ["parallel.plan"]) from error
    return plan
