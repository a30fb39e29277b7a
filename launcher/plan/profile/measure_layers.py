"""Measuring a step's layers: each distinct one, on each size of the model axis, once.

Every candidate is compiled and timed in a process of its own (`measure_programs`); a failure or a
time-out costs that candidate only. Programs are the task programs that the runtime runs, each over
a microbatch of which every copy has rows of its own, as replicas have. They are traced for an
abstract mesh, `copies` × `model`, so that one program keeps every device at work; and exported as
StableHLO, which is data.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from launcher.base import first_line, measurements
from launcher.hardware import ClusterShape
from launcher.partition import (
    MODEL,
    Name,
    PlanError,
    Sharding,
    Spec,
    StageGraph,
    StagePrograms,
    TaskProgram,
    accumulator_dtype,
    cut_stages,
    inside_of,
    trace_stage,
)
from launcher.plan.intra_op import model_sharding
from launcher.plan.plan import ProfiledLayers
from launcher.plan.profile import measure_programs
from launcher.plan.profile.calibration import platform_of, run_program
from launcher.schedule import Kind
from launcher.trace import Jaxpr, Loss, TracedStep, structure_text

_NEVER = 1e9  # seconds of what could not be measured: finite, so that sums and differences are
COPIES = "copies"
_TIME_OUT = 300.0  # seconds for a candidate, of which compiling takes most
_MEASURED = 3.0  # seconds that the calls of each of its programs may take together
_MORE_ROWS = 4  # ratio of rows between the two measured sizes
_log = logging.getLogger(__name__)


class UnmeasuredError(PlanError):
    """A plan needs the seconds of layers that could not be measured."""


@dataclass(frozen=True)
class Timing:
    """Measured seconds of one layer on one mesh.

    Attributes:
        points: with all devices at work, `(rows of a slice, forward, backward)`, by rows.
        dispatch_overhead: seconds that a program takes beside its work: its start, and the wait for
            the last of its devices. A stage has it once.
        alone: both passes of the most rows on one mesh while the other devices are idle; None where
            that was not measured.
        failure: why it could not be measured.
    """

    points: tuple[tuple[int, float, float], ...] = ()
    dispatch_overhead: float = 0.0
    alone: float | None = None
    failure: str = ""

    def at(self, rows: float) -> tuple[float, float]:
        """Return the forward and backward seconds for `rows` rows.

        They are on the line through the points.
        """
        if self.failure:
            return _NEVER, _NEVER
        if len(self.points) == 1:
            only, *seconds = self.points[0]
            return seconds[0] * rows / only, seconds[1] * rows / only
        (few, *low), (many, *high) = self.points[0], self.points[-1]
        share = (rows - few) / (many - few)
        # A line through noise must not fall below what is in proportion.
        least = min(1.0, rows / few)
        forward, backward = (
            max(a + (b - a) * share, least * min(a, b)) for a, b in zip(low, high, strict=True)
        )
        return forward, backward


@dataclass(frozen=True)
class MeasuredLayers:
    """The timings of a step's layers.

    Attributes:
        kind_of: for every layer the number of its distinct program.
        timings: timings by that number and the size of the model axis.
        batch_size: rows of the whole batch.
    """

    kind_of: tuple[int, ...]
    timings: Mapping[tuple[int, int], Timing]
    batch_size: int

    def shape(self, cluster: ClusterShape) -> ClusterShape:
        """Return the cluster with the measured dispatch overhead of a program."""
        known = [timing for timing in self.timings.values() if not timing.failure]
        if not known:
            return cluster
        dispatch_overhead = statistics.median(timing.dispatch_overhead for timing in known)
        return dataclasses.replace(cluster, dispatch_overhead=dispatch_overhead)

    def effective_parallelism(self, layers: Sequence[int], cluster: ClusterShape) -> float | None:
        """Return that of a stage with these layers, as in `StagePlan`; None if not measured."""
        alone: dict[int, float] = {}  # by the size of the mesh that was alone
        together: dict[int, float] = {}
        for layer in layers:
            for (kind, model), timing in self.timings.items():
                if kind == self.kind_of[layer] and timing.alone is not None:
                    alone[model] = alone.get(model, 0.0) + timing.alone
                    together[model] = together.get(model, 0.0) + sum(timing.points[-1][1:])
        if cluster.effective_parallelism is None or not alone:
            return None
        busy, count = min(alone), cluster.num_devices
        # That of one device, on the line through what was measured: see `schedule.Shared`.
        others = (busy - 1) / (count - 1)
        share = (alone[busy] / together[busy] - others) / (1.0 - others)
        return min(max(1.0, count * share), float(count))

    def stage(self, layers: Sequence[int], num_slices: int, model: int) -> tuple[float, float]:
        """Return the forward and backward seconds of a stage for one slice on each of its replicas.

        Raises:
            UnmeasuredError: see `check`.
        """
        self.check(layers, model)
        forward = backward = 0.0
        for layer in layers:
            more = self.timings[self.kind_of[layer], model].at(self.batch_size / num_slices)
            forward, backward = forward + more[0], backward + more[1]
        return forward, backward

    def check(self, layers: Sequence[int], model: int) -> None:
        """Check that layers are measured on `model` devices of a model axis.

        Raises:
            UnmeasuredError: one of them could not be measured; the message says why.
        """
        for layer in layers:
            timing = self.timings[self.kind_of[layer], model]
            if timing.failure:
                raise UnmeasuredError(
                    f"layer {layer} could not be measured on {model} devices of a model axis: "
                    f"{timing.failure}. Use parallel.cost=model, or other devices"
                )

    def account(self) -> tuple[ProfiledLayers, ...]:
        """Return what was measured, to be listed in the plan."""
        found = []
        for (kind, model), timing in sorted(self.timings.items()):
            layers = tuple(i for i, of in enumerate(self.kind_of) if of == kind)
            if timing.failure:
                found.append(ProfiledLayers(layers, model, 0, 0.0, 0.0, timing.failure))
            found += [ProfiledLayers(layers, model, *point) for point in timing.points]
        return tuple(found)


@dataclass(frozen=True)
class Exported:
    """A program as data.

    Attributes:
        data: the serialised program.
        sums: number of its last inputs that are accumulators, whose places its first outputs take.
    """

    data: bytes
    sums: int


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """A layer (or a stage of several) on `copies` × `model` devices.

    Attributes:
        sharding: the sharding of its forward pass.
        key: equal for equal programs on equal meshes, in every process.
    """

    graph: StageGraph
    loss: Loss
    sharding: Sharding
    copies: int
    model: int

    @property
    def key(self) -> str:
        """Hash that is equal for equal programs on equal meshes, in every process."""
        graph = self.graph
        body = Jaxpr(graph.inputs, graph.equations, graph.outs)
        more = {
            "mesh": (self.copies, self.model),
            "specs": [self.sharding.spec(v) for v in (*graph.inputs, *graph.outs)],
            "structure": graph.structure,
        }
        return hashlib.sha256(structure_text(body, more).encode()).hexdigest()[:32]

    @functools.cached_property
    def programs(self) -> StagePrograms:
        """Task programs as the runtime cuts them if a schedule has one kind of backward task."""
        return trace_stage(self.graph, self.loss, "none", {Kind.FORWARD, Kind.BACKWARD})

    def exported(self, platform: str) -> list[Exported]:
        """Return the forward pass, and the backward pass where there is one, for `platform`.

        Both have the inputs and outputs of their `TaskProgram`, with the copies as a leading axis
        of all but the parameters; gradients are added to accumulators, which are the last inputs
        and the first outputs.
        """
        return [self._exported(one, platform) for one in self.programs.programs.values()]

    def _exported(self, one: TaskProgram, platform: str) -> Exported:
        reads = [name for name in one.inputs if name.kind != "seed"]
        sums = [name for name in one.outputs if name.kind == "grad"]
        others = [name for name in one.outputs if name.kind != "grad"]
        shared = [self._is_shared(name) for name in reads]

        def of_slice(*flat: Any) -> tuple[Any, ...]:
            values = dict(zip(reads, flat, strict=True))
            seed = jnp.ones((), self.loss.outvars[0].aval.dtype)
            outs = one.fun(*(values.get(name, seed) for name in one.inputs))
            made = dict(zip(one.outputs, outs, strict=True))
            grads = (made[name].astype(accumulator_dtype(made[name].dtype)) for name in sums)
            return (*grads, *(made[name] for name in others))

        fun = of_slice
        if self.copies > 1:
            axes = tuple(None if alike else 0 for alike in shared)
            fun = jax.vmap(of_slice, in_axes=axes, spmd_axis_name=COPIES, axis_size=self.copies)

        def whole(*flat: Any) -> tuple[Any, ...]:
            outs = fun(*flat[: len(reads)])
            summed = (a + b for a, b in zip(flat[len(reads) :], outs, strict=False))
            return (*summed, *outs[len(sums) :])

        of_sum = [self._shape(name, alike=False) for name in sums]
        of_sum = [jax.ShapeDtypeStruct(x.shape, accumulator_dtype(x.dtype)) for x in of_sum]
        shapes = [*map(self._shape, reads, shared), *of_sum]
        ins = [*map(self._spec, reads, shared), *(self._spec(n, alike=False) for n in sums)]
        outs = [self._spec(name, alike=False) for name in (*sums, *others)]
        how: dict[str, Any] = {}
        if self.copies * self.model > 1:
            sizes, auto = (self.copies, self.model), (AxisType.Auto,) * 2
            mesh = AbstractMesh(sizes, (COPIES, MODEL), axis_types=auto)
            how["in_shardings"] = tuple(NamedSharding(mesh, PartitionSpec(*x)) for x in ins)
            how["out_shardings"] = tuple(NamedSharding(mesh, PartitionSpec(*x)) for x in outs)
        found = export.export(jax.jit(whole, **how), platforms=[platform])(*shapes)
        return Exported(bytes(found.serialize()), len(sums))

    def _is_shared(self, name: Name) -> bool:
        """Return whether all copies read the same value: an operand that is not of the batch."""
        return name.kind == "operand" and self.loss.slice_axes[name.of] is None

    def _value(self, name: Name) -> Any:
        """Return the variable of the joint graph that has the shape and spec of `name`."""
        joint = self.programs.joint
        if name.kind == "grad":
            return joint.inputs[Name("operand", name.of)]
        if name.kind == "residual":
            return name.of
        return joint.inputs[name] if name in joint.inputs else joint.outputs[name]

    def _shape(self, name: Name, alike: bool) -> jax.ShapeDtypeStruct:
        aval = self._value(name).aval
        leading = () if alike or self.copies == 1 else (self.copies,)
        return jax.ShapeDtypeStruct((*leading, *jnp.shape(aval)), aval.dtype)

    def _spec(self, name: Name, alike: bool) -> Spec:
        leading = () if alike or self.copies == 1 else (COPIES,)
        return (*leading, *self._inside.spec(self._value(name)))

    @functools.cached_property
    def _inside(self) -> Sharding:
        return inside_of(self.programs, self.loss, self.sharding)


def layer_program(
    step: TracedStep,
    graph: StageGraph,
    loss: Loss,
    copies: int,
    model: int,
    cluster: ClusterShape,
) -> LayerProgram:
    """Return a layer's program, sharded over `model` devices as the planner would shard it."""
    sharding = model_sharding(step, loss, graph, model, cluster, cluster.link_of_axis(model))
    return LayerProgram(graph, loss, sharding, copies, model)


