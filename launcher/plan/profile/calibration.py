"""Measured rates of this machine's devices, in place of nominal ones.

`measure` measures them in a process of its own and keeps them in the cache by the devices' kind and
number; `calibrated` puts what is kept into a shape.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from launcher.base import measurements, parent_death, warn_once
from launcher.hardware import ClusterShape, gpu_memory_variables, is_nominal
from launcher.partition import PlanError
from launcher.plan.profile import measure_devices
from launcher.trace import (
    PRODUCTS,
    Equation,
    backward_share,
    flops,
    inline_calls,
    make_jaxpr,
    moved_bytes,
)

_TIME_OUT = 600.0  # seconds
_QUICK_TIME_OUT = 120.0  # seconds; a GPU takes long to start
_BY_TASK = "python -m launcher task=calibrate measures again"
_LEAST_LATENCY = 1e-6
_SIZES = 2  # of the sums that show a link's latency and its rate

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """Measured rates of each device while all are at work.

    Attributes:
        product_flops: FLOP/s by dtype and by the size of the square matrices.
        memory_bandwidth: bytes/s.
        effective_parallelism: see `ClusterShape`; None if it is not known: that of the shape.
        product_parallelism: the same.
        dispatch_overhead: see `ClusterShape`.
        all_reduce_seconds: seconds by bytes, over all devices; empty for one device.
        memory_bytes: memory that a worker's programs can have; None where it is shared.
        overrun: how many times as long as at these rates a transformer's block takes, as models
            compute more slowly than one large product or one copy; 1 where that is not measured.
    """

    product_flops: dict[str, dict[str, float]]
    memory_bandwidth: float
    effective_parallelism: float | None
    product_parallelism: float | None
    dispatch_overhead: float
    all_reduce_seconds: dict[str, float]
    memory_bytes: int | None
    overrun: float = 1.0

    def applied(self, shape: ClusterShape) -> ClusterShape:
        """Return the shape with these figures; a host's own link stays what it was."""
        latency, link = self._link(shape)
        return dataclasses.replace(
            shape,
            flops=_largest(self.product_flops["bfloat16"]) / self.overrun,
            flops_fp32=_largest(self.product_flops["float32"]) / self.overrun,
            memory_bandwidth=self.memory_bandwidth / self.overrun,
            memory_bytes=self.memory_bytes or shape.memory_bytes,
            intra_host=link,
            latency=latency,
            # Where other work on the machine hid them, the nominal ones.
            effective_parallelism=self.effective_parallelism or shape.effective_parallelism,
            product_parallelism=self.product_parallelism or shape.product_parallelism,
            dispatch_overhead=self.dispatch_overhead or shape.dispatch_overhead,
        )

    def _link(self, shape: ClusterShape) -> tuple[float, float]:
        """Return the latency and the bytes/s of a ring inside a host."""
        found = _ring_rates(self.all_reduce_seconds, shape.num_devices)
        return found or (shape.latency, shape.intra_host)


@dataclass(frozen=True)
class HostLinks:
    """Measured sums over all devices of several hosts, whose processes are those of a run.

    Attributes:
        all_reduce_seconds: seconds by bytes.
    """

    all_reduce_seconds: dict[str, float]

    def applied(self, shape: ClusterShape) -> ClusterShape:
        """Return the shape with the hosts' links.

        The latency inside a host stays what it is; with one device a host there is no other.
        """
        found = _ring_rates(self.all_reduce_seconds, shape.num_devices)
        if found is None:
            return shape
        latency = found[0] if shape.devices_per_host == 1 else shape.latency
        return dataclasses.replace(shape, inter_host=found[1], latency=latency)


def _ring_rates(seconds: Mapping[str, float], count: int) -> tuple[float, float] | None:
    """Return the latency and the bytes/s of a ring of `count` devices.

    They are those of the line through a short and a long all-reduce; None if there were none, or
    if noise hides what the bytes take.
    """
    if not seconds:
        return None
    steps = 2 * (count - 1)
    (few, short), (many, long) = sorted((int(n), s) for n, s in seconds.items())
    per_byte = (long - short) / (many - few)
    if per_byte <= 0:
        return None
    latency = max((short - few * per_byte) / steps, _LEAST_LATENCY)
    return latency, steps / count / per_byte


@dataclass(frozen=True)
class StoreRates:
    """Measured rates of an object store, as parameter servers use it; see `ClusterShape`."""

    latency: float
    put: float
    add: float
    get: float

    def applied(self, shape: ClusterShape) -> ClusterShape:
        """Return the shape with these figures."""
        rates = {f"store_{name}": value for name, value in dataclasses.asdict(self).items()}
        return dataclasses.replace(shape, **rates)


def keep_store_rates(shape: ClusterShape, rates: StoreRates) -> Path | None:
    """Keep the rates that were measured with the workers of a shape, for `calibrated`.

    Returns:
        The file that keeps them; None, after a warning, if it could not be written.
    """
    return _keep(_hosts_file(shape, "store"), rates)


def keep_host_links(shape: ClusterShape, links: HostLinks) -> Path | None:
    """Keep what was measured with the workers of a shape, as `keep_store_rates` does."""
    return _keep(_hosts_file(shape, "links"), links)


def _keep(path: Path, measured: StoreRates | HostLinks) -> Path | None:
    return path if measurements.write(path, dataclasses.asdict(measured)) else None


def _hosts_file(shape: ClusterShape, what: str) -> Path:
    return calibration_file(shape, f"-{what}-{shape.hosts}")


def calibration_file(shape: ClusterShape, what: str = "") -> Path:
    """Return the file that keeps the calibration of such devices."""
    return measurements.cache_file("calibration", shape.device_kind, shape.num_devices, what)


