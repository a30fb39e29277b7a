"""A language model's logits in one go, on one device: what decoders and plans are held against."""

import dataclasses

import jax.numpy as jnp

from launcher.recipes.models.bert.model import BERT
from launcher.recipes.models.gpt.model import GPT
from launcher.recipes.models.llama.model import Llama
from launcher.recipes.models.losses import output_matrix
from launcher.recipes.models.moe.model import MoE

_MODULES = {"bert": BERT, "gpt": GPT, "llama": Llama, "moe": MoE}


def whole_logits(options, params, tokens):
    """Float32 [batch, length, vocab_size], without a cache; experts drop no token."""
    if options.name == "moe":
        options = dataclasses.replace(options, capacity_factor=0.0)
    more = {"deterministic": True} if options.name == "gpt" else {}
    module = _MODULES[options.name](options, jnp.float32)
    out = module.apply({"params": params}, tokens, **more)
    logits = (out[0] if options.name == "moe" else out) @ output_matrix(params)
    return logits + params["head_bias"] if options.name == "bert" else logits
