"""A model whose layers are stacked starts from what the same model with layers apart has saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher import checkpoint
from launcher.arrays.stacked_array import StackedArray
from launcher.checkpoint.flat import sources, write_flat
from launcher.checkpoint.train_state import TrainState
from launcher.testing import assert_allclose

LAYERS = 3
WHOLE = {"kernel": jnp.arange(24.0).reshape(LAYERS, 4, 2), "bias": jnp.arange(6.0).reshape(3, 2)}
HEAD = {"head": {"kernel": jnp.ones((2, 2))}}


def layer(i):
    return {name: value[i] for name, value in WHOLE.items()}


STACKED = {"layers": {"mlp": WHOLE}, **HEAD}
APART = {**{f"layers_{i}": {"mlp": layer(i)} for i in range(LAYERS)}, **HEAD}
LISTED = {"layers": [{"mlp": layer(i)} for i in range(LAYERS)], **HEAD}
MODELS = {"stacked": STACKED, "apart": APART, "listed": LISTED}


def on(device):
    mesh = Mesh(np.array(jax.devices()[device : device + 1]), ("d",))
    return NamedSharding(mesh, PartitionSpec())


def placed(x, device=0):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(device))


def in_stages(x):
    """A stacked array with a row a device."""
    return StackedArray([placed(row, i) for i, row in enumerate(x)])


def stored(params, kind, folder):
    if kind == "npz":
        write_flat(folder / "x.npz", {"params": params}, private=False)
        return folder / "x.npz"
    state = TrainState(jnp.int32(1), params, {"mu": params}, jnp.zeros(2, jnp.uint32))
    checkpoint.save(folder, 1, checkpoint.copy_to_host(state), {})
    return folder / "1"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["checkpoint", "npz"])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        *(("stacked", here) for here in (*MODELS, "in stages")),
        *((there, here) for there in ("apart", "listed") for here in ("stacked", "in stages")),
    ],
)
def test_each_starts_from_what_the_other_has_saved(kind, there, here, tmp_path):
    path = stored(MODELS[there], kind, tmp_path)
    params = jax.tree.map(placed, MODELS.get(here))
    if here == "in stages":
        params = {"layers": {"mlp": jax.tree.map(in_stages, WHOLE)}, **jax.tree.map(placed, HEAD)}
    checkpoint.check_model(path, {"params": params})
    found = checkpoint.restore_model(path, {"params": params})["params"]
    assert_allclose(found, MODELS.get(here, STACKED), rtol=0)
    if here == "in stages":
        rows = found["layers"]["mlp"]["kernel"]
        assert [row.sharding for row in rows] == [on(i) for i in range(LAYERS)]


def test_other_numbers_of_layers_are_named(tmp_path):
    fewer = {name: x for name, x in APART.items() if name != "layers_2"}
    path = stored(STACKED, "checkpoint", tmp_path / "a")
    with pytest.raises(checkpoint.Mismatch, match=r"mlp\.\w+ holds 3 layers there, .* has 2"):
        checkpoint.check_model(path, {"params": fewer})
    path = stored(fewer, "checkpoint", tmp_path / "b")
    with pytest.raises(checkpoint.Mismatch, match=r"it has no params\.layers\.mlp\.bias"):
        checkpoint.check_model(path, {"params": STACKED})
    path = stored(APART, "checkpoint", tmp_path / "c")
    two = {"layers": {"mlp": jax.tree.map(lambda x: x[:2], WHOLE)}, **HEAD}
    with pytest.raises(checkpoint.Mismatch, match=r"it has no params\.layers\.mlp\.bias"):
        checkpoint.check_model(path, {"params": two})


def test_names_are_matched_by_any_of_their_parts():
    wanted = {"params.a.b.w": (2, 5), "params.x_1.w": (4,), "params.same": (2,)}
    there = {"params.a_0.b.w": (5,), "params.a_1.b.w": (5,), "params.x.w": (3, 4)}
    assert sources(wanted, {**there, "params.same": (7,)}) == {
        "params.a.b.w": ("params.a_0.b.w", "params.a_1.b.w"),
        "params.x_1.w": ("params.x.w", 1),
        "params.same": "params.same",
    }
