"""Decoders with a cache against the whole model; sampling; tokens and text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled_params
from whole_logits import whole_logits

from launcher.recipes import InputError, build_model
from launcher.recipes.models import decoding
from launcher.recipes.models.decoding import Generator, Sampling, build_decoder, draw
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.mlp import MLPOptions
from launcher.recipes.models.moe import MoEOptions

SMALL = {"vocab_size": 40, "sequence_length": 16, "num_layers": 2, "num_heads": 4}
SMALL |= {"hidden_size": 16}
MODELS = {
    "gpt": GPTOptions(**SMALL).filled(),
    "gpt_untied_scan": GPTOptions(**SMALL, tie_embeddings=False, scan_layers=True).filled(),
    "llama": LlamaOptions(**SMALL, num_kv_heads=2).filled(),
    "qwen": LlamaOptions(**SMALL, head_norm=True, qkv_bias=True, tie_embeddings=True).filled(),
    "mistral": LlamaOptions(**SMALL, sliding_window=3, scan_layers=True).filled(),
    "gemma": LlamaOptions(**SMALL, scale_embeddings=True, activation="gelu").filled(),
    # A text of two tokens is no multiple of a group, and half of the tokens would be dropped.
    "moe": MoEOptions(
        **SMALL, num_experts=4, capacity_factor=0.5, group_size=4, shared_size=8, expert_every=2
    ).filled(),
    "mixtral": MoEOptions(
        **SMALL, num_experts=4, capacity_factor=0.0, sliding_window=3, scan_layers=True
    ).filled(),
}
FAST = "mistral", "moe"
PROMPTS = [[1, 2, 3], [7, 8, 9, 10, 11], [39]]


def whole(options, params):
    """The logits of all tokens of a text, without a cache; of experts, that drop none."""
    forward = jax.jit(functools.partial(whole_logits, options, params))

    def logits(text):
        """What stands behind a token changes nothing for it: one program for all lengths."""
        padded = [*text, *[0] * (options.sequence_length - len(text))]
        return np.asarray(forward(np.array([padded])))[0, : len(text)]

    return logits


def trained(options):
    """Parameters that make no token likely by chance alone."""
    params = filled_params(build_model(options, "fp32"))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), params)


@pytest.mark.devices
@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.stress) for n in MODELS]
)
def test_greedy_tokens_are_those_of_the_whole_model(name, monkeypatch):
    monkeypatch.setattr(decoding, "_SHORT", 2)
    options = MODELS[name]
    params = trained(options)
    logits = whole(options, params)
    texts = [list(prompt) for prompt in PROMPTS]
    for text in texts:
        for _ in range(10):
            text.append(int(np.argmax(logits(text)[-1])))
    decoder = build_decoder(options, "fp32")
    greedy = Sampling(temperature=0)
    together = np.array(list(Generator(decoder, greedy)(params, PROMPTS, 10))).T.tolist()
    assert together == [text[-10:] for text in texts]
    assert len({tuple(row) for row in together}) > 1


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.stress)])
def test_a_decoder_reads_as_the_model_does_in_bf16(name):
    options = MODELS[name]
    params = trained(options)
    decoder = build_decoder(options, "bf16")
    places = jnp.array([0]), jnp.array([2])
    read, _ = jax.jit(decoder.read)(params, decoder.cache(1), jnp.array([[1, 2, 3]]), *places)
    want = whole(options, params)([1, 2, 3])[-1]
    assert read.dtype == jnp.float32
    np.testing.assert_allclose(read[0], want, atol=0.1 * float(jnp.max(jnp.abs(want))))


@pytest.mark.devices
def test_a_text_that_outgrows_the_model_goes_on_from_its_newer_half():
    options = MODELS["gpt"]
    params = trained(options)
    logits = whole(options, params)
    (tokens,) = np.array(
        list(Generator(build_decoder(options, "fp32"), Sampling(0))(params, [[5] * 10], 20))
    ).T.tolist()
    window = [5] * 10
    for token in tokens:
        if len(window) > 16:
            window = window[-8:]
        assert token == int(np.argmax(logits(window)[-1]))
        window.append(token)


@pytest.mark.devices
def test_a_short_prompt_is_read_a_token_at_a_time_and_by_the_program_for_what_follows(monkeypatch):
    options = dataclasses.replace(MODELS["gpt"], num_layers=1)
    params, decoder = trained(options), build_decoder(options, "fp32")

    def told(sampling):
        generator = Generator(decoder, sampling)
        made = np.array(list(generator(params, PROMPTS, 14))).tolist()
        return made, {length for _, length in generator._read}

    short = [told(Sampling(temperature)) for temperature in (0, 1)]
    assert [lengths for _, lengths in short] == [{1}, {1}]
    monkeypatch.setattr(decoding, "_SHORT", 2)
    at_once = [told(Sampling(temperature)) for temperature in (0, 1)]
    assert [lengths for _, lengths in at_once] == [{5, 1, 8}, {5, 1, 8}]
    assert [made for made, _ in short] == [made for made, _ in at_once]


@pytest.mark.devices
def test_all_programs_of_a_text_are_compiled_at_its_beginning(monkeypatch):
    monkeypatch.setattr(decoding, "_SHORT", 2)
    options = dataclasses.replace(MODELS["gpt"], num_layers=1)
    generator = Generator(build_decoder(options, "fp32"), Sampling(0))
    params = trained(options)
    for most, lengths in ((1, {5}), (12, {5, 1}), (13, {5, 1, 8})):
        made = generator(params, [[5] * 5, [1]], most)
        next(made)
        assert {length for _, length in generator._read} == lengths
        for _ in made:
            assert {length for _, length in generator._read} == lengths
    assert len(list(generator(params, [[5] * 16], 3))) == 3
    assert {length for rows, length in generator._read if rows == 1} == {16, 1, 8}


LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(0.0), {0}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.6), {0, 1}),
        (Sampling(top_p=0.0), {0}),
        (Sampling(top_k=3, top_p=0.99), {0, 1, 2}),
        (Sampling(0.01), {0}),
    ],
)
def test_tokens_are_drawn_as_asked(sampling, drawn):
    keys = jax.random.split(jax.random.key(0), 400)
    tokens = jax.vmap(lambda key: draw(LOGITS, key, sampling)[0])(keys)
    assert set(tokens.tolist()) == drawn
    if sampling == Sampling():
        np.testing.assert_allclose(jnp.mean(tokens == 0), 0.5, atol=0.08)


@pytest.mark.devices
def test_the_same_seed_draws_the_same():
    options = MODELS["gpt"]
    params, decoder = trained(options), build_decoder(options, "fp32")

    def told(seed):
        return np.array(list(Generator(decoder, Sampling(seed=seed))(params, PROMPTS, 8))).tolist()

    assert told(1) == told(1) != told(2)


def test_a_family_without_a_decoder_is_refused():
    with pytest.raises(InputError, match=r"model\.name=mlp cannot generate text"):
        build_decoder(MLPOptions(), "fp32")
    assert dataclasses.is_dataclass(MLPOptions)
