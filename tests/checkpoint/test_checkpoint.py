"""Checkpoints: exact, whole or not there, and readable by stock Orbax in any JAX program."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from launcher import checkpoint
from launcher.checkpoint import orbax_compat, write
from launcher.checkpoint.train_state import TrainState
from launcher.config.optimizer import AdamW
from launcher.train.optimizer import build_optimizer

sys.path.insert(0, str(Path(__file__).parent))
from halves import part_of


def metadata(every_steps=0):
    settings = {"train": {"checkpoint": {"every_steps": every_steps}}, "x": [1, 0.1]}
    return {"config": settings, "data": {"next_batch": 7}}


METADATA = metadata()

STOCK = """
import sys
import jax
import orbax.checkpoint as ocp
assert jax.device_count() == 1
assert not any(name.split(".")[0] == "launcher" for name in sys.modules)
with ocp.CheckpointManager(sys.argv[1]) as manager:
    assert manager.latest_step() == 7
    state = manager.restore(7)
with ocp.StandardCheckpointer() as checkpointer:
    again = checkpointer.restore(sys.argv[1] + "/7/default")
assert jax.tree.structure(state) == jax.tree.structure(again)
assert int(state["step"]) == 7 and state["key"].tolist() == [0, 3]
assert state["params"]["layer_0"]["kernel"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
assert state["params"]["layer_1"].dtype == "bfloat16"
assert state["model_state"]["norm"]["mean"].tolist() == [0, 1, 2, 3]
moments = state["opt_state"][1]
assert set(moments) == {"count", "mu", "nu"} and moments["mu"].keys() == state["params"].keys()
print("read")
"""

# What it says of a full disk, with the code and the words of a quota.
TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing local file "d/a1": Failed writing: "d/a1.__lock": '
    "Failed to write 4096 bytes to file 4: Disk quota exceeded [os_error_code='122']"
)


def make_state(stages=4):
    """A state whose parts lie on different devices, one of them split over two."""
    devices = jax.devices()
    params = {
        "layer_0": {"kernel": jnp.arange(8.0).reshape(2, 4), "bias": jnp.ones(4)},
        "layer_1": jnp.full((4, 4), 1.5, jnp.bfloat16),
    }
    optimizer, _ = build_optimizer(AdamW(weight_decay=0.1), 10)
    key = jax.random.key_data(jax.random.key(3))
    averages = {"count": jnp.int32(3), "norm": {"mean": jnp.arange(4.0)}}
    state = TrainState(jnp.int32(7), params, optimizer.init(params), key, averages)
    leaves, tree = jax.tree.flatten(state)
    placed = [jax.device_put(x, devices[i % stages]) for i, x in enumerate(leaves)]
    mesh = NamedSharding(Mesh(np.array(devices[:2]), "data"), PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.device_put(x, mesh) if x.shape == (2, 4) else x,
        jax.tree.unflatten(tree, placed),
    )


def test_a_state_comes_back_exactly_and_where_it_is_wanted(tmp_path):
    state = make_state()
    checkpoint.save(tmp_path, 7, checkpoint.copy_to_host(state), METADATA)
    where = SingleDeviceSharding(jax.devices()[5])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state)
    back = checkpoint.restore(tmp_path, 7, like)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert isinstance(back.opt_state[1], optax.ScaleByAdamState)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert (b.dtype, b.sharding) == (a.dtype, where)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("watched", [False, True])
def test_a_run_can_begin_to_watch_for_spikes_or_no_longer(tmp_path, watched):
    """Its record of steps is begun anew, or left where it is."""
    recent = jnp.ones((2, 200))
    state = dataclasses.replace(make_state(), recent=recent if watched else None)
    checkpoint.save(tmp_path, 7, checkpoint.copy_to_host(state), METADATA)
    where = SingleDeviceSharding(jax.devices()[5])
    wanted = dataclasses.replace(state, recent=None if watched else recent)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), wanted)
    back = checkpoint.restore(tmp_path, 7, like)
    jax.tree.map(np.testing.assert_array_equal, back.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, back.opt_state, state.opt_state)
    assert (back.recent is None) == watched
    if not watched:
        assert (np.isnan(back.recent).all(), back.recent.sharding) == (True, where)
    checkpoint.check_state(tmp_path / "7", like)


def test_stock_orbax_reads_it_on_one_device_without_our_code(tmp_path):
    checkpoint.save(tmp_path, 7, checkpoint.copy_to_host(make_state()), METADATA)
    result = subprocess.run(
        [sys.executable, "-c", STOCK, str(tmp_path)],
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "read\n"), result.stderr


def test_metadata_is_json_beside_the_arrays(tmp_path):
    checkpoint.save(tmp_path, 7, checkpoint.copy_to_host(make_state()), METADATA)
    assert checkpoint.read_metadata(tmp_path, 7) == METADATA
    on_disk = json.loads((tmp_path / "7" / "_CHECKPOINT_METADATA").read_text())
    assert on_disk["custom_metadata"] == METADATA


def test_the_latest_step_is_the_highest_that_is_whole(tmp_path):
    assert checkpoint.newest(tmp_path / "missing").step is None
    assert checkpoint.newest(tmp_path).step is None
    clutter(tmp_path)
    assert checkpoint.newest(tmp_path).step is None
    for step in (2, 10, 9):
        checkpoint.save(tmp_path, step, checkpoint.copy_to_host(make_state()), METADATA)
    assert checkpoint.newest(tmp_path).step == 10


def test_a_missing_step_is_a_file_not_found(tmp_path):
    checkpoint.save(tmp_path, 7, checkpoint.copy_to_host(make_state()), METADATA)
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(tmp_path, 8, make_state())


def test_the_newest_and_the_round_steps_are_kept(tmp_path):
    state = checkpoint.copy_to_host(make_state())
    for step in (100, 130, 160, 200, 230):
        checkpoint.save(tmp_path, step, state, metadata(every_steps=100), keep=2)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [100, 160, 200, 230]


def test_what_an_earlier_start_was_to_keep_is_kept_by_a_later_one(tmp_path):
    """Each by the settings it was saved with; of one that does not tell, nothing is deleted."""
    state = checkpoint.copy_to_host(make_state())
    for step, every_steps in ((100, 100), (130, 100), (200, 100), (230, 0), (300, 0)):
        checkpoint.save(tmp_path, step, state, metadata(every_steps), keep=2)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [100, 200, 230, 300]
    (tmp_path / "230" / "_CHECKPOINT_METADATA").write_text("{")
    for step in (310, 320):
        checkpoint.save(tmp_path, step, state, METADATA, keep=1)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [100, 200, 230, 320]


def test_a_state_that_is_saved_stays_so_where_old_ones_cannot_be_deleted(
    tmp_path, monkeypatch, caplog
):
    save(tmp_path, 5)
    rename = Path.rename

    def refuse(path, target):
        if path.name == "5":
            raise OSError(errno.EACCES, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    save(tmp_path, 6, keep=1)
    assert checkpoint.newest(tmp_path) == checkpoint.NewestIntact(6)
    assert "cannot delete what need not be kept" in caplog.text
    monkeypatch.undo()
    save(tmp_path, 7, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_a_step_that_cannot_be_replaced_is_what_it_was(tmp_path, monkeypatch):
    save(tmp_path, 5)
    before = (tmp_path / "5" / "checksums.json").read_text()
    rename = Path.rename

    def refuse(path, target):
        if path.name == "5.partial-0":
            raise OSError(errno.EACCES, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(checkpoint.SaveError, match="cannot save step 5"):
        save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    assert (tmp_path / "5" / "checksums.json").read_text() == before


def test_a_step_that_is_saved_again_is_replaced_and_newer_ones_do_not_count(tmp_path):
    for step in (5, 40, 5, 6):
        save(tmp_path, step, keep=1)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [6, 40]
    assert checkpoint.damage(tmp_path / "6") is None


def test_what_others_put_there_neither_hurts_nor_goes(tmp_path):
    save(tmp_path, 5)
    clutter(tmp_path)
    found = checkpoint.newest(tmp_path)
    assert (found.step, found.damaged) == (5, ())
    checkpoint.clear_partial_saves(tmp_path)
    save(tmp_path, 9, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [".DS_Store", "07", "30.orbax-checkpoint-tmp", "7", "8", "9", "foo"]
    )


def clutter(folder):
    """What is in a folder and is no checkpoint; and a save of ours that was cut off."""
    for name in ("7", "07", "foo", "30.orbax-checkpoint-tmp", "40.partial-ab/default"):
        (folder / name).mkdir(parents=True)
    for name in (".DS_Store", "8", "foo/file"):
        (folder / name).write_text("x")


def save(folder, step, **options):
    checkpoint.save(folder, step, checkpoint.copy_to_host(make_state()), METADATA, **options)


def test_several_processes_write_one_checkpoint(tmp_path):
    """Two writers, each with half of the leaves, as `copy_to_host` gives them to processes."""
    whole = checkpoint.copy_to_host(make_state())
    halves = [part_of(whole, parity) for parity in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        writers = (checkpoint.Writers(i, 2, "t") for i in range(2))
        for job in [
            threads.submit(checkpoint.save, tmp_path, 7, half, METADATA, writers=writer)
            for half, writer in zip(halves, writers, strict=True)
        ]:
            job.result(60)
    assert checkpoint.damage(tmp_path / "7") is None
    assert {p.name for p in tmp_path.iterdir()} == {"7"}
    assert not list((tmp_path / "7").glob("process_*"))
    where = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), make_state()
    )
    back = checkpoint.restore(tmp_path, 7, like)
    jax.tree.map(np.testing.assert_array_equal, back, make_state())


def test_what_goes_wrong_in_one_process_is_said_by_the_first(tmp_path):
    (tmp_path / "7.partial-t" / "default").mkdir(parents=True)
    (tmp_path / "7.partial-t" / "default" / "ocdbt.process_1").write_text("in the way")
    whole = checkpoint.copy_to_host(make_state())
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(
                checkpoint.save,
                tmp_path,
                7,
                part_of(whole, i),
                METADATA,
                writers=checkpoint.Writers(i, 2, "t"),
            )
            for i in range(2)
        ]
        for job in jobs:
            with pytest.raises(
                checkpoint.SaveError, match=f"cannot save step 7 in {tmp_path}: Not"
            ):
                job.result(60)
    assert checkpoint.newest(tmp_path).step is None


def test_a_process_that_writes_on_into_a_folder_that_is_gone_says_so(tmp_path, monkeypatch):
    """The first process has given up and deleted it, as TensorStore finds out while it writes; or
    this process afterwards, where TensorStore has made the folder again."""
    opened, checksums = orbax_compat.ts.open, write.checksums

    def lose():
        shutil.rmtree(tmp_path / "7.partial-t", ignore_errors=True)

    async def open_and_lose(*arguments, **options):
        store = await opened(*arguments, **options)
        lose()
        return store

    def lose_and_sum(*arguments, **options):
        lose()
        return checksums(*arguments, **options)

    monkeypatch.setattr(orbax_compat.ts, "open", open_and_lose)
    monkeypatch.setattr(write, "checksums", lose_and_sum)
    half = part_of(checkpoint.copy_to_host(make_state()), 1)
    with pytest.raises(checkpoint.SaveError, match=f"^cannot save step 7 in {tmp_path}: "):
        checkpoint.save(tmp_path, 7, half, METADATA, writers=checkpoint.Writers(1, 2, "t"))


@pytest.mark.parametrize("by", ["os", "tensorstore"])
def test_a_quota_that_is_used_up_is_named_and_the_last_checkpoint_stays(by, tmp_path, monkeypatch):
    save(tmp_path, 1)

    def refuse(*_, **__):
        if by == "os":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "some file")
        raise ValueError(TENSORSTORE)

    # The files' own writing in the one case; in the other what TensorStore makes of it.
    what = "write.checksums" if by == "os" else "orbax_compat.ts.open"
    monkeypatch.setattr(f"launcher.checkpoint.{what}", refuse)
    with pytest.raises(checkpoint.SaveError) as error:
        save(tmp_path, 2)
    assert str(error.value) == (
        f"cannot save step 2 in {tmp_path}: Disk quota exceeded. Your quota there is used up: "
        "free some space, or choose another run.dir."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpoint.newest(tmp_path) == checkpoint.NewestIntact(1)
    monkeypatch.undo()
    save(tmp_path, 2)
    assert checkpoint.newest(tmp_path) == checkpoint.NewestIntact(2)


def test_a_copy_outlives_the_arrays_it_was_made_of(tmp_path):
    state = make_state()
    copy = checkpoint.copy_to_host(state)
    before = np.array(copy.params["layer_0"]["kernel"])
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    overwrite(state.params["layer_0"]["kernel"])
    np.testing.assert_array_equal(copy.params["layer_0"]["kernel"], before)
