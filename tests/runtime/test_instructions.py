"""The instruction list and the compiled programs: what is live, donated and communicated."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import launcher
from launcher.plan import PlanError, local_shape, measured_bubble
from launcher.plan.methods import PipeshardParallel, UniformStageOption
from launcher.runtime import compile_step
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Free, Run, Send
from launcher.schedule import SCHEDULES, Kind
from launcher.trace import trace_step

LAYERS, WIDTH = 4, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def init(key):
    keys = jax.random.split(key, LAYERS)
    params = {f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)) / 3 for i, k in enumerate(keys)}
    return params, OPTIMIZER.init(params)


def step(state, x):
    def loss(params, x):
        for i in range(LAYERS):
            if i:
                launcher.mark_pipeline_boundary()
            x = jnp.tanh(x @ params[f"w{i}"])
        return (x**2).mean()

    params, opt = state
    value, grads = launcher.value_and_grad(loss)(params, x)
    updates, opt = OPTIMIZER.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), value


X = np.linspace(-1, 1, 16 * WIDTH, dtype=np.float32).reshape(16, WIDTH)


@functools.cache
def traced_step():
    return trace_step(step, (jax.eval_shape(init, jax.random.key(0)), X))


@functools.cache
def planned(stages=4, devices=4, micro_batches=8, **how):
    traced = traced_step()
    method = PipeshardParallel(micro_batches, stage_option=UniformStageOption(stages), **how)
    return traced, method.plan(traced, local_shape(devices, 1, "cpu"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("gpipe", 4),
        ("1f1b", 4),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 1),
        ("zero_bubble", 4),
    ],
)
def test_live_activations_stay_within_the_schedules_bound(schedule, devices, remat):
    """Nothing that a mesh's forward and backward programs made is there for more microbatches at
    once than the schedule has in flight, and nothing of the pipeline outlives it."""
    traced, plan = planned(devices=devices, schedule=schedule, remat=remat)
    emitted = emit(traced, plan)
    runs = [x for x in emitted.instructions if isinstance(x, Run) and x.task]
    reader = {slot: run.task for run in runs for slot in run.inputs}
    owner = {  # a gradient that stays on the mesh is already the next stage's
        slot: reader.get(slot, run.task) if run.task.kind is Kind.BACKWARD else run.task
        for run in runs
        for slot in set(run.outputs) - set(run.inputs)  # but not the accumulators
    }
    held, peak = set(), collections.Counter()
    for x in emitted.instructions:
        if isinstance(x, Free):
            held.difference_update(x.slots)
        else:
            held.update(x.outputs)
        live = {(owner[slot].stage, owner[slot].microbatch) for slot in held & owner.keys()}
        for mesh, count in collections.Counter(plan.mesh_of[s] for s, _ in live).items():
            peak[mesh] = max(peak[mesh], count)
    assert not held & owner.keys()
    assert held <= {slot for slot, _, _ in emitted.results}
    meshes = len(plan.meshes)
    bounds = [SCHEDULES[schedule].in_flight_bound(i, meshes, 8, 4 // meshes) for i in range(meshes)]
    if remat == "none":
        assert [peak[i] for i in range(meshes)] == bounds
    assert all(peak[i] <= bounds[i] for i in range(meshes))


def test_state_is_updated_in_place():
    traced, plan = planned()
    executable = compile_step(traced, plan, jax.devices())
    state = executable.create(init, jax.random.key(0))
    new, _ = executable(state, X)
    jax.block_until_ready(new)
    consumed = [leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.size > 1]
    assert all(consumed)
    assert jax.tree.leaves(jax.tree.map(lambda a: a.sharding, new)) == jax.tree.leaves(
        executable.in_shardings[0]
    )


def test_repeated_steps_leak_no_array():
    traced, plan = planned(stages=2, devices=2)
    executable = compile_step(traced, plan, jax.devices())
    state = executable.create(init, jax.random.key(0))
    state, _ = executable(state, X)
    jax.block_until_ready(state)
    before = len(jax.live_arrays())
    for _ in range(3):
        state, _ = executable(state, X)
    jax.block_until_ready(state)
    assert len(jax.live_arrays()) == before


def test_the_last_stage_runs_both_passes_in_one_program():
    names = set(emit(*planned(schedule="1f1b")).programs)
    assert "stage.3.forward_backward" in names
    assert "stage.3.forward" not in names
    assert "stage.3.backward" in emit(*planned(schedule="gpipe")).programs
    names = set(emit(*planned(schedule="zero_bubble")).programs)
    assert {"stage.3.forward_backward_input", "stage.3.backward_weight"} <= names
    assert "stage.0.backward_input" not in names


def test_two_programs_where_one_would_keep_much_inside():
    rows = jax.ShapeDtypeStruct((2**22, WIDTH), jnp.float32)
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), rows))
    cluster = local_shape(2, 1, "cpu")
    for micro_batches, together in ((2, False), (256, True)):
        method = PipeshardParallel(micro_batches, stage_option=UniformStageOption(2))
        plan = method.plan(traced, cluster)
        assert ("stage.1.forward_backward" in emit(traced, plan).programs) == together


def test_stages_of_one_mesh_send_each_other_nothing():
    for devices in (1, 2):
        emitted = emit(*planned(devices=devices, schedule="interleaved_1f1b"))
        sends = [x for x in emitted.instructions if isinstance(x, Send)]
        assert all(x.src != x.dst for x in sends)
        assert bool(sends) == (devices > 1)
        for x in sends:
            assert {emitted.slots[slot].mesh for slot in x.inputs} == {x.src}
            assert {emitted.slots[slot].mesh for slot in x.outputs} == {x.dst}


def test_profile_runs_a_real_step_and_times_it():
    traced, plan = planned(stages=2, devices=2)
    executable = compile_step(traced, plan, jax.devices())
    plain, _ = executable(executable.create(init, jax.random.key(0)), X)
    state, times = executable.profile(executable.create(init, jax.random.key(0)), X)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(plain), jax.device_get(state[0]))
    assert len(times.stage_seconds) == 2
    assert all(seconds > 0 for seconds in times.stage_seconds)
    assert 0 < measured_bubble(plan, times.task_seconds) < 1


def test_misuse_is_named():
    traced, plan = planned(stages=2, devices=2)
    with pytest.raises(PlanError, match="needs 2 devices; here are 1"):
        compile_step(traced, plan, jax.devices()[:1])
    other = trace_step(lambda s, x: step(s, x * 2), (jax.eval_shape(init, jax.random.key(0)), X))
    with pytest.raises(PlanError, match="made for another program"):
        compile_step(other, plan, jax.devices())
    executable = compile_step(traced, plan, jax.devices())
    with pytest.raises(TypeError, match="compiled for arguments"):
        executable(X)
