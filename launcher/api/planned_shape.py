"""The cluster that a function's plan is made for: at measured rates, or at nominal ones."""

from __future__ import annotations

from launcher.plan import ClusterShape
from launcher.plan.methods import AutoStageOption, Method, PipeshardParallel
from launcher.plan.options import stage_option_of
from launcher.plan.profile.calibration import calibrated, measure_first


def planned_shape(nominal: ClusterShape, method: Method | None, is_here: bool) -> ClusterShape:
    """Return a cluster at the rates to plan by.

    They are measured ones where a calibration is kept. A search that finds none of this machine's
    CPU devices measures them first. GPUs are held by the processes that are up, and are measured by
    `task=calibrate`.

    Args:
        nominal: the cluster, at nominal rates.
        method: what plans; a search with the cost "model" rests on nominal rates.
        is_here: whether the devices are this machine's.

    Raises:
        PlanError: the method's stage option is not known.
    """
    cost = _cost(method)
    if cost == "model":
        return nominal
    measures = cost is not None and is_here and nominal.device_kind == "cpu"
    return calibrated(nominal, measure_first(nominal) if measures else None)


def _cost(method: Method | None) -> str | None:
    """Return what a method's search rests on (`AutoStageOption.cost`); None if it has none."""
    if not isinstance(method, PipeshardParallel):
        return None
    option = stage_option_of(method.stage_option)
    return option.cost if isinstance(option, AutoStageOption) else None
