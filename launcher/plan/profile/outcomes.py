"""How long a program took on this machine against its plan, kept for the next plan of it.

Of what an accounting knows, one figure is kept: how many times as long the devices took, beside
transfers, as at their own rates. It corrects the rates at which the next plan is predicted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.base import measurements
from launcher.hardware.cluster_shape import ClusterShape
from launcher.plan.plan import Plan

_MOST = 100.0  # more is no property of the devices


def keep_outcome(plan: Plan, ratio: float) -> bool:
    """Keep how long a program took; return whether it is kept.

    Args:
        plan: the plan that it ran by.
        ratio: of the measured to the predicted seconds of a step, beside transfers, data and saves.
    """
    shape = ClusterShape(**plan.cluster)
    correction = shape.correction * ratio
    if not (math.isfinite(correction) and 1 / _MOST <= correction <= _MOST):
        return False
    kept = {"correction": correction, "flops": _own_flops(shape)}
    return measurements.write(_file(shape, plan.fingerprint), kept)


def kept_correction(shape: ClusterShape, fingerprints: Iterable[str]) -> float:
    """Return how many times as long as at the devices' own rates a program took here; 1: unknown.

    Args:
        shape: the devices, uncorrected.
        fingerprints: those that the program has, as it is planned by one method or another.
    """

    def made(tree: dict[str, Any]) -> tuple[float, float]:
        correction = measurements.positive(tree["correction"])
        if not 1 / _MOST <= correction <= _MOST:
            raise ValueError(f"a correction of {correction}")
        return correction, measurements.positive(tree["flops"])

    for fingerprint in fingerprints:
        found = measurements.read_cached(_file(shape, fingerprint), made, "not used")
        if found and math.isclose(found[1], _own_flops(shape), rel_tol=1e-6):
            return found[0]  # else the devices were calibrated since
    return 1.0


def corrected(shape: ClusterShape, correction: float) -> ClusterShape:
    """Return devices at whose rates a program takes so many times as long as at their own."""
    more = correction / shape.correction
    return dataclasses.replace(
        shape,
        flops=shape.flops / more,
        flops_fp32=shape.flops_fp32 / more,
        memory_bandwidth=shape.memory_bandwidth / more,
        dispatch_overhead=shape.dispatch_overhead * more,
        correction=correction,
    )


def _own_flops(shape: ClusterShape) -> float:
    return shape.flops * shape.correction


def _file(shape: ClusterShape, fingerprint: str) -> Path:
    what = f"-{shape.hosts}-{fingerprint[:32]}"
    return measurements.cache_file("outcomes", shape.device_kind, shape.num_devices, what)
