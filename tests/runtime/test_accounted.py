"""What really is slow in a step is what its accounting names; a recorded step follows its plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.report.breakdown import Known, break_down
from launcher.report.measured import measured_seconds
from launcher.report.pages.timeline import ProcessSpans
from launcher.runtime import dispatch_table
from launcher.runtime.device_profile import DeviceProfile, read_program
from launcher.runtime.recording import StepRecording, matched, run_spans

WIDTH, WORK = 64, 300  # products that a slow link takes for a transfer


def turned(h, w):
    """The layer's input, after more products than a program's price knows of."""

    def body(carry):
        k, y = carry
        return k + 1, jnp.tanh(y @ w)

    _, y = jax.lax.while_loop(lambda carry: carry[0] < 3000, body, (0, h))
    return jax.lax.stop_gradient(y)


def stepped(layers, slow=None, schedule="1f1b"):
    """A step in as many stages as layers, of which one may be slow."""

    def step(params, x):
        def loss(params, x):
            for i, w in enumerate(params):
                if i:
                    launcher.mark_pipeline_boundary()
                more = turned(jax.lax.stop_gradient(x), jax.lax.stop_gradient(w))
                x = jnp.tanh(x @ w) + (0 * more if i == slow else 0)
            return (x**2).mean()

        grads = launcher.grad(loss)(params, x)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)]

    stages = launcher.UniformStageOption(layers)
    method = launcher.PipeshardParallel(num_micro_batches=4, stage_option=stages, schedule=schedule)
    return launcher.parallelize(step, method=method, devices=jax.devices()[:layers])


def recorded(parallel, layers, width=WIDTH):
    params = [np.eye(width, dtype=np.float32)] * layers
    for _ in range(2):  # the first one warms up
        params, timeline = parallel.timeline(params, np.ones((32, width), np.float32))
    return parallel.last_plan, timeline


def assert_named(culprit, plan, timeline):
    found = break_down(plan, Known(32), 1, timeline.steps[1])
    assert found.culprit == culprit, found.parts
    residue, difference = found.part("residue"), found.measured_step_seconds
    difference -= found.predicted_step_seconds
    assert abs(residue.measured_seconds - residue.predicted_seconds) <= 0.1 * difference
    for stage in found.stages:
        assert stage.measured.step_seconds == pytest.approx(found.measured_step_seconds, rel=0.05)
    return found.sentence


STAGES = [
    (0, 2, "1f1b", 64),
    (1, 2, "gpipe", 96),
    (2, 4, "zero_bubble", 64),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("slow", "layers", "schedule", "width"), STAGES)
def test_a_stage_that_does_more_than_it_was_priced_for_is_named(slow, layers, schedule, width):
    found = recorded(stepped(layers, slow, schedule), layers, width)
    sentence = assert_named(f"stage {slow}", *found)
    assert f"the compute of stage {slow}" in sentence
    assert "parallel.cost=profile" in sentence


def traced_too(recording, tracer, texts, devices_of):
    """The spans of a step's runs by the device tracer, where the host has recorded it, too."""
    programs = {name: read_program(text) for name, text in texts().items()}
    modules = {name: program.module for name, program in programs.items()}
    for place, run in matched(recording._runs, modules, devices_of, tracer.stop()):
        instruction = recording._runs[place]
        yield from run_spans(instruction, run, programs[instruction.program])


