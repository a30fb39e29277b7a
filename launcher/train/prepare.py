"""What is found out before anything is started: data, devices, plan. `run` calls it."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from launcher.cluster.devices import DevicePool
from launcher.config.schema import Config
from launcher.plan import Plan, PlanError
from launcher.report.console import progress_of, status
from launcher.report.plan_table import print_plan
from launcher.train.check import find_pool
from launcher.train.fitting import too_large, what_fits
from launcher.train.method import plan_of
from launcher.train.program import build_program
from launcher.train.shape import shape_of
from launcher.train.start import check_start, find_start
from recipes import check_dataset


@dataclass(frozen=True)
class Prepared:
    """The devices there are (None: only planned for) and the plan for them. `plan_seconds`: of
    tracing and planning. `init_from`: the checkpoint whose parameters the run starts from.
    `problem`: why it cannot be trained by that plan, which was asked for alone."""

    pool: DevicePool | None
    plan: Plan
    plan_seconds: float
    init_from: Path | None = None
    problem: str = ""


def prepare(
    config: Config, console: Console, plan_only: bool = False, finished: int = 0
) -> Prepared:
    """Check the data, find the devices, trace and plan, cheapest first; show the plan.

    Args:
        finished: how many steps the run has behind it.
        plan_only: the cluster may be a described one, which is not here.

    Raises ConfigError, `recipes.InputError`, `TraceError` and `PlanError` for what the user can
    put right, and OSError for files.
    """
    say = functools.partial(console.print, soft_wrap=True)
    check_dataset(config.dataset, config.model, validation=config.train.eval_every > 0)
    pool = find_pool(config, plan_only, say)
    init_from = find_start(config, finished, say)
    cluster = shape_of(config.cluster, pool, say)
    began = time.perf_counter()
    with status(console, "reading the data and tracing"):
        program = build_program(config)
    if init_from is not None:
        check_start(config.train.init_from, init_from, program.state.params)
    of_search: list[str] = []
    nothing_fits: list[str] = []
    told = nothing_fits.append if plan_only else None
    try:
        with progress_of(console, "planning") as progress:
            plan = plan_of(
                config.parallel, program.train, cluster, progress, of_search.append, told
            )
    finally:
        for note in of_search:
            say(note)
    seconds = time.perf_counter() - began
    console.print(f"data: {program.dataset.describe}", soft_wrap=True)
    print_plan(console, plan, getattr(config.model, "sequence_length", None))
    problem = too_large(plan) or "".join(nothing_fits)
    if problem and config.parallel.allow_over_memory:
        say(f"{problem}; parallel.allow_over_memory=true")
    elif problem:
        if plan_only:
            say("this plan needs more memory than the devices have")
        if nothing_fits:
            (problem,) = nothing_fits
        else:
            with status(console, "looking for what would fit"):
                problem = f"{problem}. {what_fits(config.parallel, program.train, cluster, plan)}"
        if not plan_only:
            raise PlanError(problem)
        return Prepared(pool, plan, seconds, init_from, problem)
    return Prepared(pool, plan, seconds, init_from)
