"""Faults of machines: the interval of saves that loses the least time to them, and what is left.

The time to the next fault is taken to be exponential. J. Young, "A first order approximation to the
optimum checkpoint interval" (1974), and J. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps" (2006), of which this has the estimate (37) and the expected wall time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_HOST_HOURS = 238 * 24.0  # a fault per 238 days of a host, by a public trace of 400 GPU servers
_LEAST_SAVE = 0.01  # seconds: no measurement is taken to be less
_STATE_BYTES = 12  # of a parameter: fp32, with two moments
_BYTES_PER_SECOND = 1e9  # of a host that copies its part of the state
_MOST = 700.0  # exponent that a float holds


@dataclass(frozen=True)
class Faults:
    """How often a run fails, and the time that a save and a restart take.

    Attributes:
        between_seconds: the mean time between two faults.
        save_seconds: the time for which a save holds training up.
        restart_seconds: from a fault until training continues.
    """

    between_seconds: float = math.inf
    save_seconds: float = 1.0
    restart_seconds: float = 60.0

    @property
    def save_interval(self) -> float:
        """The seconds of training between two saves that lose the least time."""
        between, save = self.between_seconds, max(self.save_seconds, _LEAST_SAVE)
        if math.isinf(between) or save >= 2 * between:
            return between
        root = math.sqrt(save / (2 * between))
        return math.sqrt(2 * save * between) * (1 + root / 3 + root**2 / 9) - save

    def goodput(self, interval: float) -> float:
        """Return the expected share of the wall time that trains, 0 … 1.

        Args:
            interval: the seconds of training between two saves.
        """
        between = self.between_seconds
        if math.isinf(between):
            return interval / (interval + self.save_seconds)
        segment = math.expm1(min(_MOST, (interval + self.save_seconds) / between))
        return interval / (between * math.exp(min(_MOST, self.restart_seconds / between)) * segment)


NO_FAULTS = Faults()


def expected_faults(hours: float | None, hosts: int, parameters: int) -> Faults:
    """Return what is expected before a save is measured.

    Args:
        hours: the mean hours between two faults of the run; None: by the number of hosts.
        hosts: the number of hosts.
        parameters: the number of the model's parameters.
    """
    between = 3600 * (_HOST_HOURS / hosts if hours is None else hours)
    return Faults(between, _STATE_BYTES * parameters / hosts / _BYTES_PER_SECOND)
