"""Routing of tokens to experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled_params

from launcher.config.errors import ConfigError
from launcher.config.reader import from_dict
from launcher.recipes import build_model
from launcher.recipes.models.decoding import build_decoder
from launcher.recipes.models.moe import MoEOptions
from launcher.recipes.models.moe.model import best_experts, places_of_tokens
from launcher.trace import OWN_KERNELS, make_jaxpr, walk

OPTIONS = MoEOptions(
    vocab_size=32,
    sequence_length=8,
    num_layers=2,
    num_heads=2,
    hidden_size=16,
    num_experts=4,
    mlp_size=8,
    capacity_factor=0.0,
).filled()


@functools.partial(jax.jit, static_argnums=(1, 2))
def placed(probabilities, chosen, places):
    return places_of_tokens(*best_experts(probabilities, chosen), probabilities.shape[-1], places)


def probabilities(tokens=12, experts=4):
    return jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, tokens, experts)))


def by_hand(probabilities, chosen, places):
    """GShard's routing, token by token: all first choices, then all second ones."""
    tokens, experts = probabilities.shape
    order = np.argsort(-probabilities, axis=-1, kind="stable")[:, :chosen]
    gates = np.take_along_axis(probabilities, order, -1)
    gates /= gates.sum(-1, keepdims=True)
    weights, taken = np.zeros((tokens, experts, places)), np.zeros(experts, int)
    for choice in range(chosen):
        for token in range(tokens):
            expert = order[token, choice]
            if taken[expert] < places:
                weights[token, expert, taken[expert]] = gates[token, choice]
            taken[expert] += 1
    return weights


@pytest.mark.parametrize(("chosen", "places"), [(1, 3), (2, 1), (2, 3), (3, 12)])
def test_first_choices_come_first_and_what_is_beyond_the_capacity_is_dropped(chosen, places):
    given = probabilities()
    weights = placed(given, chosen, places)
    want = [by_hand(np.array(group), chosen, places) for group in given]
    np.testing.assert_allclose(weights, want, rtol=1e-5, atol=1e-6)
    assert (weights > 0).sum(1).max() <= 1  # a place is one token's


def test_with_places_for_all_nothing_is_dropped():
    given = probabilities()
    weights = placed(given, 2, given.shape[1]).sum(-1)
    gates, index = best_experts(given, 2)
    np.testing.assert_allclose(jnp.take_along_axis(weights, index, -1), gates, rtol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


def batch():
    tokens = np.random.default_rng(0).integers(32, size=(4, 9)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def losses(**changes):
    options = dataclasses.replace(OPTIONS, **changes)
    model = build_model(options, "fp32")
    params = filled_params(model)
    value, metrics = jax.jit(model.loss)(params, batch(), jax.random.key(0))
    return float(value), {name: float(number) for name, number in metrics.items()}


def test_a_large_capacity_is_the_dropless_model():
    free, dropless = losses(capacity_factor=100.0), losses()
    assert free[0] == pytest.approx(dropless[0], rel=1e-5)


def test_the_losses_of_routing_are_added_in_training_alone():
    value, metrics = losses(balance_loss=0.5, router_z_loss=0.25)
    own = 0.5 * metrics["balance_loss"] + 0.25 * metrics["router_z_loss"]
    assert value == pytest.approx(metrics["cross_entropy"] + own, rel=1e-6)
    model = build_model(OPTIONS, "fp32")
    params = filled_params(model)
    evaluated, told = jax.jit(model.loss, static_argnums=2)(params, batch(), None)
    assert float(evaluated) == float(told["cross_entropy"])


def test_equal_use_has_a_balance_loss_of_one():
    assert losses()[1]["balance_loss"] == pytest.approx(1, abs=0.2)


def test_no_example_depends_on_another():
    model = build_model(dataclasses.replace(OPTIONS, capacity_factor=0.5), "fp32")
    params = filled_params(model)

    def of_first(rows):
        one = {name: jnp.asarray(x[rows]) for name, x in batch().items()}
        return jax.jit(model.loss, static_argnums=2)(params, one, None)[0]

    alone = [float(of_first(slice(k, k + 1))) for k in range(4)]
    assert float(of_first(slice(0, 4))) == pytest.approx(np.mean(alone), rel=1e-6)


def test_a_decoder_asks_for_no_kernels_wherever_the_model_was_trained():
    """The devices that write a text may have none, and its numbers 32 bits."""
    params = jax.eval_shape(build_model(OPTIONS, "bf16").init, jax.random.key(0))
    decoder = build_decoder(dataclasses.replace(OPTIONS, attention="cudnn"), "fp32")
    row = np.zeros(2, np.int32)
    program = make_jaxpr(decoder.read, params, decoder.cache(2), np.zeros((2, 4), int), row, row)
    ways = [e.params["of"].fused for e in walk(program.eqns) if e.primitive.name in OWN_KERNELS]
    assert ways == [None] * 6


def test_groups_and_choices_that_cannot_be_are_refused():
    row = {name: getattr(OPTIONS, name) for name in MoEOptions.row}
    with pytest.raises(ConfigError, match=r"model.experts_per_token=5"):
        from_dict({"model": {"name": "moe", **row, "experts_per_token": 5}})
    with pytest.raises(ConfigError, match=r"model.group_size=3"):
        from_dict({"model": {"name": "moe", **row, "group_size": 3}})
