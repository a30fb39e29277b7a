"""A Llama with mixtures of experts, on one device.

Each token goes to its best experts by a softmax (Shazeer et al., 2017, "Outrageously Large Neural
Networks"). With a capacity, each expert takes at most that many tokens of a group, first choices
first, and the others skip the layer (Lepikhin et al., 2021, "GShard"); without, nothing is dropped,
and experts compute the tokens that are sent to them (`routed`). A group is a sequence or a part of
one, so no example sees another. The router, its losses and the rest are float32 where Llama's are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes import Model
from launcher.recipes.models.blocks import INIT_SCALE, applied, dense, dtype_of, output_scale
from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.language_model import Packed, cached_decoder, packing_of
from launcher.recipes.models.llama.model import ACTIVATIONS, FeedForward, attended, embedded, normed
from launcher.recipes.models.losses import Metrics, next_token_loss
from launcher.recipes.models.moe import MoEOptions
from launcher.recipes.models.moe.routed import routed
from launcher.trace import mark_pipeline_boundary


def capacity(options: MoEOptions) -> int:
    """Return how many tokens of a group an expert takes."""
    sent = options.group_size * options.experts_per_token
    even = sent / options.num_experts
    most = math.ceil(even * options.capacity_factor)
    return min(most, options.group_size)


def best_experts(probabilities: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
    """Return the best experts of each token, and their weights, which sum up to 1.

    Args:
        probabilities: float32 [..., tokens, experts].
        chosen: the experts of a token.

    Returns:
        Weights, float32 [..., tokens, chosen], the largest first; and experts, int32, likewise.
    """
    gates, index = jax.lax.top_k(probabilities, chosen)
    return gates / gates.sum(-1, keepdims=True), index


def places_of_tokens(gates: jax.Array, index: jax.Array, experts: int, places: int) -> jax.Array:
    """Return each token's weights at so many experts and at an expert's places.

    Args:
        gates: float [..., tokens, chosen], as `best_experts` returns them.
        index: int32, likewise.
        experts: their number.
        places: the tokens of an expert.

    Returns:
        Float [..., tokens, experts, places]; they sum up to 1 for a token that no expert drops.
    """
    # First choices have precedence over second ones, and earlier tokens over later ones.
    picks = jax.nn.one_hot(jnp.swapaxes(index, -1, -2), experts)  # [..., chosen, tokens, experts]
    gates = jnp.swapaxes(gates, -1, -2)
    within = jnp.cumsum(picks, axis=-2)
    earlier = jnp.cumsum(within[..., -1:, :], axis=-3) - within[..., -1:, :]
    place = ((within + earlier - 1) * picks).sum(-1).astype(jnp.int32)
    at = jax.nn.one_hot(place, places)  # zeros beyond the capacity
    return jnp.einsum("...kte,...ktp->...tep", picks * gates[..., None], at)


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
        gates, index = best_experts(probabilities, chosen)
        picks = jax.nn.one_hot(index, experts).sum(-2)  # [batch, groups, tokens, experts]
        balance = experts / chosen * (picks.mean(-2) * probabilities.mean(-2)).sum(-1).mean()
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean()

        mix = self._some if capacity(options) else self._all
        out = mix(groups, gates, index).reshape(x.shape)
        if options.shared_size:
            shared = dataclasses.replace(options, mlp_size=options.shared_size)
            out += FeedForward(shared, self.output_scale, self.dtype, name="shared_expert")(x)
        return out, jnp.stack([balance, z])

    def _some(self, groups: jax.Array, gates: jax.Array, index: jax.Array) -> jax.Array:
        """Map groups of tokens, [batch, groups, tokens, hidden], to the same by those with a place.

        `gates` and `index` are as `best_experts` returns them.
        """
        options = self.options
        weights = places_of_tokens(gates, index, options.num_experts, capacity(options))
        weights = weights.astype(self.dtype)
        sent = jnp.einsum("bgtep,bgtm->ebgpm", (weights > 0).astype(self.dtype), groups)
        product = functools.partial(jnp.einsum, "ebgpm,emh->ebgph")
        inner, down = self._inside(product, sent)
        return jnp.einsum("bgtep,ebgpm->bgtm", weights, product(inner, down))

    def _all(self, groups: jax.Array, gates: jax.Array, index: jax.Array) -> jax.Array:
        """Map groups of tokens, as `_some` does, by all of them."""
        x, gates, index = (a.reshape(len(a), -1, a.shape[-1]) for a in (groups, gates, index))
        is_fused = self.options.attention == "cudnn"  # 16 bits, on GPUs since Ampere

        def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return routed(x, index, kernel, is_fused)

        inner, down = self._inside(product, x)
        return product(inner * gates[..., None].astype(self.dtype), down)

    def _inside(
        self, product: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the values inside experts, and the kernel that leads out of them.

        Args:
            product: of tokens with their experts' kernels, float [experts, size, width].
            x: the tokens, float [..., hidden].
        """
        options, hidden = self.options, x.shape[-1]

        def kernel(name: str, size: int, width: int, scale: float = INIT_SCALE) -> jax.Array:
            shape = options.num_experts, size, width
            made: jax.Array = self.param(name, nn.initializers.normal(scale), shape)
            return made.astype(self.dtype)

        activation, width = ACTIVATIONS[options.activation], options.expert_size
        inner = product(x, kernel("experts_up", hidden, width))
        if options.gated_mlp:
            inner = activation(product(x, kernel("experts_gate", hidden, width))) * inner
        else:
            inner = activation(inner)
        return inner, kernel("experts_down", width, hidden, self.output_scale)


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
    # Texts have any length, so each token is a group of its own; devices may have no kernels.
    alone = dataclasses.replace(options, capacity_factor=0.0, group_size=1, attention="xla")
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
        value, metrics = next_token_loss(hidden, params, batch, options, moe.dtype, evaluates)
        metrics |= {"cross_entropy": value, "balance_loss": balance, "router_z_loss": z}
        if evaluates:
            return value, metrics
        return value + options.balance_loss * balance + options.router_z_loss * z, metrics

    return Model(init, loss)