def calibrated(shape: ClusterShape, measured: Calibration | None = None) -> ClusterShape:
    """Return the shape with what was measured on such devices, if it was.

    A process is warned once of a calibration that is ignored, and of devices whose rates are
    unknown.

    Args:
        shape: the shape with nominal rates.
        measured: the calibration, if it is not to be the one that is kept.
    """
    calibration = measured or kept(shape)
    found = calibration and calibration.applied(shape)
    if found is None and is_nominal(shape):
        warn_once(
            _log,
            f"the rates and the memory of {shape.device_kind} are not known: predictions are "
            "nominal, and memory is not bounded, until python -m launcher task=calibrate measures "
            "them there",
        )
    known = found or shape
    if shape.hosts == 1:
        return known
    store = measurements.read_cached(_hosts_file(shape, "store"), _kept_rates, _BY_TASK)
    links = measurements.read_cached(_hosts_file(shape, "links"), _kept_links, _BY_TASK)
    known = store.applied(known) if store else known
    return links.applied(known) if links else known


def kept(shape: ClusterShape, then: str = _BY_TASK) -> Calibration | None:
    """Return the calibration that is kept of such devices; None if there is none to use.

    Args:
        shape: the devices.
        then: what happens where there is one that cannot be used, for the warning.
    """

    def made(tree: dict[str, Any]) -> Calibration:
        calibration = _kept(tree)
        calibration.applied(shape)  # may show that it is damaged, too
        return calibration

    return measurements.read_cached(calibration_file(shape), made, then)


def _kept_rates(tree: dict[str, Any]) -> StoreRates:
    """Return the rates in a cache file; as `_kept`."""
    names = (field.name for field in dataclasses.fields(StoreRates))
    return StoreRates(**{name: measurements.positive(tree[name]) for name in names})


def _kept_links(tree: dict[str, Any]) -> HostLinks:
    """Return the links in a cache file; as `_kept`."""
    found = _by_size(tree["all_reduce_seconds"])
    if len(found) != _SIZES:
        raise ValueError(f"sums of {len(found)} sizes")
    return HostLinks(found)


def _kept(tree: dict[str, Any]) -> Calibration:
    """Return the calibration in a cache file.

    The file may hold anything; errors are those that `measurements.read_cached` expects.
    """
    products, memory = tree["product_flops"], tree["memory_bytes"]
    return Calibration(
        product_flops={dtype: _by_size(products[dtype]) for dtype in ("bfloat16", "float32")},
        memory_bandwidth=measurements.positive(tree["memory_bandwidth"]),
        effective_parallelism=_parallelism(tree["effective_parallelism"]),
        product_parallelism=_parallelism(tree["product_parallelism"]),
        dispatch_overhead=measurements.finite_number(tree["dispatch_overhead"]),
        all_reduce_seconds=_by_size(tree["all_reduce_seconds"]),
        memory_bytes=None if memory is None else int(measurements.positive(memory)),
        overrun=measurements.positive(tree["overrun"]),
    )


def _parallelism(value: Any) -> float | None:
    return None if value is None else measurements.finite_number(value, 1.0)


def _by_size(tree: dict[str, Any]) -> dict[str, float]:
    return {str(int(size)): measurements.positive(value) for size, value in tree.items()}


def measure(shape: ClusterShape, quick: bool = False) -> tuple[Calibration, Path | None]:
    """Measure the devices that `shape` describes.

    Args:
        shape: the devices, at nominal rates.
        quick: whether to take some seconds only, and so be less sure of the fastest ones.

    Returns:
        The figures, and the file that keeps them; None, after a warning, if it could not be
            written.

    Raises:
        PlanError: they cannot be measured; the message says why.
    """
    request = {
        "platform": "cpu" if shape.device_kind == "cpu" else "cuda",
        "devices": shape.num_devices,
        "quick": quick,
    }
    time_out = _QUICK_TIME_OUT if quick else _TIME_OUT
    with tempfile.TemporaryDirectory(prefix="launcher-calibrate-") as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    str(parent_death.__file__),
                    str(measure_devices.__file__),
                    str(path),
                ],
                capture_output=True,
                text=True,
                timeout=time_out,
                check=True,
                stdin=subprocess.DEVNULL,
                env=os.environ | gpu_memory_variables(os.environ),
            )
        except subprocess.TimeoutExpired as error:
            raise PlanError(f"the devices were not measured within {time_out:g} s") from error
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
            raise PlanError(f"the devices cannot be measured: {lines[-1]}") from error
    tree: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if seconds := tree.pop("block_seconds", None):
        tree["overrun"] = seconds / block_seconds(Calibration(**tree).applied(shape))
    about = {"device_kind": shape.device_kind, "devices": shape.num_devices}
    path = calibration_file(shape)
    found = Calibration(**tree)
    is_kept = measurements.write(path, {**about, **vars(found)})
    return found, path if is_kept else None


def block_seconds(shape: ClusterShape) -> float:
    """Return what a device takes for both passes of the block that is measured, by its rates."""
    given, weights = measure_devices.BLOCK
    x, *of = (jax.ShapeDtypeStruct((1, *each), jnp.float32) for each in (given, *weights))
    forward = inline_calls(make_jaxpr(measure_devices.block, of, x))

    def seconds(eqn: Equation) -> float:
        if eqn.primitive.name in PRODUCTS:
            return shape.product_seconds(0.0, flops(eqn))
        return shape.work_seconds(0.0, 0.0, flops(eqn), moved_bytes(eqn))

    return sum((1 + backward_share(eqn)) * seconds(eqn) for eqn in forward.eqns)


def _largest(rates: dict[str, float]) -> float:
    return float(rates[max(rates, key=int)])
