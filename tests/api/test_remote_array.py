"""Steps on real worker processes: two nodes of two CPU devices, started once for the module.

The last tests break the workers and start others.
"""

import os
import pickle
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import several
from tiny import BATCHES, WIDTH, evaluate, init, run, serial, step

import launcher
from launcher.api.remote_array import ConsumedError
from launcher.api.session import SessionError, current
from launcher.cluster.errors import WorkerError
from launcher.testing import assert_allclose

METHOD = launcher.PipeshardParallel(
    num_micro_batches=3, stage_option=launcher.UniformStageOption(4)
)


@pytest.fixture(scope="module", autouse=True)
def workers():
    launcher.init("ray", num_nodes=2, num_devices_per_node=2)
    yield
    launcher.shutdown()


@pytest.fixture(scope="module")
def train():
    return launcher.parallelize(step, method=METHOD)


def live_arrays():
    """How many arrays are alive in each worker, whoever holds them."""
    return launcher.foreach_worker(lambda: len(jax.live_arrays()))


def test_a_step_with_two_losses_on_workers():
    """Both on all stages; the second one's critic was updated by the first."""
    init_gan = several.gan_state
    state, expected = jax.jit(several.jax_own(several.gan)[0])(init_gan(), several.BATCH)
    method = launcher.PipeshardParallel(num_micro_batches=2)
    train = launcher.parallelize(several.ours(several.gan)[0], method=method)
    found, losses = train(train.create(init_gan, like=several.BATCH), several.BATCH)
    assert_allclose(losses, expected)
    assert_allclose(found, state, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [METHOD, launcher.Zero3Parallel(num_micro_batches=2)])
def test_workers_together_compute_what_one_device_does(method):
    state, losses = run(launcher.parallelize(step, method=method), 4)
    expected_state, expected = serial(4)
    assert all(isinstance(x, launcher.RemoteArray) for x in jax.tree.leaves((state, losses)))
    assert_allclose(losses, expected)
    assert_allclose(state, expected_state, rtol=1e-4, atol=1e-6)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, expected_state)
    if method != METHOD:  # each device holds a quarter
        assert "over data, on devices 0, 1, 2, 3" in state[0]["w1"].placement


def test_replicas_on_the_workers_are_compared_by_digests():
    (params, _), _ = run(launcher.parallelize(step, method=launcher.DataParallel()), 1)
    launcher.check_replicas(params)
    rows = np.concatenate([part.rows for part in current().digests({"w1": params["w1"]})])
    assert rows[:, 2].tolist() == [0, 1, 2, 3]  # the devices
    assert rows[:, 3].tolist() == [0, 0, 1, 1]  # the processes
    assert len(set(rows[:, 4])) == 1


def test_a_state_of_this_process_is_taken_too(train):
    _, loss = train(jax.device_get(jax.jit(init)(jax.random.key(0))), BATCHES[0])
    assert_allclose(loss, serial(1)[1][0])


def test_a_handle_tells_about_its_array(train):
    _, (loss,) = run(train, 1)
    assert (loss.shape, loss.dtype, loss.ndim, loss.size, loss.nbytes) == ((), np.float32, 0, 1, 4)
    assert loss.placement == "whole, on device 3"  # of the last stage
    assert loss.block_until_ready() is loss
    assert f"{loss:.3f}" == f"{float(loss):.3f}" == f"{loss.item():.3f}"
    assert repr(loss) == "RemoteArray(float32[])"
    assert pickle.loads(pickle.dumps(loss)) == float(loss)


def test_many_arrays_are_fetched_in_one_message(train, monkeypatch):
    state, losses = run(train, 2)
    backend, sent = current(), []
    send = backend.send
    monkeypatch.setattr(backend, "send", lambda name, *more: sent.append(name) or send(name, *more))
    assert launcher.prefetch((state, losses)) == (state, losses)
    assert sent == ["fetch"]
    values = jax.device_get(state)
    assert [float(loss) for loss in losses]
    assert sent == ["fetch"]
    state, _ = train(state, BATCHES[2])
    assert_allclose(values[0], serial(2)[0][0], rtol=1e-4, atol=1e-6)
    jax.device_get(state)
    assert sent == ["fetch", "run", "fetch"]


