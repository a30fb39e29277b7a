"""A mixture of experts as a decoder: Llama's, whose MLPs, or some of them, are experts.

It drops no token, whatever `capacity_factor` the training had. With a capacity, whether an expert
takes a token would depend on those read with it: on where a text is cut into prompt and answer, and
on later tokens, whose first choices come before its second one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax

from launcher.recipes.models.decoding import Decoder
from launcher.recipes.models.llama.decoder import cached_blocks
from launcher.recipes.models.moe.model import Experts
from launcher.recipes.models.moe.options import MoEOptions


def build_decoder(options: MoEOptions, precision: str) -> Decoder:
    """Return a mixture of experts that goes on with texts.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    blocks = cached_blocks(options, precision)
    # Texts have any length, so each token is a group of its own.
    alone = dataclasses.replace(options, capacity_factor=0.0, group_size=1)
    experts = Experts(alone, 0.0, blocks.dtype)

    def feed_forward(params: Any, x: jax.Array) -> jax.Array:
        if "experts" not in params:
            return blocks.feed_forward(params, x)
        out, _ = cast(Any, experts.apply({"params": params["experts"]}, x))
        return cast(jax.Array, out)

    return dataclasses.replace(blocks, feed_forward=feed_forward).decoder()
