"""A U-Net that removes noise from pictures, on one device.

(Ronneberger et al., 2015, "U-Net"; Ho et al., 2020, "Denoising Diffusion Probabilistic Models",
without attention.) Each level halves the picture and doubles the channels; what a level on the way
down computes skips to its counterpart on the way up. Parameters, norms and loss are float32;
`dtype` is the type of activations and convolutions.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from launcher.recipes import Model
from launcher.recipes.models.blocks import applied, dtype_of
from launcher.recipes.models.losses import Metrics
from launcher.recipes.models.unet import GROUPS, UNetOptions
from launcher.trace import mark_pipeline_boundary

_FIRST, _LAST = 1e-4, 0.02  # variances of the noise that is added in a step, for 1,000 steps


def _kept_share(time_steps: int) -> np.ndarray:
    """Return how much of a picture's variance is left at each time, float32 [time_steps]."""
    scale = 1000 / time_steps
    added = np.linspace(_FIRST * scale, min(_LAST * scale, 0.999), time_steps)
    return np.cumprod(1 - added).astype(np.float32)


class Block(nn.Module):
    """A residual block, conditioned on the time."""

    channels: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Map float [batch, height, width, channels] to the same form; time: [batch, width]."""

        def conv(x: jax.Array, name: str, size: int = 3) -> jax.Array:
            return nn.Conv(self.channels, (size, size), dtype=self.dtype, name=name)(x)

        def norm(x: jax.Array, name: str) -> jax.Array:
            return nn.silu(nn.GroupNorm(GROUPS, dtype=self.dtype, name=name)(x))

        y = conv(norm(x, "norm_1"), "conv_1")
        y = y + nn.Dense(self.channels, dtype=self.dtype, name="time")(time)[:, None, None]
        y = conv(norm(y, "norm_2"), "conv_2")
        return y + (x if x.shape == y.shape else conv(x, "conv_skip", 1))


class UNet(nn.Module):
    """A network that predicts a picture's noise; each level is one pipeline layer, down and up."""

    options: UNetOptions
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, time: jax.Array) -> jax.Array:
        """Map float [batch, height, width, channels] to the same; time: float32 [batch], 0 to 1."""
        options = self.options
        width, blocks = options.width, options.blocks
        levels = options.levels
        turns = time[:, None] * 1000 * 1e4 ** (-jnp.arange(width // 2) / (width // 2))
        embedded = jnp.concatenate([jnp.sin(turns), jnp.cos(turns)], -1)
        embedded = nn.silu(nn.Dense(4 * width, dtype=self.dtype, name="time")(embedded))

        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        x = conv(width, name="conv_first")(images)
        skips = []
        for level in range(levels):
            for k in range(blocks):
                x = Block(width * 2**level, self.dtype, name=f"down_{level}_{k}")(x, embedded)
            skips.append(x)
            if level < levels - 1:
                x = conv(width * 2**level, strides=(2, 2), name=f"smaller_{level}")(x)
            mark_pipeline_boundary()
        for level in reversed(range(levels)):
            x = jnp.concatenate([x, skips[level]], -1)
            for k in range(blocks):
                x = Block(width * 2**level, self.dtype, name=f"up_{level}_{k}")(x, embedded)
            if level:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
                x = conv(width * 2 ** (level - 1), name=f"larger_{level}")(x)
                mark_pipeline_boundary()
        x = nn.silu(nn.GroupNorm(GROUPS, dtype=self.dtype, name="norm_last")(x))
        return conv(images.shape[-1], name="conv_last")(x)


def build(options: UNetOptions, precision: str) -> Model:
    """Return a U-Net; its loss is the mean squared error of the predicted noise.

    A batch holds `image`, float32 [batch, image_size, image_size, channels]. Noise and times are
    drawn in each step; in an evaluation they are always the same.

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    net = UNet(options, dtype_of(precision))
    size, channels = options.image_size, options.channels
    steps = options.time_steps
    kept = _kept_share(steps)

    def init(key: jax.Array) -> Any:
        return net.init(key, jnp.zeros((1, size, size, channels)), jnp.zeros(1))["params"]

    def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        images = batch["image"]
        of_time, of_noise = jax.random.split(jax.random.key(0) if key is None else key)
        time = jax.random.randint(of_time, images.shape[:1], 0, steps)
        noise = jax.random.normal(of_noise, images.shape)
        share = jnp.asarray(kept)[time][:, None, None, None]
        noisy = jnp.sqrt(share) * images + jnp.sqrt(1 - share) * noise
        predicted = applied(net, params, noisy, time / steps)
        return jnp.mean(jnp.square(predicted.astype(jnp.float32) - noise)), {}

    return Model(init, loss)