def test_steps_are_sent_ahead_of_workers_that_are_busy(train):
    state, losses = run(train, 1)
    workers = [worker.process for worker in launcher.workers()]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    for batch in BATCHES[1:5]:
        state, loss = train(state, batch)
        losses.append(loss)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    assert_allclose(losses, serial(5)[1])


@pytest.mark.parametrize("waits", ["fetch", "compute", "compile", "send"])
def test_ctrl_c_ends_any_wait_which_may_be_begun_again(train, waits):
    state, losses = run(train, 1)
    other = launcher.parallelize(evaluate, method=train, donate_argnums=())
    wait = {
        "fetch": lambda: np.asarray(losses[0]),
        "compute": lambda: losses[0].block_until_ready(),
        "compile": lambda: other(state, BATCHES[0]),
        "send": lambda: [launcher.prefetch(leaf) for leaf in jax.tree.leaves(state) * 2],
    }[waits]
    stopped = [psutil.Process(w.process) for w in launcher.workers()]
    for process in stopped:
        process.suspend()
    ctrl_c = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    ctrl_c.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        ctrl_c.join()
        for process in stopped:
            process.resume()
    wait()
    assert_allclose(train(state, BATCHES[1])[1], serial(2)[1][1])


def test_a_donated_array_says_so_when_it_is_used_again(train):
    state, _ = run(train, 1)
    train(state, BATCHES[1])
    weight = state[0]["w1"]
    assert weight.is_deleted()
    for use in (np.asarray, lambda x: train(state, BATCHES[1]), lambda x: x.copy_to_host_async()):
        with pytest.raises(ConsumedError, match=r"float32\[8, 8\].*donated to an earlier call"):
            use(weight)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_step_may_donate_what_a_slow_worker_has_yet_to_receive(train, slow):
    state, _ = run(train, 1)
    other = launcher.parallelize(evaluate, method=train, donate_argnums=())
    expected = float(other(state, BATCHES[0]))
    process = psutil.Process(launcher.workers()[slow].process)
    process.suspend()
    try:
        found = other(state, BATCHES[0])  # offers parameters to the worker that is stopped
        _, loss = train(state, BATCHES[1])  # donates them
        time.sleep(1)  # the other worker goes on as far as it can
    finally:
        process.resume()
    assert float(found) == expected
    assert_allclose(loss, serial(2)[1][1])


def test_an_array_given_twice_is_not_consumed_twice(train):
    state, _ = run(train, 1)
    twice = ({**state[0], "w2": state[0]["w1"]}, state[1])
    with pytest.raises(TypeError, match="given twice"):
        train(twice, BATCHES[1])
    assert not state[0]["w1"].is_deleted()


def test_a_warm_up_changes_nothing(train):
    state, _ = run(train, 1)
    expected = jax.device_get(state)
    before = live_arrays()
    train.warmup(state, BATCHES[1])
    assert_allclose(state, expected, rtol=0, atol=0)
    assert live_arrays() == before
    assert_allclose(train(state, BATCHES[1])[1], serial(2)[1][1])


def test_functions_alternate_and_leak_nothing(train):
    evaluating = launcher.parallelize(evaluate, method=train, donate_argnums=())
    state, _ = run(train, 1)
    alive = []
    for k in range(6):
        state, loss = train(state, BATCHES[k])
        value = evaluating(state, BATCHES[0])
        float(loss), float(value)
        alive.append(live_arrays())
    assert alive[2:] == alive[1:-1]
    expected = evaluate(jax.device_get(state), BATCHES[0])
    assert_allclose(value, expected)
    del state, loss, value
    assert sum(live_arrays()) < sum(alive[-1])


