"""A recorded step is the step as it runs anyway, and its spans say what ran where."""

import collections
import json
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import BATCHES, init, step

import launcher
from launcher.base import SpanRecorder
from launcher.report.pages.timeline import chrome_trace
from launcher.runtime.device_profile import (
    STOPPING,
    DeviceProfile,
    Operation,
    ProgramRun,
    read_program,
)
from launcher.runtime.emit.instructions import Run
from launcher.runtime.recording import StepRecording, matched, run_spans
from launcher.schedule import Kind, Task

TEXT = """
HloModule jit_stage.0.forward_backward, is_scheduled=true

%region_0 (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8]) -> (f32[4], f32[4]) {
  %dot.1 = f32[4]{0} dot(%p, %p), metadata={op_name="jit(stage.0.forward_backward)/dot"}
  %all-reduce.9 = f32[4]{0} all-reduce(%dot.1), to_apply=%region_0, metadata={op_name="jit(x)/psum"}
  %psum.1 = f32[4]{0} all-reduce(%all-reduce.9), to_apply=%region_0, metadata={op_name="jit(x)/gradient_sum_0/shard_map/psum" stack_frame_id=5}
  %dot.2 = f32[4]{0} dot(%dot.1, %p)
  %slice.1 = f32[2]{0} slice(%psum.1), slice={[0:2]}
  %pack.1 = f32[4]{0} fusion(%dot.2), calls=%region_0
  %psum.2 = f32[4]{0} reduce-scatter(%pack.1), to_apply=%region_0, metadata={op_name="jit(x)/vmap(gradient_sum_1)/psum_scatter"}
  ROOT %tuple = (f32[4]{0}, f32[4]{0}) tuple(%psum.1, %psum.2)
}
"""  # noqa: E501  (as XLA writes it)


def test_a_programs_text_tells_sums_of_gradients_and_what_waits_for_them():
    found = read_program(TEXT)
    assert found.module == "jit_stage.0.forward_backward"
    kinds = {name: (one.kind, one.bucket) for name, one in found.collectives.items()}
    assert kinds == {
        "all-reduce.9": ("all-reduce", None),
        "psum.1": ("all-reduce", 0),
        "psum.2": ("reduce-scatter", 1),
    }
    assert found.after_sums == {"slice.1", "tuple"}


def test_a_backward_pass_ends_with_its_own_last_operation_and_sums_are_beside_it():
    ran = [("dot.1", 0, 10), ("all-reduce.9", 10, 15), ("psum.1", 15, 40), ("dot.2", 20, 50)]
    ran += [("slice.1", 40, 41), ("pack.1", 50, 52), ("psum.2", 52, 70)]
    operations = [Operation(*each) for each in ran]
    instruction = Run(0, "stage.0.backward", (), (), task=Task(1, 3, Kind.BACKWARD))
    found = run_spans(instruction, ProgramRun("jit", 2, operations), read_program(TEXT))
    assert [(span.lane, span.name, span.kind, span.start, span.end) for span in found] == [
        ("device 2", "stage 1 backward 3", "backward", 0, 52),
        ("device 2 collectives", "all-reduce", "collective", 10, 15),
        ("device 2 gradient sums", "bucket 0", "gradient sum", 15, 40),
        ("device 2 gradient sums", "bucket 1", "gradient sum", 52, 70),
    ]


def test_runs_are_matched_by_program_and_device_in_order():
    """Also where equal stages share a compiled program, and where one device is ahead."""
    runs = {0: Run(0, "f.0", (), ()), 2: Run(1, "f.1", (), ()), 5: Run(0, "f.0", (), ())}
    modules = {"f.0": "jit_f.0", "f.1": "jit_f.0"}
    ran = [
        ProgramRun("jit_f.0", device, [Operation("a", start, start + 1)])
        for device, start in ((0, 10), (2, 11), (0, 12), (1, 13), (1, 14))
    ]
    other = ProgramRun("jit_other", 0, [Operation("a", 0, 1)])
    found = list(matched(runs, modules, [[0, 1], [2]], [other, *ran]))
    assert sorted((place, run.device, run.start) for place, run in found) == [
        (0, 0, 10),
        (0, 1, 13),
        (2, 2, 11),
        (5, 0, 12),
        (5, 1, 14),
    ]


@pytest.fixture(scope="module")
def parallel():
    """A step in two stages of two devices."""
    stages = launcher.UniformStageOption(2)
    method = launcher.PipeshardParallel(num_micro_batches=2, stage_option=stages)
    return launcher.parallelize(step, method=method, devices=jax.devices()[:4])


def test_a_recorded_step_is_the_step_and_its_tasks_are_in_order(parallel):
    first = parallel.create(init, jax.random.key(0), like=BATCHES[0])
    plain, _ = parallel(first, BATCHES[0])
    again = parallel.create(init, jax.random.key(0), like=BATCHES[0])
    (state, _), timeline = parallel.timeline(again, BATCHES[0])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(plain), jax.device_get(state))

    spans = timeline.spans()
    tasks = {
        (span.lane, span.kind, span.about["microbatch"]): span
        for span in spans
        if span.kind in ("forward", "backward", "forward_backward")
    }
    devices = [[f"device {i}" for i in pair] for pair in ((0, 1), (2, 3))]
    ends = "forward" if ("device 2", "forward", 0) in tasks else "forward_backward"
    for k in range(2):
        arrived = min(tasks[device, ends, k].start for device in devices[1])
        assert max(tasks[device, "forward", k].end for device in devices[0]) <= arrived
        for device in devices[0]:
            assert tasks[device, "forward", k].end <= tasks[device, "backward", k].start
    assert {span.lane for span in spans if span.kind == "gradient sum"} == {
        f"device {i} gradient sums" for i in range(4)
    }
    assert {span.lane for span in spans if span.kind == "update"} == {
        f"device {i}" for i in range(4)
    }
    sent = [span for span in spans if span.kind == "transfer"]
    assert {(span.about["src_mesh"], span.about["dst_mesh"]) for span in sent} == {(0, 1), (1, 0)}
    json.dumps(chrome_trace(timeline))


