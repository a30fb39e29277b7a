"""Prepare a run: find data and devices, trace the program, plan."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from rich.console import Console

from launcher.base import held_back
from launcher.cluster.devices import DevicePool
from launcher.config.schema import Config
from launcher.driver.planning.candidates import known_fastest, plans_to_try
from launcher.driver.planning.check import Inputs, look
from launcher.driver.planning.cluster_from_config import shape_of
from launcher.driver.planning.fitting import too_large, what_fits
from launcher.driver.planning.init_from import check_start
from launcher.driver.planning.plan_from_config import plans_of
from launcher.plan import ClusterShape, Plan, PlanError
from launcher.report.console import Phase, status
from launcher.report.plan_table import print_plan
from launcher.train.program import Program, build_program
from launcher.train.start import stored_part

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to train.

    Attributes:
        pool: the devices there are, or None if the run is only planned.
        plan: the plan for them.
        plan_seconds: the time that tracing and planning took.
        init_from: the checkpoint that the first parameters come from.
        eval_batches: the batches of an evaluation.
        problem: why the plan cannot be trained, if only a plan was asked for; else empty.
        candidates: the plans to try before the training, this one first; empty if it is taken.
    """

    pool: DevicePool | None
    plan: Plan
    plan_seconds: float
    init_from: Path | None = None
    eval_batches: int = 0
    problem: str = ""
    candidates: tuple[Plan, ...] = ()


@dataclass(frozen=True)
class Traced:
    """A traced program and the cluster to plan it for.

    Attributes:
        found: the devices, and the checkpoint that the first parameters come from.
        cluster: the shape to plan for.
        program: the run's program.
        seconds: the time that tracing took.
    """

    found: Inputs
    cluster: ClusterShape
    program: Program
    seconds: float


def prepare(config: Config, console: Console, finished: int = 0) -> Prepared:
    """Check data and devices, trace and plan; show the plan.

    Args:
        config: checked settings.
        console: where progress and the plan are shown.
        finished: how many steps the run has finished.

    Raises:
        ConfigError: a setting does not fit this machine.
        launcher.recipes.InputError: the model or the data cannot be built.
        TraceError: the program cannot be traced.
        PlanError: there is no plan that fits.
        OSError: a file cannot be read.
    """
    return plan(config, console, trace(config, console, look(config, finished)))


def trace(config: Config, console: Console, found: Inputs, measures: bool = False) -> Traced:
    """Read the data and trace the program; raise like `prepare`.

    Args:
        config: checked settings.
        console: where progress is shown.
        found: what is here.
        measures: whether to measure the devices if no calibration of them is kept.
    """
    jax.config.update("jax_platforms", "cpu")  # the devices are for the workers
    cluster = shape_of(config, found.pool, console if measures else None)
    began = time.perf_counter()
    with status(console, "reading the data and tracing", Phase.READING):
        program = build_program(config, cluster.device_kind)
    if found.init_from is not None:
        check_start(config.train.init_from, found.init_from, stored_part(program.state.model))
    return Traced(found, cluster, program, time.perf_counter() - began)


def plan(config: Config, console: Console, traced: Traced, plan_only: bool = False) -> Prepared:
    """Plan a traced program and show the plan; raise like `prepare`.

    Args:
        config: checked settings.
        console: where progress and the plan are shown.
        traced: what was traced.
        plan_only: whether the cluster may be a described one, which is not here.
    """
    program, cluster = traced.program, traced.cluster
    began = time.perf_counter()
    nothing_fits: list[str] = []
    on_nothing_fits = nothing_fits.append if plan_only else None
    with held_back(), status(console, "planning", Phase.PLANNING) as progress:
        plans = plans_of(
            config.parallel,
            program.train,
            cluster,
            progress,
            on_nothing_fits,
            plans_to_try(config, traced.found.pool),
        )
        known = known_fastest(config, plans)
    chosen = known or plans[0]
    candidates = () if known or plan_only or len(plans) == 1 else tuple(plans)
    seconds = traced.seconds + time.perf_counter() - began
    console.print(f"data: {program.dataset.describe}", soft_wrap=True)
    print_plan(console, chosen, getattr(config.model, "sequence_length", None))
    init_from, eval_batches = traced.found.init_from, program.eval_batches
    ready = Prepared(
        traced.found.pool, chosen, seconds, init_from, eval_batches, candidates=candidates
    )
    problem = too_large(chosen) or "".join(nothing_fits)
    if problem and config.parallel.allow_over_memory:
        _log.warning(f"{problem}; parallel.allow_over_memory=true")
    elif problem:
        if plan_only:
            _log.warning("this plan needs more memory than the devices have")
        if nothing_fits:
            (problem,) = nothing_fits
        else:
            with status(console, "looking for what would fit", Phase.PLANNING):
                problem = f"{problem}. {what_fits(config.parallel, program.train, cluster, chosen)}"
        if not plan_only:
            raise PlanError(problem)
        return replace(ready, problem=problem)
    return ready
