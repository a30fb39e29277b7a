"""The loss of tokens in chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from filled import filled_params

from launcher.config.errors import ConfigError
from launcher.config.reader import from_dict
from launcher.recipes import build_model
from launcher.recipes.models.bert import BERTOptions
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.losses import (
    classification,
    cross_entropy,
    mean_of,
    scores_in_chunks,
    scores_of,
)

SIZES = {
    "vocab_size": 2048, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "sequence_length": 64,
}  # fmt: skip
OPTIONS = {
    "gpt_tied": GPTOptions(**SIZES).filled(),
    "gpt_untied": GPTOptions(**SIZES, tie_embeddings=False).filled(),
    "llama": LlamaOptions(**SIZES).filled(),
    "bert": BERTOptions(**SIZES).filled(),
}


def with_gradient(options):
    """The compiled loss and gradient, and their arguments."""
    model = build_model(options, "fp32")
    params = filled_params(model)
    if "head_bias" in params:
        params["head_bias"] = np.random.default_rng(1).normal(size=2048).astype(np.float32)
    tokens = np.random.default_rng(0).integers(2048, size=(8, 65)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if options.name == "bert":
        batch["weights"] = np.float32(tokens[:, 1:] % 7 == 0)
    both = jax.jit(lambda p, b: jax.value_and_grad(model.loss, has_aux=True)(p, b, None))
    return both.lower(params, batch).compile(), params, batch


@pytest.mark.devices(1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["bert", "gpt_untied", "gpt_tied", "llama"])
def test_chunks_give_the_plain_loss_and_its_gradient_in_less_memory(name):
    plain, params, batch = with_gradient(OPTIONS[name])
    chunked, *_ = with_gradient(dataclasses.replace(OPTIONS[name], loss_chunks=8))
    ((want, _), slopes), ((got, _), found) = plain(params, batch), chunked(params, batch)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, slopes)
    used = [c.memory_analysis().temp_size_in_bytes for c in (chunked, plain)]
    assert used[0] < used[1] / 2


def test_in_16_bits_the_gradient_is_added_up_in_32():
    hidden = jax.random.normal(jax.random.key(0), (4, 64, 16), jnp.bfloat16)
    matrix = jax.random.normal(jax.random.key(1), (16, 2048))
    targets = jnp.zeros((4, 64), jnp.int32)

    def slope(dtype, chunks):
        def total(m):
            return scores_in_chunks(hidden.astype(dtype), m, targets, dtype, chunks)["loss"].sum()

        return jax.jit(jax.grad(total))(matrix)

    # In one piece it is added up as XLA does: since JAX 0.12, on CPUs, in 16 bits.
    found, wanted = slope(jnp.bfloat16, 16), slope(jnp.float32, 1)
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=5e-3 * abs(wanted).max())
    assert found.dtype == jnp.float32


def test_the_label_is_not_looked_up():
    """The values and slopes are those of a look-up, whose gradient is a scatter."""
    logits = 100 * jax.random.normal(jax.random.key(0), (3, 8, 32))
    labels = jax.random.randint(jax.random.key(1), (3, 8), 0, 32)

    def slopes(of):
        return jax.value_and_grad(lambda logits: of(logits, labels).sum())

    want = slopes(optax.softmax_cross_entropy_with_integer_labels)
    jax.tree.map(np.testing.assert_array_equal, slopes(cross_entropy)(logits), want(logits))
    scatters = [
        "scatter" in str(jax.make_jaxpr(each)(logits)) for each in (slopes(cross_entropy), want)
    ]
    assert scatters == [False, True]


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_chunks_that_are_not_equal_are_refused(name):
    with pytest.raises(ConfigError, match=r"model.loss_chunks=3"):
        from_dict({"model": {"name": name, **SIZES, "loss_chunks": 3}})


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_accuracy_is_the_share_of_the_weights_whose_target_is_the_likeliest(chunks):
    rng = np.random.default_rng(0)
    hidden, matrix = rng.normal(size=(4, 8, 16)), rng.normal(size=(16, 32))
    likeliest = (hidden @ matrix).argmax(-1)
    is_right = rng.random((4, 8)) < 0.5
    targets = jnp.asarray(np.where(is_right, likeliest, (likeliest + 1) % 32), jnp.int32)
    weights = rng.random((4, 8)).astype(np.float32)
    scores = scores_in_chunks(
        jnp.float32(hidden), jnp.float32(matrix), targets, jnp.float32, chunks, evaluates=True
    )
    _, metrics = mean_of(scores, {})
    assert float(metrics["accuracy"]) == pytest.approx(is_right.mean())
    loss, metrics = mean_of(scores, {"weights": weights})
    share = (is_right * weights).sum() / weights.sum()
    assert float(metrics["accuracy"]) == pytest.approx(share, rel=1e-6)
    assert float(metrics["weight"]) == pytest.approx(weights.sum(), rel=1e-6)
    mean = (scores["loss"] * weights).sum() / weights.sum()
    assert float(loss) == pytest.approx(float(mean), rel=1e-6)


def test_of_equally_likely_tokens_and_classes_the_first_is_the_answer():
    logits = jnp.float32([[0, 2, 2, 1], [0, 2, 2, 1], [0, 2, 2, 1], [jnp.nan] * 4])
    answers = jnp.int32([1, 2, 3, 0])
    right = scores_of(logits[None], answers[None], evaluates=True)["accuracy"]
    assert right.tolist() == [[1, 0, 0, 0]]
    zeros = jnp.zeros((4, 4))  # as a classifier is that begins with zeros
    assert float(classification(zeros, answers)[1]["accuracy"]) == 0.25
    assert float(scores_of(zeros, answers, evaluates=True)["accuracy"].mean()) == 0.25
