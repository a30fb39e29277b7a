"""Measuring a step's layers: each distinct one, on each size of the model axis, once.

Every candidate is compiled and timed in a process of its own (`measure_programs`); a failure or a
time-out costs that candidate only.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base import measurements, parent_death
from launcher.hardware import ClusterShape
from launcher.partition import StageGraph, cut_stages
from launcher.plan.profile import measure_programs
from launcher.plan.profile.layer_programs import LayerProgram, layer_program
from launcher.plan.profile.measured_layers import MeasuredLayers, Timing
from launcher.trace import Loss, TracedStep

_TIME_OUT = 300.0  # seconds for a candidate, of which compiling takes most
_MEASURED = 3.0  # seconds that the calls of each of its programs may take together
_MORE_ROWS = 4  # ratio of rows between the two measured sizes

_log = logging.getLogger(__name__)


def measure_layers(
    step: TracedStep,
    cluster: ClusterShape,
    model_sizes: Sequence[int],
    num_micro_batches: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
    time_out: float = _TIME_OUT,
) -> MeasuredLayers:
    """Measure what the cache does not hold, on this machine's devices, which `cluster` describes.

    Measurements that are ignored or fail are logged as warnings.

    Args:
        step: the traced step, cut into layers.
        cluster: the shape of this machine.
        model_sizes: sizes of the model axis.
        num_micro_batches: about how many there will be: two sizes of slices around it are measured,
            and others follow in proportion.
        progress: called with the share that is done, 0 … 1.
        time_out: seconds for a candidate.
    """
    sizes = _slice_counts(step.batch_size, num_micro_batches, cluster.num_devices)
    losses = [step.loss(count) for count in sizes]
    cuts = [cut_stages(loss, [(i,) for i in range(loss.num_layers)]) for loss in losses]
    rows = [step.batch_size // count for count in sizes]
    kinds: dict[str, int] = {}
    kind_of, wanted = [], []
    for layer, graphs in enumerate(zip(*cuts, strict=True)):
        found = [_candidate(step, graphs, losses, rows, m, cluster) for m in model_sizes]
        if cluster.effective_parallelism and model_sizes[0] < cluster.num_devices:
            found[0] = _with_alone(found[0])
        key = found[0].programs[0].key
        if key not in kinds:
            kinds[key] = len(kinds)
            wanted += [(kinds[key], layer, candidate) for candidate in found]
        kind_of.append(kinds[key])
    timings = {}
    for done, (kind, layer, candidate) in enumerate(wanted):
        progress(done / len(wanted))
        m = candidate.programs[0].model
        timings[kind, m] = timing = _timing(candidate, cluster, time_out)
        if timing.failure:
            _log.warning(f"layer {layer} on a model axis of {m} was not measured: {timing.failure}")
    return MeasuredLayers(tuple(kind_of), timings, step.batch_size)


@dataclass(frozen=True)
class _Candidate:
    """A layer on one size of the model axis.

    It has a program for each number of rows and, where it is wanted (`alone`), that of the most
    rows for one mesh alone.
    """

    rows: tuple[int, ...]
    programs: tuple[LayerProgram, ...]
    alone: bool = False


def _candidate(
    step: TracedStep,
    graphs: Sequence[StageGraph],
    losses: Sequence[Loss],
    rows: Sequence[int],
    model: int,
    cluster: ClusterShape,
) -> _Candidate:
    programs = [
        layer_program(step, graph, loss, cluster.num_devices // model, model, cluster)
        for graph, loss in zip(graphs, losses, strict=True)
    ]
    return _Candidate(tuple(rows), tuple(programs))


def _with_alone(candidate: _Candidate) -> _Candidate:
    one = dataclasses.replace(candidate.programs[-1], copies=1)
    return _Candidate(candidate.rows, (*candidate.programs, one), alone=True)


def _slice_counts(batch_size: int, num_micro_batches: int | None, devices: int) -> list[int]:
    """Return the numbers of slices to measure: many slices of few rows, and fewer slices of more.

    They are powers of `_MORE_ROWS` if the batch divides so, so that plans with other numbers of
    microbatches share programs.
    """
    most = min(max(num_micro_batches or 1, devices) * devices, batch_size)
    divisors = [n for n in range(1, most + 1) if batch_size % n == 0]
    powers = [n for n in divisors if n in {_MORE_ROWS**k for k in range(most.bit_length())}]
    if len(powers) > 1:
        return powers[:-3:-1]
    few = max((n for n in divisors if n * _MORE_ROWS <= divisors[-1]), default=divisors[0])
    return [divisors[-1]] if few == divisors[-1] else [divisors[-1], few]


def _timing(candidate: _Candidate, cluster: ClusterShape, time_out: float) -> Timing:
    """Return a timing from the cache, or measure it and keep it there."""
    keys = "-".join(program.key for program in candidate.programs)
    path = measurements.cache_file("profile", cluster.device_kind, cluster.num_devices, f"-{keys}")
    known = measurements.read_cached(path, _kept)
    if known is not None:
        return known
    try:
        timing = _measured(candidate, cluster, time_out)
    except (subprocess.SubprocessError, OSError, ValueError, NotImplementedError) as error:
        return Timing(failure=_reason(error, time_out))  # may go better next time: not kept
    kept = {
        "points": timing.points,
        "dispatch_overhead": timing.dispatch_overhead,
        "alone": timing.alone,
    }
    measurements.write(path, kept)
    return timing


def _kept(tree: dict[str, Any]) -> Timing:
    """Return the timing in a cache file, which may hold anything."""
    points = tuple(
        (
            int(measurements.finite_number(rows, 1)),
            measurements.positive(forward),
            measurements.finite_number(backward),
        )
        for rows, forward, backward in tree["points"]
    )
    rows = [point[0] for point in points]
    if not rows or rows != sorted(set(rows)):
        raise ValueError(f"points are of {rows} rows")
    alone = tree["alone"]
    return Timing(
        points,
        measurements.finite_number(tree["dispatch_overhead"]),
        None if alone is None else measurements.finite_number(alone),
    )


def _measured(candidate: _Candidate, cluster: ClusterShape, time_out: float) -> Timing:
    platform = "cpu" if cluster.device_kind == "cpu" else "cuda"
    with tempfile.TemporaryDirectory(prefix="launcher-profile-") as folder:
        files, counts = [], []
        for k, layer in enumerate(candidate.programs):
            exported = layer.exported(platform)
            counts.append(len(exported))
            for n, one in enumerate(exported):
                path = Path(folder) / f"{k}.{n}.stablehlo"
                path.write_bytes(one.data)
                files.append((str(path), one.sums))
        request = {
            "platform": platform,
            "devices": cluster.num_devices,
            "model": candidate.programs[0].model,
            "programs": files,
            "seconds": _MEASURED,
        }
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, str(parent_death.__file__), str(measure_programs.__file__), str(path)],
            capture_output=True,
            text=True,
            timeout=time_out,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    seconds, passes, at = found["seconds"], [], 0
    for count in counts:
        passes.append((seconds[at], seconds[at + 1] if count > 1 else 0.0))
        at += count
    alone = sum(passes.pop()) if candidate.alone else None
    points = [(n, *both) for n, both in zip(candidate.rows, passes, strict=True)]
    return Timing(tuple(points), found["dispatch_overhead"], alone)


def _reason(error: Exception, time_out: float) -> str:
    """Return why a candidate has no timing, in one line."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {time_out:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        if error.returncode < 0:
            return f"its process was ended by signal {-error.returncode}"
        return lines[-1].strip()[:300] if lines else f"exit code {error.returncode}"
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
