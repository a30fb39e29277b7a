"""Snapshots of a worker's share: as they were taken, whole or not there, intact or not taken."""

import errno
import os
import random
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from launcher.arrays.stacked_array import StackedArray, sharding_of, spec_at
from launcher.checkpoint import HostPlace, Moment, intact, snapshot
from launcher.checkpoint.share_file import header_of
from launcher.checkpoint.snapshot import BUFFERS, Snapshots, memory_left, too_little
from launcher.checkpoint.train_state import TrainState
from launcher.cluster.ray import NodeFolder
from launcher.cluster.ray.node_folder import write_file_part

FLIPS = 200
HERE = HostPlace(3)
TWO = "two copies of its share take"


def make_state(step):
    """A state with shards, replicas, rows that lie apart, a scalar, and a type not of NumPy's."""
    mesh = Mesh(np.array(jax.devices()[:2]), "data")
    over, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    rows = [
        jax.device_put(jnp.full((3,), i + step, jnp.float32), SingleDeviceSharding(device))
        for i, device in enumerate(jax.devices()[:2])
    ]
    params = {
        "rows": StackedArray(rows),
        "split": jax.device_put(jnp.arange(600.0).reshape(2, -1) + step, over),
        "twice": jax.device_put(jnp.arange(5, dtype=jnp.bfloat16) * step, everywhere),
    }
    return TrainState(jnp.int32(step), params, {}, jnp.full(2, step, jnp.uint32))


def assert_is_state_of(step, found):
    def contents(array):
        return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]

    for value, expected in zip(*map(jax.tree.leaves, (found, make_state(step))), strict=True):
        assert (value.dtype, sharding_of(value)) == (expected.dtype, sharding_of(expected))
        assert contents(value) == contents(expected)


def keep(memory, step=0, place=HERE, attempt=0):
    return snapshot.keep_snapshots(memory, place, make_state(step), Moment(step, attempt))


def steps_in(memory, place=HERE):
    return {moment.step for moment in intact(place.all(memory))}


def state_in(memory, step):
    return intact(HERE.all(memory))[Moment(step, 0)].restored(like())


def like():
    return jax.tree.map(lambda leaf: spec_at(leaf, sharding_of(leaf)), make_state(0))


@pytest.fixture
def kept(tmp_path):
    """Snapshots in a folder, of which the states after steps 1 and 2 are taken."""
    kept = keep(tmp_path)
    for step in (1, 2):
        kept.take(step, make_state(step)).result()
    yield kept
    kept.close()
    assert {path.name for path in tmp_path.iterdir()} == {snapshot.LOCK}


def test_a_share_is_the_state_as_it_was_when_it_was_taken(kept, tmp_path, monkeypatch):
    """Though a step overwrites the arrays before they are copied, and the buffer is written anew
    after they are read."""
    may_copy, copy = threading.Event(), snapshot.copy_to
    monkeypatch.setattr(snapshot, "copy_to", lambda *args: may_copy.wait(60) and copy(*args))
    state = make_state(3)
    taken = kept.take(3, state)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    after = [overwrite(state.params[name]) for name in ("split", "twice")]
    jax.block_until_ready(after)
    may_copy.set()
    taken.result()
    found = state_in(tmp_path, 3)
    for buffer in kept._buffers:
        buffer.contents[:] = 255
    assert_is_state_of(3, found)


def test_a_changed_bit_is_found_wherever_it_is_and_the_older_one_is_taken(kept, tmp_path):
    draws, newest = random.Random(0), HERE.own(tmp_path) / BUFFERS[1]
    places = kept._layout.places
    read = [place.start + k for _, place in places for k in range(place.of(newest_of(kept)).nbytes)]
    for n in range(FLIPS):
        path = newest if n % 4 else header_of(newest)
        at = draws.choice(read) if n % 4 else draws.randrange(path.stat().st_size)
        with open(path, "r+b") as file:
            file.seek(at)
            before = file.read(1)
            flipped = bytes([before[0] ^ 1 << draws.randrange(8)])
            for byte, steps in ((flipped, {1}), (before, {1, 2})):
                file.seek(at)
                file.write(byte)
                file.flush()
                assert steps_in(tmp_path) == steps, (path, at)
    assert_is_state_of(1, state_in(tmp_path, 1))


