"""Measuring a step's layers: each distinct one, on each size of the model axis, once.

Every candidate is compiled and timed in a process of its own (`stopwatch`); its failure or its
time-out costs that candidate. Used by `plan.methods` for `cost="profile"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.profile import cache, stopwatch
from launcher.plan.profile.measured import MeasuredLayers, Timing
from launcher.plan.profile.programs import LayerProgram, layer_program
from launcher.plan.stages import cut_stages
from launcher.trace.step import TracedStep

_TIME_OUT = 300.0  # seconds for a candidate, of which compiling takes most
_MEASURED = 3.0  # seconds that the calls of each of its programs may take together
_MORE_ROWS = 4  # the larger of the two sizes that are measured has so many times the rows


def _silent(text: str) -> None:
    del text


def measure_layers(
    step: TracedStep,
    cluster: ClusterShape,
    model_sizes: Sequence[int],
    num_micro_batches: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
    say: Callable[[str], None] = _silent,
    time_out: float = _TIME_OUT,
) -> MeasuredLayers:
    """Measure on this machine's devices, which `cluster` describes, what the cache does not hold.

    Args:
        num_micro_batches: about how many there will be: two sizes of slices around it are measured,
            and others follow in proportion. say: told in a line what is ignored or failed.
    """
    sizes = _slice_counts(step.batch_size, num_micro_batches, cluster.num_devices)
    losses = [step.loss(count) for count in sizes]
    cuts = [cut_stages(loss, [(i,) for i in range(loss.num_layers)]) for loss in losses]
    kinds: dict[str, int] = {}
    kind_of, wanted = [], []
    for layer, graphs in enumerate(zip(*cuts, strict=True)):
        programs = {
            m: [
                layer_program(step, graph, loss, cluster.num_devices // m, m, cluster)
                for graph, loss in zip(graphs, losses, strict=True)
            ]
            for m in model_sizes
        }
        key = programs[model_sizes[0]][0].key
        if key not in kinds:
            kinds[key] = len(kinds)
            wanted += [(kinds[key], layer, m, found) for m, found in programs.items()]
        kind_of.append(kinds[key])
    timings = {}
    rows = [step.batch_size // count for count in sizes]
    for done, (kind, layer, m, found) in enumerate(wanted):
        progress(done / len(wanted))
        timings[kind, m] = timing = _timing(found, rows, cluster, say, time_out)
        if timing.failure:
            say(f"layer {layer} on a model axis of {m} was not measured: {timing.failure}")
    return MeasuredLayers(tuple(kind_of), timings, step.batch_size)


def _slice_counts(batch_size: int, num_micro_batches: int | None, devices: int) -> list[int]:
    """The numbers of slices to measure for: many slices of few rows, and fewer of more. Powers of
    `_MORE_ROWS` where the batch divides so, that plans with other microbatches share programs."""
    most = min((num_micro_batches or devices) * devices, batch_size)
    divisors = [n for n in range(1, most + 1) if batch_size % n == 0]
    powers = [n for n in divisors if n in {_MORE_ROWS**k for k in range(most.bit_length())}]
    if len(powers) > 1:
        return powers[:-3:-1]
    few = max((n for n in divisors if n * _MORE_ROWS <= divisors[-1]), default=divisors[0])
    return [divisors[-1]] if few == divisors[-1] else [divisors[-1], few]


def _timing(
    programs: Sequence[LayerProgram],
    rows: Sequence[int],
    cluster: ClusterShape,
    say: Callable[[str], None],
    time_out: float,
) -> Timing:
    """From the cache, or measured and kept there."""
    kind = "".join(c if c.isalnum() else "_" for c in cluster.device_kind)
    name = f"{kind}-{cluster.num_devices}-{'-'.join(p.key for p in programs)}.json"
    path = cache.cache_folder() / "profile" / name
    known = cache.read(path, ("points", "failure"), say)
    if known is not None:
        return Timing(tuple((int(n), float(f), float(b)) for n, f, b in known["points"]))
    try:
        timing = _measured(programs, rows, cluster, time_out)
    except (subprocess.SubprocessError, OSError, ValueError, NotImplementedError) as error:
        return Timing(failure=_reason(error, time_out))  # may go better next time: not kept
    cache.write(path, {"points": timing.points, "failure": ""}, say)
    return timing


def _measured(
    programs: Sequence[LayerProgram], rows: Sequence[int], cluster: ClusterShape, time_out: float
) -> Timing:
    platform = "cpu" if cluster.device_kind == "cpu" else "cuda"
    with tempfile.TemporaryDirectory(prefix="launcher-profile-") as folder:
        files, counts = [], []
        for k, layer in enumerate(programs):
            exported = layer.exported(platform)
            counts.append(len(exported))
            for n, data in enumerate(exported):
                files.append(Path(folder) / f"{k}.{n}.stablehlo")
                files[-1].write_bytes(data)
        request = {
            "platform": platform,
            "devices": cluster.num_devices,
            "model": programs[0].model,
            "programs": list(map(str, files)),
            "seconds": _MEASURED,
        }
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, str(stopwatch.__file__), str(path)],
            capture_output=True,
            text=True,
            timeout=time_out,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    points, at = [], 0
    for count, n in zip(counts, rows, strict=True):
        forward, backward = seconds[at], seconds[at + 1] if count > 1 else 0.0
        points.append((n, forward, backward))
        at += count
    return Timing(tuple(points))


def _reason(error: Exception, time_out: float) -> str:
    """Why a candidate has no timing, in a line."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {time_out:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        if error.returncode < 0:
            return f"its process was ended by signal {-error.returncode}"
        return lines[-1].strip()[:300] if lines else f"exit code {error.returncode}"
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
