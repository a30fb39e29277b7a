"""Measures the devices that are here before the first plan for them, where nothing is kept."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from launcher.base import make_private
from launcher.hardware import ClusterShape
from launcher.partition import PlanError
from launcher.plan.profile.calibration import Calibration, calibration_file, kept, measure

_AGAIN = "measured again"
_PATIENCE = 120.0  # seconds that another process may take to measure

_log = logging.getLogger(__name__)


def measure_first(shape: ClusterShape) -> Calibration | None:
    """Measure devices of which no calibration is kept, in some seconds, and keep and say it.

    Of several processes that find none at once, one measures and the others wait: they would
    disturb one another.

    Args:
        shape: the devices, at nominal rates.

    Returns:
        The calibration; None if one is kept, or if the devices could not be measured, which is
            warned of.
    """
    if kept(shape, _AGAIN) is not None:
        return None
    with _alone(calibration_file(shape)):
        return None if kept(shape, _AGAIN) is not None else _measured_now(shape)


@functools.cache  # where it cannot be kept, it is measured once a process
def _measured_now(shape: ClusterShape) -> Calibration | None:
    began = time.monotonic()
    try:
        calibration, path = measure(shape, quick=True)
    except PlanError as error:
        _log.warning(f"{error}; predictions rest on nominal rates")
        return None
    kind = "emulated CPU device" if shape.device_kind == "cpu" else shape.device_kind
    count = f"{shape.num_devices} {kind}{'s' if shape.num_devices > 1 else ''}"
    where = f"kept for later plans: {path}" if path else "for this plan alone"
    _log.info(
        f"measured the rates of {count} in {time.monotonic() - began:.1f} s, {where} "
        "(parallel.cost=model plans without)"
    )
    return calibration


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of a measurement, as far as its folder can be written."""
    with ExitStack() as stack:
        with suppress(OSError):  # then nothing is kept there, either
            make_private(path.parent)
            stack.enter_context(FileLock(path.with_suffix(".lock"), timeout=_PATIENCE))
        yield
