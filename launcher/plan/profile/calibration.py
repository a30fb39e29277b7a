"""Measured rates of this machine's devices, in place of nominal ones.

`measure` measures them in a process of its own and keeps them in the cache by the devices' kind and
number; `calibrated` puts what is kept into a shape.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from filelock import FileLock

from launcher.base import (
    KEPT,
    LAUNCH,
    make_private,
    measurements,
    process_setup,
    to_type,
    warn_once,
)
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

_AGAIN = "measured again"
_PATIENCE = 120.0  # seconds that another process may take to measure

_TIME_OUT = 600.0  # seconds
_QUICK_TIME_OUT = 120.0  # seconds; a GPU takes long to start
_CALIBRATE = to_type(*LAUNCH, ("task", "calibrate"))
_BY_TASK = f"{_CALIBRATE} measures again"
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
        rates = _ring_rates(self.all_reduce_seconds, shape)
        latency, link = rates or (shape.latency, shape.intra_host)
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


@dataclass(frozen=True)
class HostLinks:
    """Measured sums over all devices of several hosts, whose processes are those of a run.

    Attributes:
        all_reduce_seconds: seconds by bytes.
    """

    what: ClassVar[str] = "links"
    all_reduce_seconds: dict[str, float]

    @classmethod
    def from_cache(cls, tree: dict[str, Any]) -> HostLinks:
        """Return the links in a cache file, which may hold anything; see `_calibration_in`."""
        found = _by_size(tree["all_reduce_seconds"])
        if len(found) != _SIZES:
            raise ValueError(f"sums of {len(found)} sizes")
        return cls(found)

    def applied(self, shape: ClusterShape) -> ClusterShape:
        """Return the shape with the hosts' links.

        The latency inside a host stays what it is; with one device a host there is no other.
        """
        found = _ring_rates(self.all_reduce_seconds, shape)
        if found is None:
            return shape
        latency = found[0] if shape.devices_per_host == 1 else shape.latency
        return dataclasses.replace(shape, inter_host=found[1], latency=latency)


def _ring_rates(seconds: Mapping[str, float], shape: ClusterShape) -> tuple[float, float] | None:
    """Return the latency and the bytes/s of a ring of all devices of a shape.

    They are those of the line through a short and a long all-reduce; None if there were none, or
    if noise hides what the bytes take.
    """
    if not seconds:
        return None
    count = shape.num_devices
    waits = dataclasses.replace(shape, latency=1.0).start_seconds(count)
    (few, short), (many, long) = sorted((int(n), s) for n, s in seconds.items())
    per_byte = (long - short) / (many - few)
    if per_byte <= 0:
        return None
    latency = max(float((short - few * per_byte) / waits), _LEAST_LATENCY)
    return latency, 2 * (count - 1) / count / per_byte


@dataclass(frozen=True)
class StoreRates:
    """Measured rates of an object store, as parameter servers use it; see `ClusterShape`."""

    what: ClassVar[str] = "store"
    latency: float
    put: float
    add: float
    get: float

    @classmethod
    def from_cache(cls, tree: dict[str, Any]) -> StoreRates:
        """Return the rates in a cache file, which may hold anything; see `_calibration_in`."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: measurements.positive(tree[name]) for name in names})

    def applied(self, shape: ClusterShape) -> ClusterShape:
        """Return the shape with its nominal rates replaced by the measured ones."""
        rates = {f"store_{name}": value for name, value in dataclasses.asdict(self).items()}
        return dataclasses.replace(shape, **rates)


def keep_host_rates(shape: ClusterShape, measured: StoreRates | HostLinks) -> Path | None:
    """Store what was measured with the workers of a shape, for `calibrated`.

    Returns:
        The file; None, after a warning, if it could not be written.
    """
    path = _hosts_file(shape, type(measured))
    return path if measurements.write(path, dataclasses.asdict(measured)) else None


