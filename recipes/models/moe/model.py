"""A Llama with mixtures of experts, on one device.

Each token goes to its best experts by a softmax (Shazeer et al., 2017, "Outrageously Large Neural
Networks"). With a capacity, each expert takes at most that many tokens of a group, first choices
first, and the others skip the layer (Lepikhin et al., 2021, "GShard"); without, every expert
computes every token, and nothing is dropped. A group is a sequence or a part of one, so no example
sees another. The router, its losses and the rest are float32 where Llama's are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes import Model
from launcher.recipes.models.blocks import INIT_SCALE, applied, dense, dtype_of, output_scale
from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.language_model import Packed, cached_decoder, packing_of
from launcher.recipes.models.llama.model import (
    ACTIVATIONS,
    FeedForward,
    attended,
    embedded,
    normed,
)
from launcher.recipes.models.losses import Metrics, next_token_loss
from launcher.recipes.models.moe import MoEOptions
from launcher.trace import mark_pipeline_boundary


def capacity(options: MoEOptions) -> int:
    """Return how many tokens of a group an expert takes."""
    sent = options.group_size * options.experts_per_token
    even = sent / options.num_experts
    most = math.ceil(even * options.capacity_factor)
    return min(most, options.group_size)


def route_tokens(probabilities: jax.Array, chosen: int, places: int) -> tuple[jax.Array, jax.Array]:
    """Return each token's weights at experts and their places, and its share of each expert.

    Args:
        probabilities: float32 [..., tokens, experts].
        chosen: the experts of a token.
        places: the tokens of an expert; 0: all.

    Returns:
        Weights, float32 [..., tokens, experts, places], or [..., tokens, experts] if all have a
        place; they sum up to 1 for a token that no expert drops. And which experts were chosen, 0
        or 1 [..., tokens, experts].
    """
    experts = probabilities.shape[-1]
    gates, index = jax.lax.top_k(probabilities, chosen)
    gates /= gates.sum(-1, keepdims=True)
    # First choices have precedence over second ones, and earlier tokens over later ones.
    picks = jax.nn.one_hot(jnp.swapaxes(index, -1, -2), experts)  # [..., chosen, tokens, experts]
    gates = jnp.swapaxes(gates, -1, -2)
    if not places:
        return (picks * gates[..., None]).sum(-3), picks.sum(-3)
    within = jnp.cumsum(picks, axis=-2)
    earlier = jnp.cumsum(within[..., -1:, :], axis=-3) - within[..., -1:, :]
    place = ((within + earlier - 1) * picks).sum(-1).astype(jnp.int32)
    at = jax.nn.one_hot(place, places)  # zeros beyond the capacity
    return jnp.einsum("...kte,...ktp->...tep", picks * gates[..., None], at), picks.sum(-3)


class Experts(nn.Module):
    """A mixture of experts, and a shared one beside it."""

    options: MoEOptions
    output_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map float [batch, length, hidden] to the same and the losses of routing, float32 [2]."""
        options = self.options
        experts, chosen = options.num_experts, options.experts_per_token
        batch, length, hidden = x.shape
        group = min(options.group_size, length)
        groups = x.reshape(batch, length // group, group, hidden)

        logits = dense(groups.astype(jnp.float32), experts, "router", None, bias=False)
        probabilities = jax.nn.softmax(logits)
        places = capacity(options)
        weights, picks = route_tokens(probabilities, chosen, places)
        balance = experts / chosen * (picks.mean(-2) * probabilities.mean(-2)).sum(-1).mean()
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean()

        weights = weights.astype(self.dtype)
        if places:
            sent = jnp.einsum("bgtep,bgtm->ebgpm", (weights > 0).astype(self.dtype), groups)
            out = jnp.einsum("bgtep,ebgpm->bgtm", weights, self._inside(sent))
        else:
            # `jax.lax.ragged_dot` would save nothing: on CPUs and GPUs each row meets every expert.
            every = jnp.broadcast_to(groups[None], (experts, *groups.shape))
            out = jnp.einsum("bgte,ebgtm->bgtm", weights, self._inside(every))
        out = out.reshape(x.shape)
        if options.shared_size:
            shared = dataclasses.replace(options, mlp_size=options.shared_size)
            out += FeedForward(shared, self.output_scale, self.dtype, name="shared_expert")(x)
        return out, jnp.stack([balance, z])

    def _inside(self, x: jax.Array) -> jax.Array:
        """Map each expert's tokens, float [experts, batch, groups, tokens, hidden], to the same."""
        options, (experts, *_, hidden) = self.options, x.shape
        width = options.expert_size

        def product(x: jax.Array, name: str, size: int, scale: float = INIT_SCALE) -> jax.Array:
            shape = experts, x.shape[-1], size
            kernel = self.param(name, nn.initializers.normal(scale), shape)
            return jnp.einsum("ebgtm,emh->ebgth", x, kernel.astype(self.dtype))

        activation = ACTIVATIONS[options.activation]
        inner = product(x, "experts_up", width)
        if options.gated_mlp:
            inner = activation(product(x, "experts_gate", width)) * inner
        else:
            inner = activation(inner)
        return product(inner, "experts_down", hidden, self.output_scale)


class Block(nn.Module):
    """One transformer block, with experts or with one MLP."""

    options: MoEOptions
    output_scale: float
    dtype: Any
    has_experts: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, losses: jax.Array, packed: Packed = None
    ) -> tuple[jax.Array, jax.Array]:
        """Map float [batch, length, hidden] to the same; add the losses of routing."""
        x, inner = attended(self, x, packed)
        shared = (self.options, self.output_scale, self.dtype)
        if not self.has_experts:
            return x + FeedForward(*shared, name="mlp")(inner), losses
        out, more = Experts(*shared, name="experts")(inner)
        return x + out, losses + more