def measure_layers(
    step: TracedStep,
    cluster: ClusterShape,
    model_sizes: Sequence[int],
    num_micro_batches: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
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
    """
    sizes = _slice_counts(step.batch_size, num_micro_batches, cluster.num_devices)
    losses = [step.loss(count) for count in sizes]
    cuts = [cut_stages(loss, [(i,) for i in range(loss.num_layers)]) for loss in losses]
    rows = [step.batch_size // count for count in sizes]
    kinds: dict[str, int] = {}
    kind_of, wanted = [], []
    for layer, graphs in enumerate(zip(*cuts, strict=True)):
        found = []
        for m in model_sizes:
            programs = [
                layer_program(step, graph, loss, cluster.num_devices // m, m, cluster)
                for graph, loss in zip(graphs, losses, strict=True)
            ]
            shares = cluster.effective_parallelism and m < cluster.num_devices
            alone = bool(shares and m == model_sizes[0])
            if alone:
                programs.append(dataclasses.replace(programs[-1], copies=1))
            found.append(_Candidate(rows, programs, alone))
        key = found[0].programs[0].key
        if key not in kinds:
            kinds[key] = len(kinds)
            wanted += [(kinds[key], layer, candidate) for candidate in found]
        kind_of.append(kinds[key])
    timings = {}
    for done, (kind, layer, candidate) in enumerate(wanted):
        progress(done / len(wanted))
        m = candidate.programs[0].model
        timings[kind, m] = timing = _timing(candidate, cluster)
        if timing.failure:
            _log.warning(f"layer {layer} on a model axis of {m} was not measured: {timing.failure}")
    return MeasuredLayers(tuple(kind_of), timings, step.batch_size)


@dataclass(frozen=True)
class _Candidate:
    """A layer on one size of the model axis.

    It has a program for each number of rows and, where it is wanted (`alone`), that of the most
    rows for one mesh alone.
    """

    rows: Sequence[int]
    programs: Sequence[LayerProgram]
    alone: bool


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


def _timing(candidate: _Candidate, cluster: ClusterShape) -> Timing:
    """Return a timing from the cache, or measure it and keep it there."""
    keys = "-".join(program.key for program in candidate.programs)
    path = measurements.cache_file("profile", cluster.device_kind, cluster.num_devices, f"-{keys}")
    known = measurements.read_cached(path, _kept)
    if known is not None:
        return known
    try:
        timing = _measured(candidate, cluster)
    except (subprocess.SubprocessError, OSError, ValueError, NotImplementedError) as error:
        return Timing(failure=_reason(error))  # may go better next time: not kept
    fields = vars(timing).items()
    measurements.write(path, {name: value for name, value in fields if name != "failure"})
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


def _measured(candidate: _Candidate, cluster: ClusterShape) -> Timing:
    platform = platform_of(cluster)
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
        found = run_program(measure_programs, request, _TIME_OUT)
    seconds, passes, at = found["seconds"], [], 0
    for count in counts:
        passes.append((seconds[at], seconds[at + 1] if count > 1 else 0.0))
        at += count
    alone = sum(passes.pop()) if candidate.alone else None
    points = [(n, *both) for n, both in zip(candidate.rows, passes, strict=True)]
    return Timing(tuple(points), found["dispatch_overhead"], alone)


def _reason(error: Exception) -> str:
    """Return why a candidate has no timing, in one line."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {_TIME_OUT:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        if error.returncode < 0:
            return f"its process was ended by signal {-error.returncode}"
        return lines[-1].strip()[:300] if lines else f"exit code {error.returncode}"
    return first_line(error)[:300]