def newest_of(kept):
    return max(kept._buffers, key=lambda buffer: buffer.step).contents


class Cut(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("where", ["forget", "reserve", "copy_to", "digest", "write", "replace"])
def test_one_that_is_cut_is_not_there_and_the_one_before_is(kept, tmp_path, monkeypatch, where):
    def cut(*arguments, **named):
        raise Cut

    def cut_after(real):
        return lambda *arguments, **named: cut(real(*arguments, **named))

    def half(buffer, values, starts):
        snapshot_copy(buffer, values[:2], starts[:2])
        raise Cut

    snapshot_copy, buffer = snapshot.copy_to, snapshot.Buffer
    places = {
        "forget": (buffer, "forget", cut_after(buffer.forget)),
        "reserve": (buffer, "reserve", cut_after(buffer.reserve)),
        "copy_to": (snapshot, "copy_to", half),
        "digest": (snapshot, "copy_to", cut_after(snapshot_copy)),
        "write": (snapshot, "write_whole", cut),
        "replace": (snapshot.os, "replace", cut),
    }
    monkeypatch.setattr(*places[where])
    with pytest.raises(Cut):
        kept.take(3, make_state(3)).result()
    monkeypatch.undo()
    assert steps_in(tmp_path) == {2}
    assert_is_state_of(2, state_in(tmp_path, 2))
    # The worker that takes this one's place continues from there, in the same memory.
    other = keep(tmp_path, 2)
    other.take(3, make_state(3)).result()
    assert steps_in(tmp_path) == {2, 3}
    other._thread.shutdown()


def test_a_full_folder_costs_a_snapshot_and_no_run(kept, tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot, "write_whole", full)
    for step in (3, 4):
        kept.take(step, state := make_state(step)).result()
    assert kept.hold(4, state).result().state().step.shards[0][1] == 4  # for a checkpoint
    kept.release()
    assert steps_in(tmp_path) == {2}  # in the buffer that was not written
    monkeypatch.undo()
    kept.take(5, make_state(5)).result()
    assert steps_in(tmp_path) == {2, 5}


def test_a_full_folder_keeps_none(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot.os, "posix_fallocate", full)
    told = keep(tmp_path)
    monkeypatch.undo()
    assert told.endswith("(No space left on device)")
    assert {path.name for path in tmp_path.iterdir()} == {snapshot.LOCK}


def test_of_another_way_nothing_stays(kept, tmp_path):
    keep(tmp_path, 1)
    assert steps_in(tmp_path) == {1}
    assert steps_in(tmp_path, HostPlace(4, 0, 2)) == set()


def test_what_a_host_has_kept_stays_where_its_number_changes(kept, tmp_path):
    moved = keep(tmp_path, 2, HostPlace(1))
    assert {path.name for path in tmp_path.iterdir()} == {"host_1", snapshot.LOCK}
    assert set(intact(HostPlace(1).all(tmp_path))) == {Moment(1, 0), Moment(2, 0)}
    moved.close()


def test_of_one_step_the_snapshot_of_the_attempt_before_is_written_over(kept, tmp_path):
    again = keep(tmp_path, 2, attempt=1)
    for step in (2, 3):
        again.take(step, make_state(step)).result()
    assert set(intact(HERE.all(tmp_path))) == {Moment(2, 1), Moment(3, 1)}


def test_what_a_checkpoint_is_written_from_stays_as_it_is(kept, tmp_path):
    state = make_state(3)
    kept.take(3, state)
    pages = kept.hold(3, state).result()
    assert steps_in(tmp_path) == {2, 3}  # it was copied once
    for step in (4, 5):
        kept.take(step, make_state(step)).result()
    assert steps_in(tmp_path) == {3, 5}
    parts = pages.state()
    assert parts.key.shards[0][1].tolist() == [3, 3]
    assert parts.params["rows"].shape == (2, 3)
    assert all(not leaf.others for leaf in jax.tree.leaves(vars(parts)))
    kept.release()
    kept.take(6, make_state(6)).result()
    assert steps_in(tmp_path) == {5, 6}


def test_a_buffer_without_a_name_is_for_checkpoints_alone():
    memory = Snapshots()
    for step in (1, 2):
        pages = memory.hold(step, make_state(step)).result()
        assert pages.state().step.shards[0][1] == step
        memory.release()
    assert memory.spent() > 0
    assert memory.spent() is None
    memory.close()


@pytest.mark.parametrize(("kind", "cost"), [("cpu", 1.5), ("gpu", 2.5)])
def test_a_snapshot_costs_processor_time_and_the_wait_for_a_gpu(kept, monkeypatch, kind, cost):
    """A copy that only waits, as on a busy machine, costs nothing."""
    assert kept.spent() > 0
    waits = iter((100.0, 102.0))
    processor = iter((*((1.0, 2.0) if kind == "cpu" else ()), 7.0, 7.5))
    clocks = {"perf_counter": lambda: next(waits), "thread_time": lambda: next(processor)}
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(snapshot.jax, "default_backend", lambda: kind)
    kept.take(3, make_state(3)).result()
    assert kept.spent() == cost


def test_half_of_the_memory_is_left_to_others(tmp_path, monkeypatch):
    mib = 2**20
    assert too_little(TWO, 100 * mib, shared=200 * mib, memory=300 * mib) is None
    told = "two copies of its share take 101 MiB, and 200 MiB of shared memory are free"
    assert too_little(TWO, 101 * mib, shared=200 * mib, memory=300 * mib) == told
    told = "two copies of its share take 100 MiB, and 10 MiB of memory are free"
    assert too_little(TWO, 100 * mib, shared=200 * mib, memory=10 * mib) == told
    monkeypatch.setattr(snapshot, "memory_left", lambda: 1000)
    assert keep(tmp_path).endswith("MiB of memory are free")
    assert {path.name for path in tmp_path.iterdir()} == {snapshot.LOCK}


@pytest.mark.parametrize(
    ("lines", "folder", "names"),
    [
        ("0::/job/step", "job", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpu:/a\n4:memory:/job/step",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_limits_of_cgroups_above_a_process_count(tmp_path, lines, folder, names):
    (tmp_path / "own").write_text(lines)
    limited = tmp_path / folder
    (limited / "step").mkdir(parents=True)
    limit, used, cached = names
    (limited / "step" / limit).write_text("max\n")
    for name, text in ((limit, "9000"), (used, "5000"), ("memory.stat", f"anon 1\n{cached} 500")):
        (limited / name).write_text(text)
    assert memory_left(tmp_path / "own", tmp_path) == 4500
    (limited / limit).write_text("max\n")
    assert memory_left(tmp_path / "own", tmp_path) > 4500
    assert memory_left(tmp_path / "none", tmp_path) > 4500


def test_a_snapshot_is_read_under_another_plan(kept, tmp_path):
    """Shards are cut in another dimension, rows that lay apart lie together and the reverse."""
    mesh = Mesh(np.array(jax.devices()[:3]), "data")
    across = NamedSharding(mesh, PartitionSpec(None, "data"))
    apart = [SingleDeviceSharding(device) for device in jax.devices()[1:3]]

    def replanned(name, leaf):
        if name == "rows":
            return jax.ShapeDtypeStruct((2, 3), leaf.dtype, sharding=across)
        rows = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=where) for where in apart]
        return StackedArray(rows) if name == "split" else leaf

    here, expected = like(), make_state(2)
    params = {name: replanned(name, leaf) for name, leaf in here.params.items()}
    (found,) = [each for moment, each in intact(HERE.all(tmp_path)).items() if moment.step == 2]
    replanned_state = replace(here, params=params)
    assert [name for name, _ in found.lacks(replanned_state)] == ["params.rows"] * 3
    params = found.restored(replanned_state).params
    assert sharding_of(params["rows"]) == across
    np.testing.assert_array_equal(
        params["rows"], [np.asarray(r) for r in expected.params["rows"].rows]
    )
    assert [row.sharding for row in params["split"].rows] == apart
    np.testing.assert_array_equal(
        [np.asarray(row) for row in params["split"].rows], expected.params["split"]
    )


class Beside(NodeFolder):
    """A folder of another host that stands on this machine, written without Ray."""

    def write(self, name, chunks, header):
        return write_file_part(self.path, name, list(chunks), header)


@pytest.fixture
def copied(kept, tmp_path):
    """The next host's place, with a copy of some pieces of the state after step 3."""
    next_host = HostPlace(4)
    (there := next_host.own(tmp_path / "next")).mkdir(parents=True)
    sent = [piece for piece in kept.sizes if piece[0] in ("params.rows", "params.twice")]
    assert kept.exchange(sent, Beside("", str(there)), 0) is None
    kept.take(3, make_state(3)).result()
    kept._sent.result()
    yield next_host
    shutil.rmtree(tmp_path / "next")


def test_a_copy_of_some_pieces_is_on_another_host(kept, copied, tmp_path):
    own, theirs = intact(HERE.all(tmp_path)), intact(copied.all(tmp_path / "next"))
    assert list(theirs) == [Moment(3, 0)]
    found, whole = theirs[Moment(3, 0)], own[Moment(3, 0)]
    assert found.shapes == whole.shapes
    assert set(found.shards) == {"params.rows", "params.twice"}
    for piece in found.holding.pieces:
        np.testing.assert_array_equal(found.copy_of(piece), whole.copy_of(piece))
    for step, count in ((3, 1), (2, 0)):  # of another way, nothing stays
        keep(tmp_path / "next", step, copied)
        assert len(intact(copied.all(tmp_path / "next"))) == count


def test_a_changed_bit_of_a_copy_is_found(kept, copied, tmp_path):
    draws = random.Random(1)
    (copy,) = copied.own(tmp_path / "next").glob("copy.3.0")
    start = {name: place.start for (name, _), place in reversed(kept._layout.places)}
    read = [start["params.twice"] + k for k in range(10)]
    for n in range(20):
        path = copy if n % 2 else header_of(copy)
        at = draws.choice(read) if n % 2 else draws.randrange(path.stat().st_size)
        with open(path, "r+b") as file:
            file.seek(at)
            before = file.read(1)
            for byte, count in ((bytes([before[0] ^ 1 << draws.randrange(8)]), 0), (before, 1)):
                file.seek(at)
                file.write(byte)
                file.flush()
                assert len(intact(copied.all(tmp_path / "next"))) == count, (path, at)


def test_a_copy_that_cannot_be_sent_costs_no_snapshot(kept, tmp_path, caplog):
    kept.exchange(list(kept.sizes), Beside("", str(tmp_path / "gone")), 0)
    kept.take(3, make_state(3)).result()
    kept._sent.result()
    assert kept.spent() > 0
    assert steps_in(tmp_path) == {2, 3}
    assert "step 3 is not copied to another host" in caplog.text


def test_too_little_memory_for_a_copy_is_told_and_one_that_is_not_taken_goes(
    kept, copied, tmp_path, monkeypatch
):
    other = keep(tmp_path / "next", 3, copied)
    monkeypatch.setattr(snapshot, "memory_left", lambda: 2**20)
    told = other.exchange([], Beside("", ""), 10 * 2**20)
    assert told.startswith("two copies of its share and two of a neighbour's take 20 MiB, and 1 M")
    assert list(intact(copied.all(tmp_path / "next"))) == [Moment(3, 0)]
    assert other.exchange([], Beside("", ""), 0) is None
    assert list(intact(copied.all(tmp_path / "next"))) == []
    other.close()


def test_a_copy_that_takes_long_holds_up_no_checkpoint_and_no_step_is_lost_meanwhile(
    kept, tmp_path, monkeypatch
):
    """The next snapshot waits for it: until then, the hosts have the older one in common."""
    may_send, real = threading.Event(), Beside.write
    monkeypatch.setattr(Beside, "write", lambda *args: may_send.wait(60) and real(*args))
    there = HostPlace(4).own(tmp_path / "next")
    there.mkdir(parents=True)
    kept.exchange(list(kept.sizes), Beside("", str(there)), 0)
    kept.hold(3, make_state(3)).result()
    kept.release()
    taken = kept.take(4, make_state(4))
    with pytest.raises(TimeoutError):
        taken.result(0.2)
    assert steps_in(tmp_path) == {2, 3}
    may_send.set()
    taken.result()
    assert steps_in(tmp_path) == {3, 4}
    kept._sent.result()
    assert sorted(moment.step for moment in intact([there])) == [3, 4]
    shutil.rmtree(tmp_path / "next")
