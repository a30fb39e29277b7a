"""The shape of the cluster that a run plans for: this machine's, or the described one's."""

from __future__ import annotations

import logging

from rich.console import Console

from launcher.base import held_back
from launcher.cluster.devices import DevicePool
from launcher.cluster.kinds import kind_of
from launcher.config.parallel import Planned
from launcher.config.schema import Config
from launcher.driver.planning.check import measures_first
from launcher.hardware import is_nominal
from launcher.plan import ClusterShape
from launcher.plan.profile.calibration import cached_calibration, calibrated, measure_first
from launcher.report.console import Phase, status

_log = logging.getLogger(__name__)


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
            "predictions rest on nominal rates: the first training here, or python -m launcher "
            "task=calibrate, measures these devices"
        )
    return calibrated(nominal)
