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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock
from scipy.optimize import nnls

from launcher.base import (
    KEPT,
    LAUNCH,
    make_private,
    measurements,
    process_setup,
    to_type,
    warn_once,
)
from launcher.hardware import ClusterShape, gpu_memory_variables, is_nominal, with_measured
from launcher.partition import PlanError
from launcher.plan.cost import formulas
from launcher.plan.profile import measure_devices
from launcher.trace import (
    PRODUCTS,
    Equation,
    backward_share,
    described_cudnn,
    flops,
    inline_calls,
    is_fused_attention,
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
# What the seconds are of that rates are deduced from, and the products of a network's layer.
_PROGRAMS = "block", "element", "attention", "layer"
_A_LAYER = 2

_log = logging.getLogger(__name__)


class TimedCollective(NamedTuple):
    """A collective that was timed.

    Attributes:
        kind: of `measure_devices.COLLECTIVES`.
        devices: number of devices in a ring of them.
        rings: number of rings that share a link.
        size: bytes of the array on a device where it is whole.
        seconds: what it took.
    """

    kind: str
    devices: int
    rings: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """Measured rates of each device while all are at work.

    Attributes:
        product_flops: FLOP/s by dtype and by the size of the square matrices.
        memory_bandwidth: bytes/s.
        effective_parallelism: see `ClusterShape`; None if it is not known: that of the shape.
        product_parallelism: the same.
        dispatch_overhead: see `ClusterShape`.
        collectives: those inside a host; empty for one device.
        memory_bytes: memory that a worker's programs can have; None where it is shared.
        overrun: how many times as long as at these rates a transformer's block takes, as models
            compute more slowly than one large product or one copy; 1 where that is not measured.
        attention_flops: see `ClusterShape`.
        launch_seconds: see `ClusterShape`.
    """

    product_flops: dict[str, dict[str, float]]
    memory_bandwidth: float
    effective_parallelism: float | None
    product_parallelism: float | None
    dispatch_overhead: float
    collectives: tuple[TimedCollective, ...]
    memory_bytes: int | None
    overrun: float = 1.0
    attention_flops: float | None = None
    launch_seconds: float = 0.0

    def applied(self, shape: ClusterShape) -> ClusterShape:
        """Return the shape with these figures; a host's own link stays what it was.

        Where other work on the machine hid some, and where there is nothing to measure, they stay
        what they were, too.
        """
        flops, flops_fp32 = (
            _product_rate(self.product_flops[dtype], shape) / self.overrun
            for dtype in ("bfloat16", "float32")
        )
        return with_measured(
            shape,
            flops=flops,
            flops_fp32=flops_fp32,
            memory_bandwidth=self.memory_bandwidth / self.overrun,
            attention_flops=self.attention_flops,
            launch_seconds=self.launch_seconds,
            memory_bytes=self.memory_bytes,
            effective_parallelism=self.effective_parallelism,
            product_parallelism=self.product_parallelism,
            dispatch_overhead=self.dispatch_overhead,
            **_ring_rates(self.collectives, shape, "intra_host"),
        )


@dataclass(frozen=True)
class HostLinks:
    """Measured collectives between several hosts, whose processes are those of a run."""

    what: ClassVar[str] = "links"
    collectives: tuple[TimedCollective, ...]

    @classmethod
    def from_cache(cls, tree: dict[str, Any]) -> HostLinks:
        """Return the links in a cache file, which may hold anything; see `_calibration_in`."""
        return cls(_collectives(tree["collectives"]))

    def applied(self, shape: ClusterShape) -> ClusterShape:
        """Return the shape with the hosts' links.

        The latency inside a host stays what it is; with one device a host there is no other.
        """
        found = _ring_rates(self.collectives, shape, "inter_host")
        if shape.devices_per_host > 1:
            found = {name: value for name, value in found.items() if name == "inter_host"}
        return with_measured(shape, **found)


def _ring_rates(
    timed: Sequence[TimedCollective], shape: ClusterShape, link: str
) -> dict[str, float]:
    """Return what a ring of devices has, by the fields of a shape.

    It is what explains the durations best by `formulas.all_reduce_seconds`, in shares of each:
    the latency, the bytes/s of all-reduces and those of gathers and scatters. There is nothing if
    noise hides what the bytes take.

    Args:
        timed: the collectives.
        shape: their devices.
        link: the field for the bytes/s.
    """
    if not timed:
        return {}
    at_once = dataclasses.replace(shape, latency=1.0)
    shares = []
    for kind, devices, rings, size, seconds in timed:
        whole = kind == "all-reduce"
        bytes_alone = formulas.all_reduce_seconds(size * rings, devices, 1.0, 0.0)
        parts = at_once.start_seconds(devices), whole * bytes_alone, (not whole) * bytes_alone
        shares.append([part / (seconds if whole else 2 * seconds) for part in parts])
    latency, summed, gathered = nnls(np.array(shares), np.ones(len(shares)))[0]
    if not summed:
        return {}
    found = {link: 1 / summed, "latency": max(latency, _LEAST_LATENCY)}
    return found | ({"gather_rate": summed / gathered} if gathered else {})


def _product_rate(rates: Mapping[str, float], shape: ClusterShape) -> float:
    """Return the FLOP/s by which the largest products take what they took; see `ClusterShape`."""
    size = max(map(int, rates))
    at_once = dataclasses.replace(shape, flops_fp32=1.0)
    work = 2.0 * size**3
    return rates[str(size)] * at_once.product_seconds(0.0, work, results=size**2) / work


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
        return with_measured(shape, **rates)


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
    products, memory, attention = (
        tree[name] for name in ("product_flops", "memory_bytes", "attention_flops")
    )
    return Calibration(
        product_flops={dtype: _by_size(products[dtype]) for dtype in ("bfloat16", "float32")},
        memory_bandwidth=measurements.positive(tree["memory_bandwidth"]),
        effective_parallelism=_parallelism(tree["effective_parallelism"]),
        product_parallelism=_parallelism(tree["product_parallelism"]),
        dispatch_overhead=measurements.finite_number(tree["dispatch_overhead"]),
        collectives=_collectives(tree["collectives"]),
        memory_bytes=None if memory is None else int(measurements.positive(memory)),
        overrun=measurements.positive(tree["overrun"]),
        attention_flops=None if attention is None else measurements.positive(attention),
        launch_seconds=measurements.finite_number(tree["launch_seconds"]),
    )


def _parallelism(value: Any) -> float | None:
    return None if value is None else measurements.finite_number(value, 1.0)


def _by_size(tree: dict[str, Any]) -> dict[str, float]:
    return {str(int(size)): measurements.positive(value) for size, value in tree.items()}


def _collectives(rows: Sequence[Sequence[Any]]) -> tuple[TimedCollective, ...]:
    positive = measurements.positive
    found = tuple(
        TimedCollective(
            str(kind), int(positive(n)), int(positive(rings)), int(positive(size)), positive(s)
        )
        for kind, n, rings, size, s in rows
    )
    if len({one.size for one in found}) == 1:
        raise ValueError("a latency and a rate take two sizes")
    return found


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
    found, path = _deduced(tree, shape), calibration_file(shape)
    about = {"device_kind": shape.device_kind, "devices": shape.num_devices}
    is_kept = measurements.write(path, {**about, **vars(found)})
    return found, path if is_kept else None


def _deduced(tree: dict[str, Any], shape: ClusterShape) -> Calibration:
    """Return the calibration by which the measured programs take what they took."""
    block, elements, attention, layer = (tree.pop(f"{name}_seconds", None) for name in _PROGRAMS)
    if elements:
        of_a_byte = dataclasses.replace(shape, memory_bandwidth=1.0)
        tree["memory_bandwidth"] = element_seconds(of_a_byte) / elements
    if attention:
        of_one = dataclasses.replace(shape, attention_flops=1.0)
        tree["attention_flops"] = attention_seconds(of_one) / attention
    if layer:
        of_one = dataclasses.replace(shape, launch_seconds=1.0)
        tree["launch_seconds"] = layer / sum(formulas.launch_seconds(_A_LAYER, 0, of_one))
    found = Calibration(**tree | {"collectives": _collectives(tree["collectives"])})
    if block:
        by_rates = block_seconds(found.applied(shape))
        found = dataclasses.replace(found, overrun=block / by_rates)
    return found


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
    x, *of = (_like((1, *each), jnp.float32) for each in (given, *weights))
    return _seconds(shape, measure_devices.block, of, x)


def element_seconds(shape: ClusterShape) -> float:
    """Return the same of what is measured element by element."""
    *rows, width = measure_devices.ELEMENTS
    weights = _like((1, 2, *(1 for _ in rows), width), jnp.float32)
    x = _like((1, *rows, width), jnp.bfloat16)
    return _seconds(shape, measure_devices.elements, weights, x)


def attention_seconds(shape: ClusterShape) -> float:
    """Return the same of the fused attention that is measured."""
    x = _like(measure_devices.ATTENDED, jnp.bfloat16)
    with described_cudnn():
        both = make_jaxpr(functools.partial(measure_devices.attention, implementation="cudnn"), x)
    fused = filter(is_fused_attention, inline_calls(both).eqns)
    return sum(shape.attention_seconds(flops(eqn)) for eqn in fused)


_like = jax.ShapeDtypeStruct


def _seconds(shape: ClusterShape, fun: Callable[..., Any], *of: Any) -> float:
    """Return what a device takes for both passes of a program, by its rates."""

    def seconds(eqn: Equation) -> float:
        if eqn.primitive.name in PRODUCTS:
            return shape.product_seconds(0.0, flops(eqn))
        return shape.element_seconds(flops(eqn), moved_bytes(eqn))

    forward = inline_calls(make_jaxpr(fun, *of)).eqns
    return sum((1 + backward_share(eqn)) * seconds(eqn) for eqn in forward)


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
