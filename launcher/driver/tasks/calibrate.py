"""`task=calibrate`: measure the rates of this machine's devices and show them."""

from __future__ import annotations

import logging

from rich.console import Console

from launcher.cluster.kinds import find_devices, pool_shape
from launcher.cluster.measure import measure_links, measure_servers
from launcher.config.machines import Cluster
from launcher.plan import ClusterShape
from launcher.plan.profile.calibration import (
    HostLinks,
    StoreRates,
    keep_host_links,
    keep_store_rates,
    measure,
)
from launcher.report.console import plain_table, status
from launcher.report.text import seconds_text

_log = logging.getLogger(__name__)


def calibrate(cluster: Cluster, console: Console) -> int:
    """Measure the devices, store the result and show it.

    Of several hosts it also measures what sums over them cost, by collectives and through parameter
    servers.

    Returns:
        The exit code: 1 if the result could not be stored.

    Raises:
        ConfigError: the devices asked for are not here.
        PlanError: they cannot be measured.
        ClusterError: the workers that measure could not be started.
    """
    pool = find_devices(cluster)
    _log.info(pool.note)
    nominal = pool_shape(pool)
    with status(console, "measuring the devices under full load"):
        calibration, path = measure(nominal)
    shape = calibration.applied(nominal)
    if pool.hosts > 1:
        with status(console, "measuring sums over the hosts"):
            between = HostLinks(measure_links(pool))
        path = keep_host_links(nominal, between) and path
        shape = between.applied(shape)
    table = plain_table()
    for name in ("of each device", "measured", "nominal"):
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    rows = [
        ("16-bit products", f"{shape.flops / 1e12:.3g} TFLOP/s", f"{nominal.flops / 1e12:.3g}"),
        (
            "32-bit products",
            f"{shape.flops_fp32 / 1e12:.3g} TFLOP/s",
            f"{nominal.flops_fp32 / 1e12:.3g}",
        ),
        (
            "memory",
            f"{shape.memory_bandwidth / 1e9:.3g} GB/s",
            f"{nominal.memory_bandwidth / 1e9:.3g}",
        ),
        ("link", f"{shape.intra_host / 1e9:.3g} GB/s", f"{nominal.intra_host / 1e9:.3g}"),
        ("latency", seconds_text(shape.latency), seconds_text(nominal.latency)),
        (
            "start of a program",
            seconds_text(shape.dispatch_overhead),
            seconds_text(nominal.dispatch_overhead),
        ),
    ]
    if pool.hosts > 1:
        rates_of_hosts = f"{shape.inter_host / 1e9:.3g} GB/s", f"{nominal.inter_host / 1e9:.3g}"
        rows.insert(4, ("link between hosts", *rates_of_hosts))
        with status(console, "measuring sums through a parameter server"):
            rates = StoreRates(*measure_servers(pool))
        path = keep_store_rates(nominal, rates) and path
        rows += _store_rows(rates, nominal)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if shape.effective_parallelism is not None and shape.num_devices > 1:
        count, shares = shape.num_devices, (shape.effective_parallelism, shape.product_parallelism)
        times, products = (count / (share or shape.effective_parallelism) for share in shares)
        _log.info(
            f"one device alone is {times:.1f} times as fast as with all {count} at work, and "
            f"{products:.1f} times in matrix products"
        )
    if path is None:
        return 1
    _log.info(f"plans for this machine use it from now on: {path}")
    return 0


def _store_rows(rates: StoreRates, nominal: ClusterShape) -> list[tuple[str, str, str]]:
    """Return the lines of the table about parameter servers."""
    speeds = (("put", "a worker's puts"), ("add", "a server's sums"), ("get", "a worker's gets"))
    return [
        ("store's latency", seconds_text(rates.latency), seconds_text(nominal.store_latency)),
        *(
            (
                words,
                f"{getattr(rates, name) / 1e9:.3g} GB/s",
                f"{getattr(nominal, f'store_{name}') / 1e9:.3g}",
            )
            for name, words in speeds
        ),
    ]