@pytest.fixture(params=["gpipe", "1f1b"])
def both_ways(monkeypatch, request):
    """The parts of steps as the host sees them, each beside what the device tracer says of it."""
    tracers, ways = [], []
    begin, finish = StepRecording.__init__, StepRecording.finish

    def begun(self, *args, **kwargs):
        tracers.append(DeviceProfile())
        begin(self, *args, **kwargs)

    def finished(self, texts, devices_of, first=0):
        traced = [*traced_too(self, tracers[-1], texts, devices_of)]
        seen = finish(self, texts, devices_of, first)
        traced += [span for span in seen if span.lane == "transfers"]
        ways.append((seen, traced))
        return seen

    monkeypatch.setattr("launcher.runtime.recording.jax.default_backend", lambda: "gpu")
    monkeypatch.setattr(StepRecording, "__init__", begun)
    monkeypatch.setattr(StepRecording, "finish", finished)
    step, params = stepped(2, slow=0, schedule=request.param), [np.eye(96, dtype=np.float32)] * 2
    found = []
    for _ in range(5):
        params, timeline = step.timeline(params, np.ones((32, 96), np.float32))
        (part,) = timeline.steps[1]
        own = [span for span in part.spans if span not in ways[-1][0]]
        spans = (ProcessSpans(part.process, [*own, *way], part.clock) for way in ways[-1])
        found.append([measured_seconds([one], step.last_plan.stages) for one in spans])
    return found


@pytest.mark.slow
@pytest.mark.sampled(2)
def test_the_parts_of_a_step_seen_by_the_host_add_up(both_ways):
    for one in (one for pair in both_ways for one in pair):
        assert sum(one.parts.values()) == pytest.approx(one.step_seconds, rel=0.02)


@pytest.mark.stress
def test_a_step_seen_by_the_host_is_divided_as_the_device_tracer_divides_it(both_ways):
    """The step of five where both agree best tells: a thread that wakes late makes one longer."""
    host, traced = min(both_ways, key=lambda pair: abs(pair[0].step_seconds - pair[1].step_seconds))
    assert host.step_seconds == pytest.approx(traced.step_seconds, rel=0.02)
    for name in ("compute", "bubble"):
        assert traced.parts[name] > 0.1 * traced.step_seconds
        assert abs(host.parts[name] - traced.parts[name]) < 0.05 * traced.step_seconds


def slow_link(between):
    """What makes transfers between two devices, both ways, with a slow wire between these two: a
    device of its own, which computes `WORK` products before it passes a transfer on."""
    wire, make = jax.devices()[-1], dispatch_table.local_transfer

    @jax.jit
    def pass_on(*arrays):
        # What waits instead, or computes little, XLA:CPU may run inside the call.
        work = jnp.eye(128) + arrays[0].ravel()[0]
        work = jax.lax.fori_loop(0, WORK, lambda _, x: jnp.tanh(x @ x), work)
        return tuple(x + (0.0 * work[0, 0]).astype(x.dtype) for x in arrays)

    def slowed(avals, src, dst):
        put, ends = make(avals, src, dst), {d.id for x in (src[0], dst[0]) for d in x.device_set}
        if ends != between:
            return put
        return lambda *arrays: put(*pass_on(*jax.device_put(arrays, wire)))

    return slowed


LINKS = [
    (0, 2, "gpipe", 96),
    (1, 4, "1f1b", 64),
    (2, 4, "zero_bubble", 64),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("after", "layers", "schedule", "width"), LINKS)
def test_a_link_that_is_slow_is_named(monkeypatch, after, layers, schedule, width):
    monkeypatch.setattr(dispatch_table, "local_transfer", slow_link({after, after + 1}))
    found = recorded(stepped(layers, schedule=schedule), layers, width)
    sentence = assert_named(f"link {after}-{after + 1}", *found)
    assert f"the link between stage {after} and stage {after + 1}" in sentence
    assert "task=calibrate" in sentence


def test_the_events_of_four_stages_are_in_the_order_of_1f1b():
    plan, timeline = recorded(stepped(4), 4)
    assert plan.schedule == "1f1b"
    for mesh, tasks in enumerate(plan.tasks()):
        spans = [
            span
            for span in timeline.spans()
            if span.lane == f"device {mesh}" and "microbatch" in span.about
        ]
        ran = [(span.about["stage"], span.about["microbatch"], span.kind) for span in spans]
        if any(kind == "forward_backward" for *_, kind in ran):
            assert ran == [(mesh, k, "forward_backward") for k in range(4)]
        else:
            assert ran == [(t.stage, t.microbatch, t.kind.value) for t in tasks]
