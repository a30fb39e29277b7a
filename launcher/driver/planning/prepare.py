"""Prepare a run: find data and devices, trace the program, plan, or take a plan tried before."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from rich.console import Console

from launcher.base import LAUNCH, held_back, to_type
from launcher.cluster.devices import DevicePool
from launcher.cluster.kinds import kind_of
from launcher.config.parallel import Auto, Planned
from launcher.config.schema import Config
from launcher.driver.planning.check import Inputs, look, measures_first
from launcher.driver.planning.compiled import (
    compiled_problem,
    compiler_of,
    verified,
    verifies,
    with_report,
)
from launcher.driver.planning.fewer_hosts import plan_on_fewer
from launcher.driver.planning.init_from import check_parent_state, check_start
from launcher.driver.planning.plan_from_config import plans_of, too_large, what_fits
from launcher.hardware import beside_others, is_nominal
from launcher.inference.stored_model import stored_plan
from launcher.plan import (
    ClusterShape,
    Plan,
    UnfitError,
    describe_plan,
    fastest,
    kept_trial,
    same_way,
)
from launcher.plan.profile.calibration import cached_calibration, calibrated, measure_first
from launcher.report.console import Phase, status
from launcher.report.plan_table import print_compiled, print_plan
from launcher.runtime import Target
from launcher.train.program import Program, build_program, stored_part

_log = logging.getLogger(__name__)
_PLANS = 3
_VERIFIED = 4  # so many plans are compiled at most, to find one that fits
_AT_WORK = 0.2  # fewer threads are a system's own
_PAYS = 1800.0  # seconds of training from which on trying, some ten seconds a plan, costs little


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
        on_fewer: returns the plan for at most so many hosts; raises PlanError if there is none.
    """

    pool: DevicePool | None
    plan: Plan
    plan_seconds: float
    init_from: Path | None = None
    eval_batches: int = 0
    problem: str = ""
    candidates: tuple[Plan, ...] = ()
    on_fewer: Callable[[int], Plan] | None = None


@dataclass(frozen=True)
class Traced:
    """A traced program and the cluster to plan it for.

    Attributes:
        inputs: the devices, and the checkpoint that the first parameters come from.
        cluster: the shape to plan for.
        program: the run's program.
        seconds: the time that tracing took.
        target: the devices to compile plans for, if they are to be compiled.
    """

    inputs: Inputs
    cluster: ClusterShape
    program: Program
    seconds: float
    target: Target | None


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


def trace(config: Config, console: Console, inputs: Inputs, measures: bool = False) -> Traced:
    """Read the data and trace the program; raise like `prepare`.

    Args:
        config: checked settings.
        console: where progress is shown.
        inputs: the devices, and the checkpoint to start from.
        measures: whether to measure the devices if no calibration of them is kept.
    """
    jax.config.update("jax_platforms", "cpu")  # the devices are for the workers
    cluster = shape_of(config, inputs.pool, console if measures else None)
    if inputs.others > _AT_WORK:
        at_work = f"other processes have {inputs.others:.1f} threads at work"
        _log.info(f"{at_work}, and predictions allow for it")
        cluster = beside_others(cluster, inputs.others)
    target = compiler_of(config, cluster)
    if config.train.deterministic and cluster.device_kind != "cpu":
        _log.info(
            "train.deterministic=true: XLA sorts what it scatters and times no kernels; steps take "
            "longer than predicted"
        )
    began = time.perf_counter()
    with status(console, "reading the data and tracing", Phase.READING):
        program = build_program(config, cluster.compute_capability)
    if inputs.init_from is not None and config.run.fork is not None:
        check_parent_state(config, program.state)
    elif inputs.init_from is not None:
        check_start(config.train.init_from, inputs.init_from, stored_part(program.state.model))
    return Traced(inputs, cluster, program, time.perf_counter() - began, target)


def plan(config: Config, console: Console, traced: Traced, plan_only: bool = False) -> Prepared:
    """Plan a traced program and show the plan; raise like `prepare`.

    Args:
        config: checked settings.
        console: where progress and the plan are shown.
        traced: what was traced.
        plan_only: whether the cluster may be a described one, which is not here.
    """
    program = traced.program
    began = time.perf_counter()
    plans, over = _plans_and_problem(config, console, traced, plan_only)
    chosen = plans[0]
    seconds = traced.seconds + time.perf_counter() - began
    console.print(f"data: {program.dataset.describe}", soft_wrap=True)
    print_plan(console, chosen, getattr(config.model, "sequence_length", None))
    if traced.target is not None and config.plan.compile:
        if chosen.compiled is None:
            chosen = with_report(chosen, program.train, traced.target, console)
        print_compiled(console, chosen)
    problem = _problem(config, console, traced, chosen, over, plan_only)
    if problem and not plan_only:
        raise UnfitError(problem)
    candidates = () if plan_only or len(plans) == 1 else tuple(plans)
    asked = config.parallel, program.train, traced.cluster
    on_fewer = functools.cache(functools.partial(plan_on_fewer, *asked))
    found = traced.inputs.pool, chosen, seconds, traced.inputs.init_from
    return Prepared(*found, program.eval_batches, problem, candidates, on_fewer)


