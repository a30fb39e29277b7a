"""Checkpoints: exact, whole or not there, and readable by stock Orbax in any JAX program."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from launcher.config.schema import Optimizer
from launcher.train import checkpoint
from launcher.train.optimizer import build_optimizer
from launcher.train.step import TrainState

METADATA = {"config": {"run": {"id": None}, "x": [1, 0.1]}, "data": {"next_batch": 7}}

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
moments = state["opt_state"][1]
assert set(moments) == {"count", "mu", "nu"} and moments["mu"].keys() == state["params"].keys()
print("read")
"""


def make_state(stages=4):
    """A state whose parts lie on different devices, one of them split over two."""
    devices = jax.devices()
    params = {
        "layer_0": {"kernel": jnp.arange(8.0).reshape(2, 4), "bias": jnp.ones(4)},
        "layer_1": jnp.full((4, 4), 1.5, jnp.bfloat16),
    }
    optimizer, _ = build_optimizer(Optimizer(weight_decay=0.1), 10)
    state = TrainState(
        jnp.int32(7), params, optimizer.init(params), jax.random.key_data(jax.random.key(3))
    )
    leaves, tree = jax.tree.flatten(state)
    placed = [jax.device_put(x, devices[i % stages]) for i, x in enumerate(leaves)]
    mesh = NamedSharding(Mesh(np.array(devices[:2]), "data"), PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.device_put(x, mesh) if x.shape == (2, 4) else x,
        jax.tree.unflatten(tree, placed),
    )


def test_a_state_comes_back_exactly_and_where_it_is_wanted(tmp_path):
    state = make_state()
    checkpoint.save(tmp_path, 7, checkpoint.copied(state), METADATA)
    where = SingleDeviceSharding(jax.devices()[5])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state)
    back = checkpoint.restore(tmp_path, 7, like)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert isinstance(back.opt_state[1], optax.ScaleByAdamState)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert (b.dtype, b.sharding) == (a.dtype, where)
        np.testing.assert_array_equal(a, b)


def test_stock_orbax_reads_it_on_one_device_without_our_code(tmp_path):
    checkpoint.save(tmp_path, 7, checkpoint.copied(make_state()), METADATA)
    result = subprocess.run(
        [sys.executable, "-c", STOCK, str(tmp_path)],
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "read\n"), result.stderr


def test_metadata_is_json_beside_the_arrays(tmp_path):
    checkpoint.save(tmp_path, 7, checkpoint.copied(make_state()), METADATA)
    assert checkpoint.read_metadata(tmp_path, 7) == METADATA
    on_disk = json.loads((tmp_path / "7" / "_CHECKPOINT_METADATA").read_text())
    assert on_disk["custom_metadata"] == METADATA


def test_the_latest_step_is_the_highest_that_is_whole(tmp_path):
    assert checkpoint.latest_step(tmp_path / "missing") is None
    assert checkpoint.latest_step(tmp_path) is None
    (tmp_path / "30.orbax-checkpoint-tmp").mkdir()  # a save that was cut off
    assert checkpoint.latest_step(tmp_path) is None
    for step in (2, 10, 9):
        checkpoint.save(tmp_path, step, checkpoint.copied(make_state()), METADATA)
    assert checkpoint.latest_step(tmp_path) == 10


def test_a_missing_step_is_a_file_not_found(tmp_path):
    checkpoint.save(tmp_path, 7, checkpoint.copied(make_state()), METADATA)
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(tmp_path, 8, make_state())


def test_the_newest_and_the_round_steps_are_kept(tmp_path):
    state = checkpoint.copied(make_state())
    for step in range(1, 8):
        checkpoint.save(tmp_path, step, state, METADATA, keep=2, keep_every=3)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [3, 6, 7]


def test_a_copy_outlives_the_arrays_it_was_made_of(tmp_path):
    state = make_state()
    copy = checkpoint.copied(state)
    before = np.array(copy.params["layer_0"]["kernel"])
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    overwrite(state.params["layer_0"]["kernel"])
    np.testing.assert_array_equal(copy.params["layer_0"]["kernel"], before)
