"""BERT on one device: an encoder that fills in masked tokens.

(Devlin et al., 2019, "BERT: Pre-training of Deep Bidirectional Transformers".) It has the
masked loss alone, as RoBERTa does; all sentences are of one kind. Parameters, norms, softmax
and loss are float32; `dtype` is the type of activations and matrix products.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes import Model
from launcher.recipes.models.bert import BERTOptions
from launcher.recipes.models.blocks import (
    INIT_SCALE,
    applied,
    dense,
    dtype_of,
    encoded,
    gelu,
    word_embeddings,
)
from launcher.recipes.models.losses import Metrics, next_token_loss

_EPSILON = 1e-12


class BERT(nn.Module):
    """An encoder of tokens; each block is one pipeline layer."""

    options: BERTOptions
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens, int32 [batch, length], to the last hidden values, [batch, length, hidden]."""
        options, normal = self.options, nn.initializers.normal(INIT_SCALE)
        hidden, words = options.hidden_size, word_embeddings(options, self.dtype)
        positions = self.param("position_embeddings", normal, (options.sequence_length, hidden))
        kinds = self.param("kind_embeddings", normal, (2, hidden))  # all tokens are of the first

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name=name)

        x = words(tokens) + (positions[: tokens.shape[1]] + kinds[0]).astype(self.dtype)
        x = encoded(self, norm("embedding_layernorm")(x), _EPSILON, norm_first=False)
        x = dense(x, hidden, "head_dense", self.dtype)
        if self.is_initializing():  # the loss adds it
            self.param("head_bias", nn.initializers.zeros, (words.num_embeddings,))
        return norm("head_layernorm")(gelu(x))


def build(options: BERTOptions, precision: str) -> Model:
    """Return a BERT; its loss is the mean cross-entropy of the tokens that are masked.

    A batch holds `tokens`, `targets`, int32 [batch, sequence_length], and `weights`, float32 of the
    same shape: 1 where a token counts. The mean is over all that count in the batch.

    Args:
        options: the dimensions, all of them set.
        precision: "fp32" or "bf16".
    """
    bert = BERT(options, dtype_of(precision))

    def init(key: jax.Array) -> Any:
        return bert.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        hidden = applied(bert, params, batch["tokens"])
        return next_token_loss(hidden, params, batch, options, bert.dtype, key is None)

    return Model(init, loss)