def _problem(
    config: Config, console: Console, traced: Traced, chosen: Plan, over: str, plan_only: bool
) -> str:
    """Return why a plan cannot be trained, and what would fit; "" if it can be.

    A compiler that was asked about the plan is right where the prediction is wrong.

    Args:
        config: checked settings.
        console: where progress is shown.
        traced: what was traced.
        chosen: the plan.
        over: why no plan of a search fits; "" if one does.
        plan_only: whether nothing is going to be trained.
    """
    if config.plan.compile:
        problem = compiled_problem(chosen)
        if chosen.compiled and chosen.compiled.errors:
            return problem
        if not problem and chosen.missing_bytes > 0:
            _log.info("this plan was predicted not to fit; as compiled, it does")
    else:
        problem = too_large(chosen) or over
    if not problem:
        return ""
    if config.parallel.allow_over_memory:
        _log.warning(f"{problem}; parallel.allow_over_memory=true")
        return ""
    if plan_only:
        _log.warning("this plan needs more memory than the devices have")
    if over:
        return over
    with status(console, "looking for what would fit", Phase.PLANNING):
        fits = what_fits(config.parallel, traced.program.train, traced.cluster, chosen)
    return f"{problem}. {fits}"


def _plans_and_problem(
    config: Config, console: Console, traced: Traced, plan_only: bool
) -> tuple[list[Plan], str]:
    """Return the plans to try, the best first, and why none fits where a search finds none.

    A plan that is taken untried is alone.
    """
    step, cluster, pool = traced.program.train, traced.cluster, traced.inputs.pool
    target = traced.target if verifies(config) else None
    over: list[str] = []
    accept = over.append if plan_only or target else None

    def how_many(best: Plan) -> int:
        return max(plans_to_try(config, pool, best), _VERIFIED if target else 1)

    with held_back(), status(console, "planning", Phase.PLANNING) as progress:
        plans = [
            with_notes(config, plan)
            for plan in plans_of(config.parallel, step, cluster, progress, accept, how_many)
        ]
    if target is None:
        known = known_fastest(config, plans)
        return [known] if known else plans, "".join(over)
    plans, problem = verified(plans, step, target, console)
    return plans[: plans_to_try(config, pool, plans[0])], problem


def with_notes(config: Config, plan: Plan) -> Plan:
    """Return a plan that says what the model's dimensions mean for it."""
    devices = max(stage.logical_mesh[1] for stage in plan.stages)
    notes = config.model.notes(devices)
    return replace(plan, notes=tuple(dict.fromkeys([*notes, *plan.notes])))


def plans_to_try(config: Config, pool: DevicePool | None, best: Plan) -> int:
    """Return how many plans to try, given the best by its prediction; 1: none is tried.

    It is `parallel.try` or, if that is null, a few where the training is long enough to pay for
    them, or where earlier trials decide.
    """
    parallel = config.parallel
    if pool is None or not isinstance(parallel, Auto):
        return 1
    if parallel.try_ is not None:
        return max(parallel.try_, 1)
    is_long = best.predicted_step_seconds * config.train.steps >= _PAYS
    return _PLANS if parallel.cost != "model" and (is_long or kept_trial(best)) else 1


def knows_trials(config: Config) -> bool:
    """Return whether earlier trials of plans count."""
    return not (isinstance(config.parallel, Auto) and config.parallel.cost == "model")


def known_fastest(config: Config, plans: Sequence[Plan]) -> Plan | None:
    """Return the fastest of several plans, with a log line, if all were measured before."""
    if len(plans) == 1 or not knows_trials(config):
        return None
    trials = [trial for plan in plans if (trial := kept_trial(plan))]
    best = fastest(plans, trials) if len(trials) == len(plans) else None
    if best is not None:
        _log.info(
            f"of {len(plans)} plans that were tried before, {describe_plan(best)} was the fastest "
            "(parallel.cost=model forgets it)"
        )
    return best


def of_run(folder: Path, plans: Sequence[Plan]) -> Plan | None:
    """Return the plan that a run chose by trials, if it is one of `plans`.

    Args:
        folder: the run's folder, with its `plan.json`.
        plans: the plans that it could try now.
    """
    before = stored_plan(folder)
    if before is None or not before.tried:
        return None
    same = next((plan for plan in plans if same_way(plan, before)), None)
    return same and replace(same, tried=before.tried)


def shape_of(config: Config, pool: DevicePool | None, console: Console | None) -> ClusterShape:
    """Return the shape to plan for: of the devices here, or of the described cluster.

    Devices that were calibrated have their measured rates, unless nominal ones are asked for.

    Args:
        config: the settings.
        pool: the devices here; None for a described cluster.
        console: where it is shown that devices are measured of which no calibration is kept; None:
            they are not measured.
    """
    nominal = kind_of(config.cluster).shape(pool)
    if pool is None:
        return nominal
    if isinstance(config.parallel, Planned) and config.parallel.cost == "model":
        return nominal
    if not measures_first(config) or cached_calibration(nominal, "measured again") is not None:
        return calibrated(nominal)
    if console is not None:
        with (
            held_back(),
            status(console, "measuring the devices, which are new here", Phase.MEASURING),
        ):
            return calibrated(nominal, measure_first(nominal))
    if not is_nominal(nominal):  # else there is a warning that says more
        _log.info(
            "predictions rest on nominal rates: the first training here, or "
            f"{to_type(*LAUNCH, ('task', 'calibrate'))}, measures these devices"
        )
    return calibrated(nominal)
