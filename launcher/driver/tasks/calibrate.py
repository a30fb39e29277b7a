"""`task=calibrate`: measure the rates of this machine's devices and show them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from launcher.cluster.kinds import find_devices, pool_shape
from launcher.cluster.measure import measure_links, measure_servers
from launcher.config.schema import Config
from launcher.driver.tasks.task import TaskKind
from launcher.plan import ClusterShape
from launcher.plan.profile.calibration import HostLinks, StoreRates, keep_host_rates, measure
from launcher.report.console import RunConsole, status, table_of
from launcher.report.text import seconds_text

_log = logging.getLogger(__name__)


class Calibrate(TaskKind):
    """Measure the devices of the cluster, store the rates and show them."""

    name = "calibrate"

    def run(self, config: Config, console: RunConsole) -> int:
        """Measure the devices, store the result and show it.

        On several hosts it also measures sums over them, by collectives and by parameter servers.

        Returns:
            The exit code: 1 if the result could not be stored.

        Raises:
            ConfigError: the devices asked for are not here.
            PlanError: they cannot be measured.
            ClusterError: the workers that measure could not be started.
        """
        pool = find_devices(config.cluster)
        _log.info(pool.note)
        nominal = pool_shape(pool)
        with status(console, "measuring the devices under full load"):
            calibration, path = measure(nominal)
        shape = calibration.applied(nominal)
        if pool.hosts > 1:
            with status(console, "measuring sums over the hosts"):
                between = HostLinks.from_cache({"collectives": measure_links(pool)})
            path = keep_host_rates(nominal, between) and path
            with status(console, "measuring sums through a parameter server"):
                rates = StoreRates(*measure_servers(pool))
            path = keep_host_rates(nominal, rates) and path
            shape = rates.applied(between.applied(shape))
        names = ("of each device", "measured", "nominal")
        console.print(table_of(names, _rows(shape, nominal), names[:1]))
        if stated := shape.rates(measured=False):
            _log.info(f"not measured, and as stated: {', '.join(stated)}")
        if shape.effective_parallelism is not None and shape.num_devices > 1:
            count = shape.num_devices
            shares = shape.effective_parallelism, shape.product_parallelism
            times, products = (count / (share or shape.effective_parallelism) for share in shares)
            _log.info(
                f"one device alone is {times:.1f} times as fast as with all {count} at work, and "
                f"{products:.1f} times in matrix products"
            )
        if path is None:
            return 1
        _log.info(f"plans for this machine use it from now on: {path}")
        return 0


# What is shown: its name, the field of a shape, its unit; 0: seconds.
_FIGURES: Sequence[tuple[str, str, float, str]] = (
    ("16-bit products", "flops", 1e12, " TFLOP/s"),
    ("32-bit products", "flops_fp32", 1e12, " TFLOP/s"),
    ("fused attention", "attention_flops", 1e12, " TFLOP/s"),
    ("memory", "memory_bandwidth", 1e9, " GB/s"),
    ("link", "intra_host", 1e9, " GB/s"),
    ("link between hosts", "inter_host", 1e9, " GB/s"),
    ("gathers beside sums", "gather_rate", 1.0, ""),
    ("latency", "latency", 0.0, ""),
    ("start of a program", "dispatch_overhead", 0.0, ""),
    ("launch of a product", "launch_seconds", 0.0, ""),
    ("store's latency", "store_latency", 0.0, ""),
    ("a worker's puts", "store_put", 1e9, " GB/s"),
    ("a server's sums", "store_add", 1e9, " GB/s"),
    ("a worker's gets", "store_get", 1e9, " GB/s"),
)


def _rows(shape: ClusterShape, nominal: ClusterShape) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of the table, of what was measured."""
    measured = shape.measured.split(",")
    for name, field, unit, word in (one for one in _FIGURES if one[1] in measured):
        found, before = getattr(shape, field), getattr(nominal, field)
        if not unit:
            yield name, seconds_text(found), seconds_text(before)
        else:
            yield name, f"{found / unit:.3g}{word}", f"{before / unit:.3g}" if before else "-"
