"""Checkpoints that a process of its own writes while this one trains."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from launcher import checkpoint
from launcher.checkpoint import background as background_module
from launcher.checkpoint import shards
from launcher.checkpoint.snapshot import Snapshots
from launcher.checkpoint.train_state import TrainState

sys.path.insert(0, str(Path(__file__).parent))
from halves import part_of

NICENESS = 1  # with the usual one it starts late where other tests keep the processors busy


def make_state(step):
    """A state with an array on two devices and one of a type that NumPy does not have."""
    two = NamedSharding(Mesh(np.array(jax.devices()[:2]), "data"), PartitionSpec("data"))
    params = {
        "split": jax.device_put(jnp.arange(3_000_000.0).reshape(2, -1) + step, two),
        "half": jnp.full((4, 4), 1.5, jnp.bfloat16),
    }
    return TrainState(jnp.int32(step), params, {}, jnp.zeros(2, jnp.uint32))


class Copies:
    """Memory that states are copied to, one after the other."""

    def __init__(self):
        self._snapshots = Snapshots()

    def of(self, state):
        self._snapshots.release()
        return self._snapshots.hold(0, state).result()

    def close(self):
        self._snapshots.close()


@pytest.fixture(scope="module")
def copies():
    copies = Copies()
    yield copies
    copies.close()


def restored(folder, step):
    where = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(make_state, 0)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
    return checkpoint.restore(folder, step, like)


@pytest.fixture(scope="module")
def background():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_module, "_NICENESS", NICENESS)
        background = checkpoint.Background()
        yield background
        background.close()
    assert not psutil.pid_exists(background.pid)


def test_what_it_writes_is_the_state_as_it_was_when_copied(background, copies, tmp_path):
    for step in (1, 2):
        state = make_state(step)
        copy = copies.of(state)
        overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
        state = overwrite(state.params["split"])
        background.save(tmp_path, step, copy, {"plan": step})
    for step in (1, 2):
        assert checkpoint.read_metadata(tmp_path, step) == {"plan": step}
        assert checkpoint.damage(tmp_path / str(step)) is None
        jax.tree.map(np.testing.assert_array_equal, restored(tmp_path, step), make_state(step))


@pytest.mark.slow
def test_one_that_is_stopped_is_ended_and_the_next_save_has_another(
    background, copies, tmp_path, monkeypatch
):
    monkeypatch.setattr("launcher.checkpoint.background._LOOK_SECONDS", 0.2)
    os.kill(background.pid, signal.SIGSTOP)
    before = background.pid
    with pytest.raises(checkpoint.SaveError, match="the process that writes it was stopped"):
        background.save(tmp_path, 1, copies.of(make_state(1)), {})
    assert background.pid != before
    background.save(tmp_path, 2, copies.of(make_state(2)), {})
    assert checkpoint.damage(tmp_path / "2") is None


def test_every_thread_of_it_gives_way_to_those_that_train(background, copies, tmp_path):
    background.save(tmp_path, 1, copies.of(make_state(1)), {})
    threads = [int(thread) for thread in os.listdir(f"/proc/{background.pid}/task")]
    assert len(threads) > 1  # those that write
    own = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert niceness == {min(own + NICENESS, 19)}
    # In a session of its own the kernel (`autogroup`) would give it an equal share.
    assert os.getsid(background.pid) == os.getsid(0)


def test_what_the_disk_refuses_is_said_in_the_same_words(background, copies, tmp_path):
    folder = tmp_path / "file"
    folder.write_text("in the way")
    with pytest.raises(checkpoint.SaveError, match=f"^cannot save step 1 in {folder}: Not a dir"):
        background.save(folder, 1, copies.of(make_state(1)), {})
    background.save(tmp_path, 2, copies.of(make_state(2)), {})


def test_signals_that_are_the_drivers_do_not_end_it(background, copies, tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(background.pid, number)
    background.save(tmp_path, 3, copies.of(make_state(3)), {})
    assert checkpoint.newest(tmp_path).step == 3


@pytest.mark.slow
def test_two_processes_write_one_checkpoint_and_a_killed_one_spoils_none(
    background, copies, tmp_path, monkeypatch
):
    """Each the state's half that is its own; after the death there is a new process."""
    pages, memory = [], [Copies(), Copies()]
    other = checkpoint.Background()
    try:
        for i in (0, 1):
            view = lambda state, i=i: part_of(shards.view_share(state), i)  # noqa: E731
            monkeypatch.setattr("launcher.checkpoint.snapshot.view_share", view)
            pages.append(memory[i].of(make_state(0)))
        monkeypatch.undo()
        writers = [checkpoint.Writers(i, 2, "t") for i in (0, 1)]
        other.save(tmp_path, 4, pages[1], {}, writers=writers[1])
        background.save(tmp_path, 4, pages[0], {}, writers=writers[0])
        os.kill(other.pid, signal.SIGKILL)
        told = f"cannot save step 5 in {tmp_path}: the process that writes it ended (signal 9)."
        for who, i in ((other, 1), (background, 0)):
            with pytest.raises(checkpoint.SaveError) as error:
                who.save(tmp_path, 5, pages[i], {}, writers=writers[i])
            assert str(error.value) == told
        assert [path.name for path in tmp_path.iterdir()] == ["4"]
        jax.tree.map(np.testing.assert_array_equal, restored(tmp_path, 4), make_state(0))
        other.save(tmp_path, 6, copies.of(make_state(6)), {})
    finally:
        other.close()
        for each in memory:
            each.close()
    assert checkpoint.newest(tmp_path).step == 6


PARENT = """
import time
from launcher.checkpoint import Background
print(Background().pid, flush=True)
time.sleep(1000)
"""


def test_it_ends_with_the_process_that_started_it():
    environ = os.environ | {"PYTHONPATH": str(Path(checkpoint.__file__).parents[2])}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_it_ends_without_a_word_where_nobody_asks_any_more():
    """As after a worker's death: its log is quoted."""
    asking, served = Pipe()
    asking.close()
    command = [sys.executable, "-c", background_module._PROGRAM, str(served.fileno())]
    environ = os.environ | {"PYTHONPATH": str(Path(checkpoint.__file__).parents[2])}
    done = subprocess.run(
        command, env=environ, pass_fds=[served.fileno()], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
