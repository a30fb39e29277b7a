"""Layers that are measured: each in its own process, kept on disk, and held against a run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compile_programs
from layered import layered_step

from launcher.base import measurements
from launcher.config.parallel import Data
from launcher.driver.planning.plan_from_config import plan_of
from launcher.partition.stages import cut_stages
from launcher.plan import PlanError, local_shape
from launcher.plan.build import repriced
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.select import search
from launcher.plan.methods import AutoStageOption, DataParallel, PipeshardParallel, ThreeDParallel
from launcher.plan.profile import measure_layers as profile
from launcher.plan.profile.measure_layers import MeasuredLayers, Timing, layer_program
from launcher.runtime.emit.emit import emit
from launcher.runtime.programs.device_meshes import place_on_devices
from launcher.schedule import Kind
from launcher.trace import TracedStep

pytestmark = pytest.mark.devices
BATCH, LAYERS, WIDTH = 8, 4, 16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "_MEASURED", 0.01)
    return tmp_path / "cache" / "launcher"


def traced(layers: int = LAYERS) -> TracedStep:
    """Layers of which those in the middle are one program."""
    return layered_step([(WIDTH, WIDTH)] * layers, BATCH, updated=range(layers))


def shape(devices: int = 2) -> Any:
    return local_shape(devices, 1, "cpu")


@pytest.mark.slow
def test_distinct_layers_are_measured_once_and_then_remembered(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = profile.measure_layers(traced(), shape(), (2,), 2)
    assert found.kind_of == (0, 1, 1, 2)
    assert set(found.timings) == {(kind, 2) for kind in range(3)}
    assert all(f > 0 and b > 0 for t in found.timings.values() for _, f, b in t.points)
    files = sorted((own_cache / "profile").iterdir())
    assert len(files) == 3
    before = [file.stat().st_mtime_ns for file in files]
    again = profile.measure_layers(traced(), shape(), (2,), 2)
    assert again == found
    assert [file.stat().st_mtime_ns for file in files] == before
    assert caplog.messages == []


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "damaged"),
        ({"versions": {"jax": "0.1"}}, "of other versions (jax 0.1)"),
        *(({"points": p}, "damaged") for p in (None, 3, [], [[1, 2]], [[1, "x", 1.0]])),
        *(
            ({"points": [[1, bad, 1.0]]}, "damaged")
            for bad in (0.0, -1.0, math.nan, math.inf, True)
        ),
        ({"points": [[2, 1.0, 1.0], [2, 1.0, 1.0]]}, "damaged"),
        ({"dispatch_overhead": "x"}, "damaged"),
        ({"dispatch_overhead": None}, "damaged"),
        ({"alone": math.nan}, "damaged"),
        ({"versions": []}, "damaged"),
    ],
)
def test_a_cache_that_cannot_be_used_is_ignored_and_said(
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step, measured = traced(1), []
    timing = Timing(((BATCH, 0.01, 0.02),))
    monkeypatch.setattr(profile, "_measured", lambda *given: measured.append(given) or timing)
    for _ in range(2):  # the second time it is known
        profile.measure_layers(step, shape(1), (1,), 1)
    assert len(measured) == 1
    file = min((own_cache / "profile").iterdir())
    kept = file.read_text()
    file.write_text(json.dumps(json.loads(kept) | change) if change else kept[: len(kept) // 2])
    assert profile.measure_layers(step, shape(1), (1,), 1).timings == {(0, 1): timing}
    assert len(measured) == 2
    assert caplog.messages == [f"{file} is {words}: ignored, measured again"]
    assert file.read_text() == kept


def test_a_candidate_that_takes_too_long_costs_itself_and_says_why(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profile, "_TIME_OUT", 0.01)
    found = profile.measure_layers(traced(1), shape(1), (1,), 1)
    assert {t.failure for t in found.timings.values()} == {"it took more than 0.01 s"}
    told = "layer 0 on a model axis of 1 was not measured: it took more than 0.01 s"
    assert caplog.messages[0] == told
    assert not (own_cache / "profile").exists()
    with pytest.raises(PlanError, match="layer 0 could not be measured on 1 devices"):
        found.stage((0,), 1, 1)


def test_a_candidate_that_dies_costs_itself_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(profile.measure_programs, "__file__", str(script))
    found = profile.measure_layers(traced(1), shape(1), (1,), 1)
    assert {t.failure for t in found.timings.values()} == {"its process was ended by signal 9"}


def test_the_programs_compute_the_layer_and_its_gradients() -> None:
    """On two copies × two devices of a model axis, against plain `jax.vjp`."""
    step = traced()
    loss = step.loss(2)
    graph = cut_stages(loss, [(i,) for i in range(LAYERS)])[1]
    layer = layer_program(step, graph, loss, 2, 2, shape(4))
    names = layer.programs.programs
    forward, backward = (compiled(e, 2) for e in layer.exported("cpu"))

    weight = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
    x, seed = jax.random.normal(jax.random.key(1), (2, 2, BATCH // 2, WIDTH))
    values: dict[Any, Any] = {"operand": weight, "activation": x, "cotangent": seed}
    reads = [values[name.kind] for name in names[Kind.FORWARD].inputs]
    out, *rest = forward(*reads)
    expected, vjp = jax.vjp(lambda w, x: jnp.tanh(x @ w), weight, x[0])
    assert jnp.allclose(out[0], expected, atol=1e-5)
    left = [name for name in names[Kind.FORWARD].outputs if name.kind == "residual"]
    values |= dict(zip(left, rest, strict=True))
    made = names[Kind.FORWARD].outputs[0]
    values |= {made: out}  # an activation that is sent on may be read again
    reads = [values.get(name, values.get(name.kind)) for name in names[Kind.BACKWARD].inputs]
    before = jnp.ones((2, WIDTH, WIDTH))
    sums, back = backward(*reads, before)
    of_weight, of_x = vjp(seed[0])
    assert jnp.allclose(back[0], of_x, atol=1e-5)
    assert jnp.allclose(sums[0], 1.0 + of_weight, atol=1e-5)


def compiled(exported: Any, model: int) -> Any:
    """As `measure_programs` compiles it, here."""
    from jax import export
    from jax.sharding import Mesh

    call = export.deserialize(bytearray(exported.data))
    how: dict[str, Any] = {}
    if call.nr_devices > 1:
        devices = np.array(jax.devices()[: call.nr_devices]).reshape(-1, model)
        mesh = Mesh(devices, ("copies", "model"))
        how = {
            "in_shardings": call.in_shardings_jax(mesh),
            "out_shardings": call.out_shardings_jax(mesh),
        }
    count = len(call.in_avals)
    donated = tuple(range(count - exported.sums, count))
    jitted = jax.jit(call.call, donate_argnums=donated, **how)
    return jitted.lower(*call.in_avals).compile()


@pytest.mark.parametrize(("data", "model"), [(1, 1), (2, 1), (1, 2)])
def test_what_is_timed_is_what_the_runtime_runs(data: int, model: int) -> None:
    """The programs of a layer against those of a stage that is this layer: the same operations,
    the same bytes read and written, the same room."""
    step = traced()
    plan = ThreeDParallel(data, model, 4, 2).plan(step, shape(4 * data * model))
    emitted = emit(step, plan)
    stage = compile_programs(emitted, place_on_devices(plan, jax.devices(), emitted.slots))
    loss = step.loss(2 * data)
    graph = cut_stages(loss, [(i,) for i in range(LAYERS)])[1]
    layer = layer_program(step, graph, loss, data, model, shape(data * model))
    for word, exported in zip(("forward", "backward"), layer.exported("cpu"), strict=True):
        timed, run = compiled(exported, model), stage[f"stage.1.{word}"]
        for count in ("flops", "bytes accessed"):
            assert timed.cost_analysis()[count] == run.cost_analysis()[count]
        room, needed = timed.memory_analysis(), run.memory_analysis()
        assert room.output_size_in_bytes == needed.output_size_in_bytes
        assert room.alias_size_in_bytes == needed.alias_size_in_bytes
        assert room.temp_size_in_bytes == needed.temp_size_in_bytes


@pytest.mark.slow
def test_plans_rest_on_what_was_measured() -> None:
    """Of a method that is given, and of the search."""
    step, cluster = traced(2), shape(1)
    plan = plan_of(Data(num_micro_batches=2, cost="profile"), step, cluster)
    measured = profile.measure_layers(step, cluster, (1,), 2)  # from the cache
    forward, _ = measured.stage((0, 1), 2, 1)
    assert plan.stages[0].forward_seconds == pytest.approx(
        forward + plan.cluster["dispatch_overhead"]
    )
    assert {found.layers for found in plan.profiled} == {(0,), (1,)}
    method = PipeshardParallel(2, stage_option=AutoStageOption("profile"), schedule="auto")
    assert method.plan(step, cluster).profiled == plan.profiled


def test_the_start_of_a_program_is_counted_once_a_stage() -> None:
    """Layers are timed in programs of their own, each of which has a start."""
    step, cluster = traced(), shape(1)
    known = Timing(((4, 0.01, 0.02),), dispatch_overhead=0.5)
    found = MeasuredLayers((0, 1, 1, 2), {(kind, 1): known for kind in range(3)}, BATCH)
    plan = DataParallel(2).plan(step, cluster)
    [stage] = repriced(step, plan, found).stages
    assert stage.forward_seconds == pytest.approx(4 * 0.01 + 0.5)
    assert stage.backward_seconds == pytest.approx(4 * 0.02)  # in the same program


def test_how_many_devices_work_at_once_is_measured_by_one_alone() -> None:
    """Alone it takes half of what it takes beside three others: it does the work of two."""
    timing = Timing(((4, 0.01, 0.03),), alone=0.02)
    found = MeasuredLayers((0, 0), {(0, 1): timing, (0, 2): Timing(((4, 1.0, 1.0),))}, BATCH)
    assert found.effective_parallelism((0, 1), shape(4)) == pytest.approx(2.0)
    faster = MeasuredLayers((0,), {(0, 1): dataclasses.replace(timing, alone=1e-3)}, BATCH)
    assert faster.effective_parallelism((0,), shape(4)) == 1.0
    pair = MeasuredLayers((0,), {(0, 2): dataclasses.replace(timing, alone=0.04 * 2 / 3)}, BATCH)
    # A third of the way to all four.
    assert pair.effective_parallelism((0,), shape(4)) == pytest.approx(2.0)
    both = MeasuredLayers((0, 1), {(0, 1): timing, (1, 1): Timing(((4, 0.0, 0.04),), 0, 0.04)}, 8)
    assert both.effective_parallelism((0, 1), shape(4)) == pytest.approx(3.0)
    assert both.effective_parallelism((1,), shape(4)) == 4.0
    # GPUs do not share a machine's cores.
    apart = dataclasses.replace(shape(4), effective_parallelism=None)
    assert found.effective_parallelism((0, 1), apart) is None


def test_a_plan_is_made_of_what_could_be_measured() -> None:
    """Nothing on a model axis of two was; nor, the second time, anything else."""
    step, cluster = traced(), shape()
    known = Timing(((4, 0.01, 0.02),))
    lost = Timing(failure="out of memory")
    timings = {(kind, m): known if m == 1 else lost for kind in range(3) for m in (1, 2)}
    found = MeasuredLayers((0, 1, 1, 2), timings, BATCH)
    plan = search(step, cluster, Constraints(num_micro_batches=2), measured=found)[0][0]
    assert all(stage.logical_mesh[1] == 1 for stage in plan.stages)
    none = MeasuredLayers((0, 1, 1, 2), dict.fromkeys(timings, lost), BATCH)
    with pytest.raises(PlanError, match=r"could not be measured on . devices.*out of memory"):
        search(step, cluster, Constraints(num_micro_batches=2), measured=none)[0][0]


def test_an_unknown_cost_is_refused() -> None:
    with pytest.raises(PlanError, match='cost=\'guess\' is not "measured", "model" or "profile"'):
        PipeshardParallel(2, stage_option=AutoStageOption("guess")).plan(traced(), shape())


def test_rows_between_and_beyond_the_measured_ones() -> None:
    timing = Timing(((2, 1.0, 2.0), (4, 1.5, 3.0)))
    assert timing.at(3) == (1.25, 2.5)
    assert timing.at(8) == (2.5, 5.0)
    assert timing.at(1) == (0.75, 1.5)
    assert Timing(((2, 1.0, 2.0),)).at(1) == (0.5, 1.0)
    noise = Timing(((1, 3.0, 3.0), (4, 1.0, 1.0)))
    assert noise.at(8)[0] > 0


def test_what_failed_is_told_with_the_rest() -> None:
    timings = {(0, 1): Timing(((4, 1.0, 2.0),)), (0, 2): Timing(failure="out of memory")}
    told = MeasuredLayers((0, 0), timings, 8).account()
    assert [(t.layers, t.model, t.failure) for t in told] == [
        ((0, 1), 1, ""),
        ((0, 1), 2, "out of memory"),
    ]


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    measurements.write(tmp_path / "file" / "x.json", {})
    [words] = caplog.messages
    assert words.endswith("cannot be written (Not a directory): the measurement is not kept")
    assert os.listdir(tmp_path) == ["file"]
