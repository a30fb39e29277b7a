"""`launcher.save` and `launcher.restore`: any pytree, there and back, here and on workers."""

import errno

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

import launcher
from launcher import checkpoint
from launcher.testing import assert_allclose


@struct.dataclass
class State:
    params: dict
    key: jax.Array


def sharded():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    return jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("d")))


def tree():
    params = {"a": [sharded(), (np.arange(2),)], "n": 3, "b": jnp.ones(4, jnp.bfloat16) / 3}
    return State(params, jax.random.key(3))


def test_any_tree_comes_back_to_where_it_lay(tmp_path):
    state = tree()
    launcher.save(tmp_path / "x", state)
    found = launcher.restore(tmp_path / "x", like=jax.tree.map(lambda x: x, state))
    assert_allclose(found, state, rtol=0)
    assert found.params["a"][0].sharding == state.params["a"][0].sharding
    assert type(found.params["n"]) is int
    assert found.params["b"].dtype == jnp.bfloat16
    launcher.save(tmp_path / "x", jnp.ones(4))  # in its place
    alone = launcher.restore(tmp_path / "x", like=jax.ShapeDtypeStruct((4,), jnp.float32))
    np.testing.assert_array_equal(alone, np.ones(4))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_checkpoint_is_replaced_with_a_word(tmp_path, said):
    for _ in range(3):
        launcher.save(tmp_path / "x", jnp.ones(4))
    assert said == [f"launcher.save replaces the checkpoint in {tmp_path / 'x'}"]


def test_stock_orbax_reads_it(tmp_path):
    launcher.save(tmp_path / "7", tree())
    with ocp.CheckpointManager(tmp_path) as manager:
        read = manager.restore(7, args=ocp.args.StandardRestore())
    np.testing.assert_array_equal(read["params"]["a"]["0"], np.arange(8.0))


def test_another_tree_and_a_damaged_checkpoint_are_refused(tmp_path):
    path = tmp_path / "x"
    launcher.save(path, {"w": jnp.ones(3), "b": jnp.ones(2)})
    for like, text in (
        ({"w": jnp.ones(3)}, "has b, which `like` does not have"),
        ({"w": jnp.ones(3), "b": jnp.ones(2), "c": 1}, "has no c, which `like` has"),
        (
            {"w": jnp.ones(4), "b": jnp.ones(2)},
            "does not fit: w is float32[3] there and float32[4] in like",
        ),
    ):
        with pytest.raises(launcher.RestoreError) as error:
            launcher.restore(path, like=like)
        assert str(error.value) == f"{path} {text}"
    (path / checkpoint.layout.ARRAYS / "_METADATA").unlink()
    with pytest.raises(launcher.RestoreError, match=r"is damaged: default/_METADATA is missing"):
        launcher.restore(path, like={"w": jnp.ones(3), "b": jnp.ones(2)})
    with pytest.raises(launcher.RestoreError, match="does not exist"):
        launcher.restore(tmp_path / "none", like=1.0)
    with pytest.raises(launcher.RestoreError, match="is not a checkpoint"):
        launcher.restore(tmp_path, like=1.0)


def test_what_cannot_be_saved_touches_nothing(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="it holds something else than a checkpoint"):
        launcher.save(tmp_path / "mine", jnp.ones(2))
    with pytest.raises(TypeError, match=r"a\.0 is str, and a checkpoint holds arrays and numbers"):
        launcher.save(tmp_path / "x", {"a": ["text"]})
    with pytest.raises(TypeError, match=r"two leaves of the tree are named a\.b; rename one"):
        launcher.save(tmp_path / "x", {"a": {"b": 1.0}, "a.b": 2.0})
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory") as error:
        launcher.save(tmp_path / "file" / "x", jnp.ones(2))
    assert error.value.errno in (None, errno.ENOTDIR)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


@pytest.mark.slow
def test_each_worker_writes_and_reads_its_shards(tmp_path):
    """Two stages on two workers; what they train to after a restore is to the bit the same."""

    def loss(weights, x):
        h = jnp.tanh(x @ weights[0])
        launcher.mark_pipeline_boundary()
        return jnp.mean((h @ weights[1] - x) ** 2)

    def train(state, x):
        value, grads = launcher.value_and_grad(loss)(state["w"], x)
        new = [w - 0.1 * g for w, g in zip(state["w"], grads, strict=True)]
        return {"w": new, "key": state["key"]}, value

    def init():
        return {"w": [jnp.eye(8), jnp.ones((8, 8)) / 8], "key": jax.random.key_data(KEY)}

    KEY = jax.random.key(1)
    launcher.init("ray", num_nodes=2, num_devices_per_node=2)
    try:
        method = launcher.PipeshardParallel(num_micro_batches=2)
        step = launcher.parallelize(train, method=method)
        x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
        state, _ = step(step.create(init, like=x), x)
        launcher.save(tmp_path / "x", {"state": state, "note": 2.5})
        assert len(list((tmp_path / "x" / "default").glob("ocdbt.process_*"))) == 2
        (tmp_path / "x2").write_text("")
        with pytest.raises(OSError, match="Not a directory"):  # and the session goes on
            launcher.save(tmp_path / "x2" / "y", state)
        again = launcher.restore(tmp_path / "x", like={"state": state, "note": 0.0})
        assert again["note"] == 2.5
        expected, _ = jax.device_get(step(state, x))
        found, _ = jax.device_get(step(again["state"], x))
    finally:
        launcher.shutdown()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    here = {"state": jax.eval_shape(init), "note": 0.0}  # in this process, without workers
    assert launcher.restore(tmp_path / "x", like=here)["state"]["w"][0].shape == (8, 8)