def _hosts_file(shape: ClusterShape, kind: type[StoreRates | HostLinks]) -> Path:
    return calibration_file(shape, f"-{kind.what}-{shape.hosts}")


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
    calibration = measured or cached_calibration(shape)
    known = calibration.applied(shape) if calibration else shape
    if not calibration and is_nominal(shape):
        warn_once(
            _log,
            f"the rates and the memory of {shape.device_kind} are not known: predictions are "
            f"nominal, and memory is not bounded, until {_CALIBRATE} measures them there",
        )
    kinds: tuple[type[StoreRates | HostLinks], ...] = StoreRates, HostLinks
    for kind in kinds if shape.hosts > 1 else ():
        made: Callable[[dict[str, Any]], StoreRates | HostLinks] = kind.from_cache
        if found := measurements.read_cached(_hosts_file(shape, kind), made, _BY_TASK):
            known = found.applied(known)
    return known


def cached_calibration(shape: ClusterShape, then: str = _BY_TASK) -> Calibration | None:
    """Return the stored calibration of such devices; None if there is none to use.

    Args:
        shape: the devices.
        then: what happens where there is one that cannot be used, for the warning.
    """

    def made(tree: dict[str, Any]) -> Calibration:
        calibration = _calibration_in(tree)
        calibration.applied(shape)  # may show that it is damaged, too
        return calibration

    return measurements.read_cached(calibration_file(shape), made, then)


def _calibration_in(tree: dict[str, Any]) -> Calibration:
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
        "platform": platform_of(shape),
        "devices": shape.num_devices,
        "quick": quick,
    }
    time_out = _QUICK_TIME_OUT if quick else _TIME_OUT
    try:
        tree = run_program(measure_devices, request, time_out)
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"the devices were not measured within {time_out:g} s") from error
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
        raise PlanError(f"the devices cannot be measured: {lines[-1]}") from error
    if seconds := tree.pop("block_seconds", None):
        tree["overrun"] = seconds / block_seconds(Calibration(**tree).applied(shape))
    about = {"device_kind": shape.device_kind, "devices": shape.num_devices}
    path = calibration_file(shape)
    found = Calibration(**tree)
    is_kept = measurements.write(path, {**about, **vars(found)})
    return found, path if is_kept else None


def platform_of(shape: ClusterShape) -> str:
    """Return the platform of a shape's devices, as JAX names it."""
    return "cpu" if shape.device_kind == "cpu" else "cuda"


def run_program(program: ModuleType, request: dict[str, Any], time_out: float) -> dict[str, Any]:
    """Run a program that measures, in a process of its own, and return what it prints.

    Raises:
        SubprocessError: it failed, or took more than `time_out` seconds.
    """
    kept = KEPT if request["platform"] == "cpu" else {}  # as the workers have it
    with tempfile.TemporaryDirectory(prefix="launcher-measure-") as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, str(process_setup.__file__), str(program.__file__), str(path)],
            capture_output=True,
            text=True,
            timeout=time_out,
            check=True,
            stdin=subprocess.DEVNULL,
            env=kept | os.environ | gpu_memory_variables(os.environ),
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def block_seconds(shape: ClusterShape) -> float:
    """Return what a device takes for both passes of the block that is measured, by its rates."""
    given, weights = measure_devices.BLOCK
    x, *of = (jax.ShapeDtypeStruct((1, *each), jnp.float32) for each in (given, *weights))
    forward = inline_calls(make_jaxpr(measure_devices.block, of, x))

    def seconds(eqn: Equation) -> float:
        if eqn.primitive.name in PRODUCTS:
            return shape.product_seconds(0.0, flops(eqn))
        return shape.element_seconds(flops(eqn), moved_bytes(eqn))

    return sum((1 + backward_share(eqn)) * seconds(eqn) for eqn in forward.eqns)


def _largest(rates: dict[str, float]) -> float:
    return float(rates[max(rates, key=int)])


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
    if cached_calibration(shape, _AGAIN):
        return None
    with _alone(calibration_file(shape)):
        return None if cached_calibration(shape, _AGAIN) else _measured_now(shape)


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
    if shape.device_kind == "cpu" and calibration.effective_parallelism is None:
        where += f"; other processes were at work, and hid some rates: {_BY_TASK}"
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
