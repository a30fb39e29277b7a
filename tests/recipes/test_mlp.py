"""`recipes/models/mlp/model.py`: layers, loss and precision."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launcher.recipes import build_model


def build(precision="fp32", num_layers=3, output_relu=False):
    sizes = {"input_size": 6, "hidden_size": 10, "output_size": 2, "num_layers": num_layers}
    options = SimpleNamespace(name="mlp", widths=[], output_relu=output_relu, **sizes)
    return build_model(options, precision)


def random_batch(rows=4):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((rows, 6)), rng.standard_normal((rows, 2))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_each_dense_layer_is_one_pipeline_layer(num_layers):
    model = build(num_layers=num_layers)
    params = jax.eval_shape(model.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda p, b: model.loss(p, b, None))(params, random_batch())
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names.count("pipeline_boundary") == num_layers - 1
    assert names.count("dot_general") == num_layers


@pytest.mark.parametrize("output_relu", [False, True])
def test_the_loss_is_the_mean_squared_error(output_relu):
    model, batch = build(num_layers=2, output_relu=output_relu), random_batch()
    params = model.init(jax.random.key(0))
    first, last = params["layers_0"], params["output_layer"]
    hidden = np.maximum(batch["x"] @ first["kernel"] + first["bias"], 0)
    outputs = hidden @ last["kernel"] + last["bias"]
    outputs = np.maximum(outputs, 0) if output_relu else outputs
    expected = np.mean((outputs - batch["y"]) ** 2)
    loss, metrics = model.loss(params, batch, None)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert metrics == {}


def test_bf16_keeps_parameters_and_loss_in_fp32():
    model, batch = build("bf16"), random_batch()
    params = model.init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    assert model.loss(params, batch, None)[0].dtype == jnp.float32
    jaxpr = jax.make_jaxpr(lambda p, b: model.loss(p, b, None))(params, batch)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert {e.outvars[0].aval.dtype for e in products} == {jnp.dtype(jnp.bfloat16)}