def test_typed_keys_stay_and_come_back():
    def start(key):
        return {"key": key, "w": jnp.ones((WIDTH, WIDTH))}

    def noisy(state, x):
        noise = jax.random.normal(state["key"], (WIDTH, WIDTH))

        def loss(w, x):
            h = x @ w
            launcher.mark_pipeline_boundary()
            return ((h @ noise) ** 2).mean()

        value, grad = launcher.value_and_grad(loss)(state["w"], x)
        return {"key": jax.random.split(state["key"])[0], "w": state["w"] - grad}, value

    train = launcher.parallelize(noisy, method=launcher.PipeshardParallel())
    state = train.create(start, jax.random.key(3), like=BATCHES[0])
    state, value = train(state, BATCHES[0])
    expected = jax.jit(noisy)(start(jax.random.key(3)), BATCHES[0])
    assert_allclose((state, value), expected, rtol=1e-4, atol=1e-6)
    key = jax.device_get(state)["key"]  # and given back by value
    state, value = train({**state, "key": key}, BATCHES[1])
    assert_allclose(value, jax.jit(noisy)(expected[0], BATCHES[1])[1], rtol=1e-4)


def test_arrays_are_brought_to_where_another_step_wants_them(train):
    everywhere = launcher.parallelize(evaluate, donate_argnums=())  # on all devices
    state, _ = run(train, 1)
    weight = state[0]["w1"]
    assert weight.placement == "whole, on device 1"
    assert everywhere.plan(state, weight).num_devices == 4
    value = everywhere(state, weight)  # an array on a worker may be the batch, too
    assert_allclose(value, evaluate(jax.device_get(state), np.asarray(weight)))
    assert not weight.is_deleted()


def test_compiled_steps_are_freed_with_their_functions():
    def once():
        other = launcher.parallelize(step, method=launcher.DataParallel())
        float(run(other, 1)[1][0])

    once()
    before = live_arrays()
    for _ in range(2):
        once()
    now = live_arrays()
    assert all(n <= b for n, b in zip(now, before, strict=True)), (now, before)


def test_static_arguments_and_new_shapes_compile_again(train):
    def scaled(state, batch, scale):
        state, loss = step(state, batch)
        return state, scale * loss

    scaling = launcher.parallelize(scaled, method=METHOD, static_argnums=2)
    state = scaling.create(init, jax.random.key(0), like=(BATCHES[0], 2))
    state, loss = scaling(state, BATCHES[0], scale=2)
    assert_allclose(loss, 2 * serial(1)[1][0])
    _, loss = scaling(state, BATCHES[1], 3)
    assert_allclose(loss, 3 * serial(2)[1][1])
    state, _ = run(train, 1)
    with pytest.warns(UserWarning, match=r"compiled again: x is float32\[12,8\], was float32"):
        train(state, BATCHES[0][:12])


def test_the_compiled_step_can_be_looked_into(train):
    executable = train.executable(jax.eval_shape(init, jax.random.key(0)), BATCHES[0])
    assert len(executable.plan.stages) == 4
    assert {host for stage in executable.plan.stages for host in stage.hosts} == {0, 1}
    assert any("stage.0" in name for name in executable.hlo_text())
    assert any("stage.3" in name for name in executable.hlo_text())
    state = executable.create(init, jax.random.key(0))
    (_, loss), times = executable.profile(state, BATCHES[0])
    assert_allclose(loss, serial(1)[1][0])
    assert all(seconds > 0 for seconds in times.stage_seconds)
    assert {task.stage for task in times.task_seconds} == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_driver_does_not_grow_with_the_model():
    def big(key):
        return [jax.random.normal(k, (2560, 2560)) for k in jax.random.split(key, 8)]

    def train_big(state, x):
        def loss(weights, x):
            for weight in weights:
                x = jnp.tanh(x @ weight)
                launcher.mark_pipeline_boundary()
            return (x**2).mean()

        value, grads = launcher.value_and_grad(loss)(state, x)
        return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], value

    train = launcher.parallelize(
        train_big, method=launcher.PipeshardParallel(stage_option=launcher.UniformStageOption(4))
    )
    x = np.ones((4, 2560), np.float32)
    train.plan(jax.eval_shape(big, jax.random.key(0)), x)  # what tracing takes is not the model
    before = psutil.Process().memory_info().rss
    state = train.create(big, jax.random.key(0), like=x)
    state, loss = train(state, x)
    assert np.isfinite(float(loss))
    assert sum(leaf.nbytes for leaf in state) == 8 * 2560 * 2560 * 4  # 210 MB
    assert psutil.Process().memory_info().rss - before < 40e6