def test_beside_a_profiler_of_the_users_own_only_the_devices_are_missing(
    parallel, tmp_path, caplog
):
    state = parallel.create(init, jax.random.key(0), like=BATCHES[0])
    with jax.profiler.trace(tmp_path):
        _, timeline = parallel.timeline(state, BATCHES[0])
    assert {span.lane for span in timeline.spans()} == {"dispatch", "recording", "transfers"}
    assert "the timeline has no lanes of devices" in caplog.text


def test_on_gpus_runs_are_seen_without_the_profiler(parallel, monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("the device tracer was turned on")

    monkeypatch.setattr("launcher.runtime.recording.jax.default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.profiler, "start_trace", started)
    state = parallel.create(init, jax.random.key(0), like=BATCHES[0])
    _, timeline = parallel.timeline(state, BATCHES[0])
    runs = [span for span in timeline.spans() if span.lane.startswith("device ")]
    assert {span.lane for span in runs} == {f"device {i}" for i in range(4)}
    assert {"update"} < {span.kind for span in runs}
    per_mesh = collections.Counter()
    for span in runs:
        assert span.start <= span.end
        per_mesh[span.about["mesh"]] += span.about["covers"]
    ran = sum(span.lane == "dispatch" and " to " not in span.name for span in timeline.spans())
    assert sum(per_mesh.values()) <= 2 * ran  # on two devices each; the last ones may be used up


def test_what_a_slow_dispatch_takes_is_no_time_of_the_device():
    calls = {0: Run(0, "p", (), ()), 1: Run(0, "q", (), ())}
    recording = StepRecording(SpanRecorder(), profiled=False)
    recording._runs = calls
    there = lambda end: SimpleNamespace(result=lambda: end)  # noqa: E731
    # The second is sent off when the first has ended; its call takes 50.
    recording._ends = {0: (0, 10, [], there(100)), 1: (120, 170, [0], there(200))}
    spans = recording._seen_from_here([[0]], {})
    assert [(span.start, span.end) for span in spans] == [(10, 100), (170, 200)]
    recording._ends[1] = 80, 170, [0], there(200)  # its inputs come meanwhile
    assert [span.start for span in recording._seen_from_here([[0]], {})] == [10, 170]
    recording._ends[1] = 80, 170, [0], there(175)  # it has run in the call, as XLA:CPU may
    assert [span.start for span in recording._seen_from_here([[0]], {})] == [10, 100]


def test_a_profiler_that_does_not_stop_is_left_alone(monkeypatch, caplog):
    stop, stopped = jax.profiler.stop_trace, threading.Event()
    monkeypatch.setattr("launcher.runtime.device_profile.STOP_SECONDS", 0.05)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: stopped.wait(60) and stop())
    assert DeviceProfile().stop() == []
    assert "has not stopped for 0 s: its trace is lost" in caplog.text
    assert DeviceProfile().stop() == []  # would wait for the other's end
    assert "no lanes of devices: the one before still stops" in caplog.text
    stopped.set()
    for thread in threading.enumerate():
        if thread.name == STOPPING:
            thread.join(60)  # another test may start a session


def test_what_the_profiler_raises_as_it_stops_is_said(monkeypatch, caplog):
    profile, stop = DeviceProfile(), jax.profiler.stop_trace

    def broken():
        stop()
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(jax.profiler, "stop_trace", broken)
    assert profile.stop() == []
    assert "the timeline has no lanes of devices: the disk is full" in caplog.text


def test_a_step_that_fails_leaves_the_profiler_to_others(parallel, tmp_path):
    state = parallel.create(init, jax.random.key(0), like=BATCHES[0])
    bad = BATCHES[0] * np.nan
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        parallel.timeline(state, bad)
    with jax.profiler.trace(tmp_path):
        pass


@pytest.mark.parametrize("runs", [True, False])
def test_a_profile_leaves_no_file(tmp_path, monkeypatch, runs):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    profile = DeviceProfile()
    if runs:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    profile.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_that_trace_alone(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert DeviceProfile(tmp_path / "file" / "trace").stop() == []
    assert "no trace is written to" in caplog.text
    caplog.clear()
    DeviceProfile(tmp_path / "trace").stop()  # no session is left open
    assert caplog.text == ""


def test_a_trace_that_is_kept_names_stages_and_microbatches_and_still_has_the_lanes(
    parallel, tmp_path
):
    state = parallel.create(init, jax.random.key(0), like=BATCHES[0])
    compiled = parallel.executable(state, BATCHES[0])
    for session in (1, 2):  # one after the other
        folder = tmp_path / f"step_{session}"
        results, read = compiled.record(state, BATCHES[0], keep=folder)
        state = results[0]
        assert {span.lane for span in read()} >= {f"device {i}" for i in range(4)}
        (trace,) = folder.rglob("*.xplane.pb")
        names, modules = set(), set()
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            for event in (event for line in plane.lines for event in line.events):
                names.add(event.name)
                modules.add(str(dict(event.stats).get("hlo_module")))
        assert {f"stage 0 {kind} {k}" for kind in ("forward", "backward") for k in (0, 1)} <= names
        assert any("stage.0.forward" in module for module in modules)
