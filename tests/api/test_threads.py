"""Threads that use one session side by side: each gets its own results, and none waits for ever."""

import inspect
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from threads import NET, batch, in_threads, loss, step

import launcher
from launcher.api import messages
from launcher.api.messages import Messages
from launcher.api.step_worker import StepWorker
from launcher.cluster.errors import ClusterError, HungError
from launcher.testing import assert_allclose


def init(scale):
    return [jnp.eye(8, 16) * scale, jnp.eye(16, 8) * scale]


@pytest.fixture(scope="module")
def train():
    launcher.init("ray", num_nodes=2, num_devices_per_node=1)
    method = launcher.PipeshardParallel(num_micro_batches=2)
    yield launcher.parallelize(step, method=method, donate_argnums=())
    launcher.shutdown()


@pytest.mark.parametrize(
    ("threads", "steps"), [(4, 6), pytest.param(8, 50, marks=pytest.mark.slow)]
)
def test_each_thread_gets_its_own_results(train, threads, steps):
    """The first call is made in all of them at once, by two programs."""
    found = in_threads(threads, lambda i: [float(train(NET, batch(i))[1]) for _ in range(steps)])
    for thread, losses in enumerate(found):
        assert_allclose(losses, [float(loss(NET, batch(thread)))] * steps)


def created(train, thread, tmp_path):
    net = train.create(init, 1.0 + thread, like=batch(thread))
    return np.asarray(net[0]), np.eye(8, 16) * (1.0 + thread)


def read(train, thread, tmp_path):
    return float(train(NET, batch(thread))[1]), float(loss(NET, batch(thread)))


def prefetched(train, thread, tmp_path):
    value = train(NET, batch(thread))[1]
    launcher.prefetch([value])
    return float(value), float(loss(NET, batch(thread)))


def waited_for(train, thread, tmp_path):
    value = train(NET, batch(thread))[1].block_until_ready()
    assert value.placement == "whole, on device 1"
    return float(value), float(loss(NET, batch(thread)))


def warmed_up(train, thread, tmp_path):
    train.warmup(NET, batch(thread))
    return read(train, thread, tmp_path)


def recorded(train, thread, tmp_path):
    (_, value), timeline = train.timeline(NET, batch(thread))
    assert [part.process for part in timeline.steps[1]] == ["worker 0", "worker 1"]
    return float(value), float(loss(NET, batch(thread)))


def profiled(train, thread, tmp_path):
    (_, value), times = train.executable(NET, batch(thread)).profile(NET, batch(thread))
    assert len(times.stage_seconds) == 2
    return float(value), float(loss(NET, batch(thread)))


def compiled(train, thread, tmp_path):
    again = launcher.parallelize(
        step, method=launcher.PipeshardParallel(num_micro_batches=4), donate_argnums=()
    )
    return read(again, thread, tmp_path)


def asked(train, thread, tmp_path):
    texts = train.executable(NET, batch(thread)).hlo_text()
    return bool(texts), True


def compared(train, thread, tmp_path):
    net = train.create(init, 1.0 + thread, like=batch(thread))
    launcher.check_replicas(net)
    return read(train, thread, tmp_path)


def called_in_workers(train, thread, tmp_path):
    found = launcher.foreach_worker(lambda: thread), launcher.foreach_replica(lambda: -thread)
    return (*found, launcher.on_first(lambda: thread)), ([thread] * 2, [-thread] * 2, thread)


def saved_and_restored(train, thread, tmp_path):
    net = train.create(init, 1.0 + thread, like=batch(thread))
    folder = tmp_path / f"{thread}-{time.monotonic_ns()}"
    launcher.save(folder, net)
    return np.asarray(launcher.restore(folder, net)[0]), np.eye(8, 16) * (1.0 + thread)


def told_of(train, thread, tmp_path):
    return [worker.host for worker in launcher.workers()], [0, 1]


CALLS = {
    call.__name__: call
    for call in (
        *(created, read, prefetched, waited_for, warmed_up, recorded, profiled, compiled, asked),
        *(compared, called_in_workers, saved_and_restored, told_of),
    )
}


def test_the_calls_below_are_all_that_wait_for_workers(train, tmp_path, monkeypatch):
    """What a worker can be asked for is the public methods of its class."""
    sent, send = set(), Messages.send
    monkeypatch.setattr(
        Messages, "send", lambda self, name, *a, **k: sent.add(name) or send(self, name, *a, **k)
    )
    for call in CALLS.values():
        call(train, 0, tmp_path)
    own = {name for name, _ in inspect.getmembers(StepWorker, inspect.isfunction)}
    inherited = {name for name, _ in inspect.getmembers(StepWorker.__base__, inspect.isfunction)}
    asked_for = {name for name in own - inherited if name[0] != "_"} - {"do"}
    assert sent == asked_for | {"process"}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_answered_beside_steps_of_other_threads(train, tmp_path, name):
    calls = [*[CALLS[name]] * 3, *[read] * 4]
    for answer in in_threads(4, lambda i: [calls[i](train, i, tmp_path) for _ in range(2)]):
        assert isinstance(answer, list), answer
        for value, wanted in answer:
            if isinstance(wanted, (float, np.ndarray)):
                assert_allclose(value, wanted)
            else:
                assert value == wanted


def test_of_threads_that_donate_one_array_one_has_it(train):
    donating = launcher.parallelize(step, method=launcher.PipeshardParallel(num_micro_batches=2))
    net = donating.create(init, 1.0, like=batch(0))
    found = in_threads(4, lambda i: float(donating(net, batch(0))[1]))
    assert sorted(type(each).__name__ for each in found) == ["ConsumedError"] * 3 + ["float"]
    assert launcher.foreach_worker(lambda: 1) == [1, 1]  # the session goes on


class Call:
    """A call of a worker, of which the result is there."""

    def __init__(self, worker):
        self.worker = worker

    def result(self):
        return 1


@pytest.fixture
def group(monkeypatch):
    """Two workers of which nothing is answered but what is in `group.over`."""
    made = SimpleNamespace(handles=[SimpleNamespace(name=f"worker_{i}") for i in range(2)], over=[])

    def submit(*_):
        return tuple(map(Call, made.handles))

    def watch(**_):
        calls = iter(range(3))

        def watched(waiting):
            if next(calls, None) is None:
                raise HungError(f"no answer from {waiting[0].name}", {})

        return watched

    def ready(futures, *, timeout):
        time.sleep(min(timeout, 0.01))
        return [future for future in futures if future in made.over]

    made.call, made.watch, made.cause_of = submit, watch, lambda error: error
    monkeypatch.setattr(messages, "ready", ready)
    return made


def test_a_reply_that_never_comes_ends_the_waits_of_all_threads(group):
    """Each thread sends and waits; of one worker no reply comes."""
    sent = Messages(group)

    def work(thread):
        del thread
        replies = sent.send("wait", [])
        group.over.append(replies[0].future)
        return sent.answers(replies)

    found = in_threads(8, work)
    assert [str(each) for each in found] == ["no answer from worker_1"] * 8


def test_a_reply_that_was_taken_and_is_not_there_is_an_error(group):
    sent = Messages(group)
    replies = sent.send("wait", [])
    for queue in sent._sent:
        queue.clear()
    with pytest.raises(ClusterError, match="the reply of worker_0 is lost"):
        sent.answers(replies)