def test_init_is_called_once_and_with_sense():
    with pytest.raises(SessionError, match=r"call launcher\.shutdown"):
        launcher.init("local")


def test_a_program_that_one_worker_refuses_leaves_the_session_usable(train):
    state, _ = run(train, 1)
    refusing, alive = launcher.workers()[1].process, []

    def impure(state, batch):
        state, loss = step(state, batch)
        return state, 2 * loss if os.getpid() == refusing else loss

    for _ in range(3):
        with pytest.raises(WorkerError, match="another program") as error:
            launcher.parallelize(impure, method=METHOD)(state, BATCHES[1])
        assert error.value.error_type == "PlanError"
        assert (error.value.worker, error.value.host, error.value.died) == ("worker_1", 1, False)
        alive.append(live_arrays())
    assert alive[1] == alive[2]
    assert_allclose(train(state, BATCHES[1])[1], serial(2)[1][1])


def test_a_batch_that_does_not_fit_is_refused_here(train):
    state, _ = run(train, 1)
    with pytest.raises(ValueError, match="microbatch"):
        train(state, BATCHES[0][:11])
    assert_allclose(train(state, BATCHES[1])[1], serial(2)[1][1])


def test_a_transformation_of_a_step_is_refused(train):
    state, _ = run(train, 1)
    with pytest.raises(TypeError, match=r"cannot be called under jax\.jit"):
        jax.jit(lambda batch: train(state, batch))(BATCHES[0])
    train(state, BATCHES[0])


@pytest.mark.slow
def test_a_killed_worker_ends_the_session_and_another_one_begins(train):
    state, losses = run(train, 2)
    fetched, unfetched = losses
    assert_allclose(fetched, serial(1)[1][0])
    ours = psutil.Process().children(recursive=True)
    assert {w.process for w in launcher.workers()} <= {process.pid for process in ours}
    os.kill(launcher.workers()[1].process, signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker_1 died") as error:
        float(train(state, BATCHES[2])[1])
    assert (error.value.host, error.value.died) == (1, True)
    logs = error.value.log.parent
    assert (logs / "lock").exists()  # by which it is known who is dead, and left this
    with pytest.raises(WorkerError, match="worker_1 died"):
        float(unfetched)
    launcher.shutdown()
    assert not logs.exists()
    launcher.shutdown()  # nothing is left to do
    assert not psutil.wait_procs(ours, timeout=20)[1]
    with pytest.raises(SessionError, match=r"has ended; call launcher\.init again"):
        float(unfetched)
    for use in (train, launcher.parallelize(step, devices=jax.devices()[:1])):
        with pytest.raises(SessionError, match=r"session has ended; call launcher\.init again"):
            use(state, BATCHES[0])
    assert_allclose(fetched, serial(1)[1][0])
    launcher.init("ray", num_nodes=2, num_devices_per_node=2)
    assert_allclose(run(train, 2)[1], serial(2)[1])  # the same function, on others


@pytest.mark.slow
def test_a_stopped_worker_is_told_of_and_ended(train):
    launcher.shutdown()
    launcher.init("ray", num_nodes=2, num_devices_per_node=2, step_timeout=10)
    state, losses = run(train, 2)
    losses[1].block_until_ready()
    stopped = psutil.Process(launcher.workers()[1].process)  # which has them
    ours = psutil.Process().children(recursive=True)
    stopped.suspend()
    with pytest.raises(launcher.HungError, match="no answer from worker_1") as error:
        float(losses[0])
    assert "for 10 s (launcher.init(step_timeout=...))" in str(error.value)
    assert "worker_1: its process was stopped (SIGSTOP" in str(error.value)
    with pytest.raises(launcher.HungError):
        train(state, BATCHES[2])
    stopped.suspend()  # again: to examine it, it was continued
    launcher.shutdown()
    assert not psutil.wait_procs(ours, timeout=60)[1]
    launcher.init("local", num_devices_per_node=4)
    assert_allclose(run(train, 2)[1], serial(2)[1])  # and here
