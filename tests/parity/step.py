"""The trainings of `torch_figures.py` in JAX: plain train steps, as anybody writes them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from runtime.servers import planned
from runtime.servers import trained as served

import launcher
from launcher.trace import trace_step

HERE = Path(__file__).parent
BATCH = 32
RATES = {"toy": 1e-3, "mlp": 0.1}  # of gradient descent
PREFIX = "params."


def arrays_of(name):
    with np.load(HERE / f"{name}.npz") as file:
        return dict(file)


def batch_at(arrays, step):
    rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(arrays["x"])
    return {name: arrays[name][rows] for name in ("x", "y")}


def optimizer_of(name, optimizer):
    return optax.sgd(RATES[name]) if optimizer == "sgd" else optax.adam(1e-3)


def make_step(update):
    """A train step of a dict of parameters by flat names; each dense layer is a pipeline layer."""

    def loss(params, batch):
        h, names = batch["x"], list(dict.fromkeys(name.rpartition(".")[0] for name in params))
        for i, name in enumerate(sorted(names)):  # layers_0, …, output_layer
            if i:
                h = jax.nn.relu(h)
                launcher.mark_pipeline_boundary()
            h = h @ params[f"{name}.kernel"] + params[f"{name}.bias"]
        return jnp.mean((h - batch["y"]) ** 2)

    def step(state, batch):
        params, opt_state = state
        value, grads = launcher.value_and_grad(loss)(params, batch)
        updates, opt_state = update.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def trained(name, optimizer, steps, **how):
    """The losses before each update and the last parameters in float64, by a parallel method."""
    arrays, init, step = training(name, optimizer)
    step = launcher.parallelize(step, **how)
    state, losses = step.create(init, like=batch_at(arrays, 0)), []
    for k in range(steps):
        state, loss = step(state, batch_at(arrays, k))
        losses.append(loss)
    return np.array(jax.device_get(losses)), jax.device_get(state[0])


def training(name, optimizer):
    """The arrays, what makes the first state, and the step."""
    arrays, update = arrays_of(name), optimizer_of(name, optimizer)
    start = {name: array for name, array in arrays.items() if name.startswith(PREFIX)}

    def init():
        params = jax.tree.map(jnp.asarray, start)
        return params, update.init(params)

    return arrays, init, make_step(update)


def check(name, optimizer, **how):
    """Hold a training against PyTorch's: every loss and every last parameter."""
    expected = arrays_of(name)[f"torch.float64.{optimizer}.losses"]
    equals_torch(name, optimizer, *trained(name, optimizer, len(expected), **how))


def check_on_workers(name, optimizer, method, workers, devices):
    """Hold workers' trainings through parameter servers against PyTorch's; their parameters."""
    arrays, init, step = training(name, optimizer)
    steps = len(arrays[f"torch.float64.{optimizer}.losses"])
    traced = trace_step(step, (jax.eval_shape(init), batch_at(arrays, 0)))
    plan = planned(traced, method, workers, devices)
    found = served(traced, plan, init, [batch_at(arrays, k) for k in range(steps)])
    for state, losses in found:
        equals_torch(name, optimizer, np.array(losses), state[0])
    return [state[0] for state, _ in found]


def equals_torch(name, optimizer, losses, params):
    figures, of = arrays_of(name), f"torch.float64.{optimizer}."
    assert losses.dtype == np.float64
    np.testing.assert_allclose(losses, figures[f"{of}losses"], rtol=1e-13)
    for leaf, value in params.items():
        np.testing.assert_allclose(value, figures[of + leaf], rtol=1e-11, atol=1e-14)
