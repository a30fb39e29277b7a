"""Train steps that the tests run by many plans, in one process or in several."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where another process imports this
import several
from filled import filled_params

import launcher
from launcher.recipes import build_model
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.mlp import MLPOptions

ROWS, ROUNDS = 24, 5
_GPT = {
    "vocab_size": 32, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "sequence_length": 8,
    "mlp_ratio": 2,
}  # fmt: skip
RECIPES = {
    "mlp": MLPOptions(input_size=8, hidden_size=16, output_size=4, num_layers=4),
    "gpt_tied": GPTOptions(**_GPT, tie_embeddings=True).filled(),
    "gpt_untied": GPTOptions(**_GPT, tie_embeddings=False).filled(),
    "gpt_chunks": GPTOptions(**_GPT, tie_embeddings=True, loss_chunks=2).filled(),
    "gpt_short": GPTOptions(**_GPT | {"num_layers": 2}, tie_embeddings=False).filled(),
}
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 8), eps=1e-4)
)
# A chain of layers for plans of up to so many stages, on a batch that most numbers divide.
CHAIN_LAYERS, CHAIN_WIDTH, CHAIN_ROWS, CHAIN_ROUNDS = 7, 12, 5040, 3


@functools.cache
def training(name):
    """A train step, `init(key)` of its state, and its batches."""
    if name == "tiny":
        return tiny.step, tiny.init, tiny.BATCHES
    return {"chain": _chain, "gan": _gan}.get(name, functools.partial(_recipe, name))()


def _recipe(name):
    options = RECIPES[name]
    model = build_model(options, "fp32")

    def init(key):
        return first_state(filled_params(model, std=0.02 if options.name == "gpt" else None))

    def step(state, batch):
        return update(state, lambda p: model.loss(p, batch, None)[0])

    rng = np.random.default_rng(0)
    if options.name == "mlp":
        xs = [rng.normal(size=(ROWS, options.input_size)).astype(np.float32) for _ in range(ROUNDS)]
        return step, init, [{"x": x, "y": x[:, : options.output_size] ** 2} for x in xs]
    size = ROWS, options.sequence_length + 1
    texts = [rng.integers(0, options.vocab_size, size).astype(np.int32) for _ in range(ROUNDS)]
    return step, init, [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in texts]


def _chain():
    """With a weight shared by the first and the last layer, and a value that skips some."""

    def init(key):
        rng = np.random.default_rng(0)
        shape = CHAIN_LAYERS - 1, CHAIN_WIDTH, CHAIN_WIDTH
        weights = [jnp.asarray(w, jnp.float32) for w in rng.normal(size=shape) / 3]
        return first_state({"weights": weights, "biases": [jnp.zeros(CHAIN_WIDTH)] * shape[0]})

    def step(state, x):
        def loss(params):
            h = x
            for i in range(CHAIN_LAYERS):
                if i:
                    launcher.mark_pipeline_boundary()
                k = i % (CHAIN_LAYERS - 1)
                h = jnp.tanh(h @ params["weights"][k] + params["biases"][k])
                early = h if i == 1 else early if i else None  # noqa: F821
                h = h + early if i == CHAIN_LAYERS - 2 else h
            return ((h - x) ** 2).mean()

        return update(state, loss)

    rng = np.random.default_rng(1)
    size = CHAIN_ROWS, CHAIN_WIDTH
    return step, init, [rng.normal(size=size).astype(np.float32) for _ in range(CHAIN_ROUNDS)]


def _gan():
    """Two losses and two optimizers; the critic's loss is of a layer less."""
    step, init = several.ours(several.generated_outside)

    def with_one_number(state, batch):
        state, losses = step(state, batch)
        return state, losses["d"] + losses["g"]

    rng = np.random.default_rng(2)
    batches = [{k: rng.normal(size=(ROWS, 4)).astype(np.float32) for k in "xy"} for _ in range(3)]
    return with_one_number, lambda key: init(), batches


def first_state(params):
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}


def update(state, loss):
    value, grads = launcher.value_and_grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, value


def run(step, state, batches):
    """The last state and each step's loss."""
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return jax.device_get(state), losses


@functools.cache
def serial(name):
    """On one device: outside of a traced step, `launcher.value_and_grad` is JAX's own."""
    step, init, batches = training(name)
    return run(jax.jit(step), jax.jit(init)(jax.random.key(0)), batches)


def assert_same(got, want):
    """To 1e-5 of an array's largest entry: of a sum whose terms cancel, no more is known."""

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max(initial=0)))

    jax.tree.map(close, got, want)
