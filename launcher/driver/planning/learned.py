"""What earlier trainings of a program here took: their part in its next plan, and the next's."""

from __future__ import annotations

import logging
from pathlib import Path

from launcher.base.files import DamagedError, read_json
from launcher.config.parallel import Planned
from launcher.config.schema import Config
from launcher.plan import ClusterShape, Plan
from launcher.plan.profile.outcomes import corrected, keep_outcome, kept_correction
from launcher.report.breakdown.accounting import Accounting
from launcher.trace.step import TracedStep

_LEAST_STEPS = 8  # of which some are steady

_log = logging.getLogger(__name__)


def as_learned(config: Config, shape: ClusterShape, step: TracedStep) -> ClusterShape:
    """Return the devices at the rates that this program was seen to reach on them; it is said.

    A run that goes on plans as it did when it began.
    """
    if not _by_rates(config):
        return shape
    before = _of_run(Path(config.run.dir) / config.run.id) if config.run.id else None
    if before is not None:
        return corrected(shape, before)
    fingerprints = dict.fromkeys((step.fingerprint, step.opened.fingerprint))
    correction = kept_correction(shape, fingerprints)
    if correction == 1.0:
        return shape
    _log.info(
        f"this program took {correction:.2f} times as long here before as these devices' rates "
        "say, and is planned so (parallel.cost=model forgets it)"
    )
    return corrected(shape, correction)


def _by_rates(config: Config) -> bool:
    return isinstance(config.parallel, Planned) and config.parallel.cost == "measured"


def _of_run(folder: Path) -> float | None:
    """Return the correction that a run's plan was made with; None if it has no plan yet."""
    try:
        plan = Plan.from_dict(read_json(folder / "plan.json"))
    except (OSError, DamagedError, ValueError):
        return None
    return ClusterShape(**plan.cluster).correction


def learn(config: Config, plan: Plan, accounting: Accounting, steps: int) -> None:
    """Keep how long a training's steps took, if enough were made and one was recorded.

    What rests on other rates than the devices' own, or on measured layers, is not kept.
    """
    ratio = outcome(accounting)
    if ratio is not None and steps >= _LEAST_STEPS and _by_rates(config):
        keep_outcome(plan, ratio)


def outcome(accounting: Accounting) -> float | None:
    """Return the ratio of measured to predicted seconds of a step, but for what is no compute.

    These are transfers, data and saves. The measured step is the median, whose parts are taken to
    be those of the recorded step.
    """
    step, median = accounting.measured_step_seconds, accounting.median_step_seconds
    if not (accounting.parts and step and median):
        return None
    outside = sum(accounting.part(name).measured_seconds for name in ("data", "saves"))
    own = step - outside
    share = 1 - accounting.part("transfers").measured_seconds / own if own > 0 else 0.0
    predicted = accounting.predicted_step_seconds - accounting.part("transfers").predicted_seconds
    measured = (median - accounting.part("data").measured_seconds) * share
    return measured / predicted if measured > 0 and predicted > 0 else None
