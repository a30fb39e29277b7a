"""Measured steps of whole plans, kept on disk for the next plan of the same program."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.base import measurements
from launcher.plan.plan import Plan, Trial
from launcher.plan.stage_plan import describe_plan


def trial_of(plan: Plan, seconds: float | None, failure: str = "") -> Trial:
    """Return the record of a plan that was tried, by its measured step or why it failed."""
    return Trial(describe_plan(plan), plan.predicted_step_seconds, seconds, failure)


def keep_trial(plan: Plan, trial: Trial) -> None:
    """Keep what came of trying a plan; a full disk is warned of."""
    kept = {"seconds": trial.measured_step_seconds, "failure": trial.failure}
    measurements.write(_file(plan), {"plan": trial.plan, **kept})


def kept_trial(plan: Plan) -> Trial | None:
    """Return what came of trying a plan on such devices before; None if that is not known."""

    def made(tree: dict[str, Any]) -> Trial:
        seconds = tree["seconds"]
        return trial_of(
            plan, None if seconds is None else measurements.positive(seconds), str(tree["failure"])
        )

    return measurements.read_cached(_file(plan), made, "tried again")


def fastest(plans: Sequence[Plan], trials: Sequence[Trial]) -> Plan | None:
    """Return the plan with the shortest measured step, with all trials; None if each failed."""
    measured = [
        (trial.measured_step_seconds, k)
        for k, trial in enumerate(trials)
        if trial.measured_step_seconds is not None
    ]
    if not measured:
        return None
    return dataclasses.replace(plans[min(measured)[1]], tried=tuple(trials))


def same_way(one: Plan, other: Plan) -> bool:
    """Return whether two plans run the same program in the same way, whatever is predicted."""
    return _way(one) == _way(other)


def _file(plan: Plan) -> Path:
    about = plan.cluster
    count = about["hosts"] * about["devices_per_host"]
    digest = hashlib.sha256(_way(plan).encode()).hexdigest()[:32]
    return measurements.cache_file(
        "trials", about["device_kind"], count, f"-{about['hosts']}-{digest}"
    )


def _way(plan: Plan) -> str:
    """Return what decides how a program is run, and which program."""
    parts = [
        {
            "fingerprint": part.fingerprint,
            "layer_ends": part.layer_ends,
            "schedule": part.schedule,
            "num_micro_batches": part.num_micro_batches,
            "reduction": dataclasses.asdict(part.reduction),
            "stages": [
                (s.layers, s.devices, s.logical_mesh, s.remat, s.shardings) for s in part.stages
            ],
        }
        for part in plan.parts
    ]
    return json.dumps(parts, sort_keys=True)
