"""`train.init_from=x.npz` and `task=export`: a model's arrays by flat names, there and back."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from launcher import checkpoint
from launcher.checkpoint.train_state import TrainState
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.driver.planning.init_from import check_start, find_start
from launcher.driver.tasks.export import ExportTask

PARAMS = {
    "layers": [{"kernel": jnp.arange(24.0).reshape(4, 6) / 7}, {"kernel": jnp.ones((4, 1))}],
    "scale": jnp.arange(3, dtype=jnp.bfloat16) / 3,
}
STATE = {"count": jnp.int32(7)}
NAMES = {
    "params.layers.0.kernel": ((4, 6), np.float32),
    "params.layers.1.kernel": ((4, 1), np.float32),
    "params.scale": ((3,), np.float32),
    "model_state.count": ((), np.int32),
}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """The settings of a run with two checkpoints."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "mine" / "checkpoints"
    for step, factor in ((3, 2), (6, 1)):
        params = jax.tree.map(lambda x, factor=factor: x * factor, PARAMS)
        state = TrainState(jnp.int32(step), params, {"mu": params}, jnp.zeros(2, jnp.uint32), STATE)
        checkpoint.save(folder, step, checkpoint.copy_to_host(state), {})
    return lambda *words: load(["task=export", "run.id=mine", *words])


def write(config):
    ExportTask().run(config, Console(quiet=True))


def like(dtype=None):
    """The model's shapes, sharded over two devices where their rows allow it."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])

    def one(x):
        spec = PartitionSpec("d") if x.ndim == 2 else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=NamedSharding(mesh, spec))

    return {"params": jax.tree.map(one, PARAMS), "model_state": jax.tree.map(one, STATE)}


def test_weights_that_are_exported_come_back_to_the_bit(saved, tmp_path):
    write(saved())
    file = tmp_path / "outputs" / "mine" / "weights-6.npz"
    assert file.stat().st_mode & 0o777 == 0o600
    with np.load(file) as arrays:
        assert {name: (arrays[name].shape, arrays[name].dtype) for name in arrays} == NAMES
    check_start(str(file), file, like())
    read = checkpoint.restore_model(file, like())
    for made, original, wanted in zip(
        *map(jax.tree.leaves, (read, {"params": PARAMS, "model_state": STATE}, like())), strict=True
    ):
        np.testing.assert_array_equal(made, original)
        assert (made.dtype, made.sharding) == (original.dtype, wanted.sharding)


def test_a_step_and_a_file_are_chosen(saved, tmp_path):
    write(saved("export.step=3", "export.path=w.npz", "run.shared=true"))
    with np.load(tmp_path / "w.npz") as arrays:
        np.testing.assert_array_equal(arrays["params.layers.1.kernel"], np.full((4, 1), 2.0))
    before = (tmp_path / "w.npz").read_bytes()
    for words, text in {
        ("export.path=w.npz",): "export.path=w.npz exists already (on the command line). Name an",
        ("export.path=no/w.npz",): "export.path=no/w.npz cannot be made: no is not a folder (on",
        ("export.step=4",): "run.id=mine cannot be exported: outputs/mine/checkpoints/4 does not",
        ("run.id=none",): "run.id=none cannot be exported: outputs/none does not exist. Check run.",
    }.items():
        with pytest.raises(ConfigError) as error:
            write(saved(*words))
        assert str(error.value).startswith(text.partition(" (on")[0])
    assert (tmp_path / "w.npz").read_bytes() == before
    with pytest.raises(ConfigError, match="task=export does not say which run"):
        load(["task=export"])


def test_a_file_of_ones_own_may_hold_other_arrays_and_wider_types(tmp_path):
    arrays = {
        name: np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / 3
        for name, (shape, _) in NAMES.items()
    }
    arrays["model_state.count"] = np.int64(5)
    np.savez(tmp_path / "x.npz", x=np.ones((9, 2)), **arrays)
    path = tmp_path / "x.npz"
    check_start("x.npz", path, like())
    read = checkpoint.restore_model(path, like())
    kernel = arrays["params.layers.0.kernel"].astype(np.float32)
    np.testing.assert_array_equal(read["params"]["layers"][0]["kernel"], kernel)
    scale = arrays["params.scale"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(read["params"]["scale"], scale)
    assert int(read["model_state"]["count"]) == 5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"params.scale": None}, "it has no params.scale, which the model has"),
        (dict.fromkeys(NAMES), "it has no model_state.count, params.layers.0.kernel, params.lay"),
        ({"params.bias": np.ones(2)}, "it has params.bias, which the model does not have"),
        ({"params.scale": np.ones(4)}, "params.scale is (4,) there and (3,) in the model"),
        ({"params.scale": np.ones(3, complex)}, "params.scale is of type complex128 there and bf"),
        (
            {"model_state.count": np.float64(1)},
            "model_state.count is of type float64 there and in",
        ),
        (
            {"params.scale": np.array(["a", "b", "c"])},
            "params.scale is of type <U1 there and bf",
        ),
    ],
)
def test_arrays_of_another_model_are_refused_by_name(tmp_path, change, text):
    arrays = {name: np.ones(shape, dtype) for name, (shape, dtype) in NAMES.items()} | change
    path = tmp_path / "x.npz"
    np.savez(path, other=1, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ConfigError) as error:
        check_start("x.npz", path, like())
    assert str(error.value).startswith(f"train.init_from=x.npz does not fit the model: {text}")
    assert "task=export writes such a file of a run" in str(error.value)


def test_a_file_to_start_from_is_looked_at_before_anything_starts(tmp_path, caplog):
    config = load([])
    np.savez(tmp_path / "x.npz", w=1)
    asked = replace(config, train=replace(config.train, init_from=str(tmp_path / "x.npz")))
    caplog.set_level("INFO", "launcher")
    assert find_start(asked, 0) == tmp_path / "x.npz"
    assert caplog.messages == [f"parameters from {tmp_path / 'x.npz'}"]
    np.savez(tmp_path / "x.npz", w=np.array([{}], object))
    with pytest.raises(ConfigError, match="'w' holds Python objects, which"):
        find_start(asked, 0)
