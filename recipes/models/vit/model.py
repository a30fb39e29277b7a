"""A Vision Transformer on one device.

(Dosovitskiy et al., 2021, "An Image is Worth 16x16 Words".) A class token, learned positions, norms
before the branches. Parameters, norms, softmax and loss are float32; `dtype` is the type of
activations and matrix products.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes import Model
from launcher.recipes.models.blocks import INIT_SCALE, applied, dense, dtype_of, encoded
from launcher.recipes.models.losses import Metrics, classification
from launcher.recipes.models.vit import ViTOptions

_EPSILON = 1e-6


class ViT(nn.Module):
    """An encoder of patches; each block is one pipeline layer."""

    options: ViTOptions
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Map float [batch, height, width, channels] to logits, `dtype` [batch, num_classes]."""
        options, normal = self.options, nn.initializers.normal(INIT_SCALE)
        hidden, patch = options.hidden_size, options.patch_size
        x = nn.Conv(
            hidden, (patch, patch), (patch, patch), "VALID", dtype=self.dtype, name="patches"
        )(images)
        x = x.reshape(x.shape[0], -1, hidden)
        first = self.param("class_token", nn.initializers.zeros, (1, 1, hidden))
        x = jnp.concatenate(
            [jnp.broadcast_to(first, (x.shape[0], 1, hidden)).astype(self.dtype), x], axis=1
        )
        positions = self.param("position_embeddings", normal, (1, x.shape[1], hidden))
        x = encoded(self, x + positions.astype(self.dtype), _EPSILON, norm_first=True)
        x = nn.LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name="final_layernorm")(x[:, 0])
        return dense(x, options.num_classes, "output_layer", self.dtype)


def build(options: ViTOptions, precision: str) -> Model:
    """Return a ViT; its loss is the mean cross-entropy of the pictures' classes.

    A batch holds `image`, float32 [batch, image_size, image_size, channels], and `label`, int32
    [batch].

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    vit = ViT(options, dtype_of(precision))
    size = options.image_size

    def init(key: jax.Array) -> Any:
        return vit.init(key, jnp.zeros((1, size, size, options.channels)))["params"]

    def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        del key  # nothing is random
        return classification(applied(vit, params, batch["image"]), batch["label"])

    return Model(init, loss)