class MoE(nn.Module):
    """A language model whose layers, or some of them, have experts; each is a pipeline layer."""

    options: MoEOptions
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array, packed: Packed = None) -> tuple[jax.Array, jax.Array]:
        """Map tokens, int32 [batch, length], to the last hidden values and the routing's losses.

        These are float [batch, length, hidden_size] and float32 [2]: the means over the layers of
        the balance and the z loss.
        """
        options = self.options
        num_layers, every = options.num_layers, options.expert_every
        x, losses = embedded(self, tokens), jnp.zeros(2)
        block = functools.partial(Block, options, output_scale(num_layers), self.dtype)
        if options.scan_layers:
            scanned = nn.scan(
                lambda module, carry: (module(*carry, packed), None),
                variable_axes={"params": 0, "cache": 0},
                split_rngs={"params": True},
                length=num_layers,
            )
            (x, losses), _ = scanned(block(True, name="layers"), (x, losses))
        else:
            for index in range(num_layers):
                if index > 0:
                    mark_pipeline_boundary()
                has_experts = index % every == every - 1
                x, losses = block(has_experts, name=f"layers_{index}")(x, losses, packed)
        return normed(self, x), losses / max(num_layers // every, 1)


def build_decoder(options: MoEOptions, precision: str) -> Decoder:
    """Return the decoder of a mixture of experts; arguments as for `build`.

    It drops no token, whatever `capacity_factor` the training had. With a capacity, whether an
    expert takes a token would depend on those read with it: on where a text is split into prompt
    and answer, and on later tokens, whose first choices come before its second one.
    """
    # Texts have any length, so each token is a group of its own.
    alone = dataclasses.replace(options, capacity_factor=0.0, group_size=1)
    shape = options.num_kv_heads, options.head_size
    return cached_decoder(MoE(alone, dtype_of(precision)), options, shape)


def build(options: MoEOptions, precision: str) -> Model:
    """Return a mixture of experts; its loss is the next token's cross-entropy and the routing's.

    A batch is Llama's, with its documents and weights. Tokens of a group share the experts'
    capacity, also those of several documents.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    moe = MoE(options, dtype_of(precision))

    def init(key: jax.Array) -> Any:
        return moe.init(key, jnp.zeros((1, options.group_size), jnp.int32))["params"]

    def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        hidden, (balance, z) = applied(moe, params, batch["tokens"], packing_of(batch))
        evaluates = key is None  # which compares predictions alone
        value, metrics = next_token_loss(
            hidden, params, batch, moe.dtype, options.loss_chunks, evaluates
        )
        metrics |= {"cross_entropy": value, "balance_loss": balance, "router_z_loss": z}
        if evaluates:
            return value, metrics
        return value + options.balance_loss * balance + options.router_z_loss * z, metrics

    return Model(init, loss)
