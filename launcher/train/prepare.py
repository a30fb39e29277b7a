"""What is found out before anything is started: data, devices, plan. `run` calls it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console

from launcher.cluster.devices import DevicePool, find_devices
from launcher.config.schema import Config
from launcher.plan import Plan, local_shape
from launcher.report.console import status
from launcher.report.plan_table import print_plan
from launcher.train.method import plan_of
from launcher.train.program import build_program
from recipes import check_dataset


@dataclass(frozen=True)
class Prepared:
    """The devices there are and the plan for them. `plan_seconds`: of tracing and planning."""

    pool: DevicePool
    plan: Plan
    plan_seconds: float


def prepare(config: Config, console: Console) -> Prepared:
    """Check the data, find the devices, trace and plan, cheapest first; show the plan.

    Raises ConfigError, `recipes.InputError`, `TraceError` and `PlanError` for what the user can
    put right, and OSError for files.
    """
    check_dataset(config.dataset, config.model, validation=config.train.eval_every > 0)
    pool = find_devices(config.cluster)
    if pool.note:
        console.print(pool.note, soft_wrap=True)
    began = time.perf_counter()
    with status(console, "reading the data and planning"):
        program = build_program(config)
        cluster = local_shape(
            pool.hosts * pool.devices_per_host,
            pool.hosts,
            "cpu" if pool.kind == "cpu" else pool.device_name,
        )
        plan = plan_of(config.parallel, program.train, cluster)
    seconds = time.perf_counter() - began
    console.print(f"data: {program.dataset.describe}", soft_wrap=True)
    print_plan(console, plan)
    return Prepared(pool, plan, seconds)
