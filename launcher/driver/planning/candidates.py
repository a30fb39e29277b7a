"""Plans that a training tries before it takes one, and the trials of earlier runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.base import DamagedError, read_json
from launcher.cluster.devices import DevicePool
from launcher.config.parallel import Auto
from launcher.config.schema import Config
from launcher.plan import Plan, PlanError, describe_plan
from launcher.plan.profile.trials import fastest, kept_trial, same_way

_PLANS = 3
_PAYS = 1800.0  # seconds of training from which on trying, some ten seconds a plan, costs little

_log = logging.getLogger(__name__)


def plans_to_try(config: Config, pool: DevicePool | None) -> Callable[[Plan], int]:
    """Return a function from the best plan to how many plans to try; 1: none is tried.

    It is `parallel.try` or, if that is null, a few where the training is long enough to pay for
    them, or where earlier trials decide.
    """
    parallel = config.parallel
    if pool is None or not isinstance(parallel, Auto):
        return lambda best: 1
    if parallel.try_ is not None:
        number = max(parallel.try_, 1)
        return lambda best: number
    if parallel.cost == "model":
        return lambda best: 1

    def count(best: Plan) -> int:
        is_long = best.predicted_step_seconds * config.train.steps >= _PAYS
        return _PLANS if is_long or kept_trial(best) else 1

    return count


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
    try:
        before = Plan.from_dict(read_json(folder / "plan.json"))
    except (OSError, DamagedError, PlanError):
        return None
    same = [plan for plan in plans if before.tried and same_way(plan, before)]
    return replace(same[0], tried=before.tried) if same else None
