"""A residual network on one device.

(He et al., 2016, "Deep Residual Learning for Image Recognition"; strides in the 3x3 convolutions.)
Inside a bottleneck the 3x3 convolution is `width_factor` times as wide, as in the Alpa paper's Wide
ResNets. Batch normalization is by slice; its averages are the model's state. Parameters, statistics
and loss are float32; `dtype` is the type of activations and convolutions.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes import Model
from launcher.recipes.models.blocks import dtype_of
from launcher.recipes.models.losses import Metrics, classification
from launcher.recipes.models.resnet import BLOCKS, ResNetOptions
from launcher.trace import mark_pipeline_boundary, per_slice

_EPSILON = 1e-5
_LARGE = 64  # pictures from here on are made smaller at once


class Block(nn.Module):
    """One residual block.

    Attributes:
        filters: of its first convolution. stride: of the 3x3 convolution.
        factor: the width of a bottleneck's 3x3 convolution over `filters`; 0: a basic block.
        train: whether norms go by the slice, and change the averages.
    """

    filters: int
    stride: int
    factor: int
    momentum: float
    train: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, height, width, channels] to the same form."""
        conv = functools.partial(
            nn.Conv,
            use_bias=False,
            kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
            dtype=self.dtype,
        )
        norm = functools.partial(_norm, self.train, self.momentum, self.dtype)
        strides = self.stride, self.stride
        zeros = nn.initializers.zeros  # each block begins as the identity (Goyal et al., 2017)
        if self.factor:
            out = 4 * self.filters
            y = nn.relu(norm("norm_1")(conv(self.filters, (1, 1), name="conv_1")(x)))
            wide = conv(self.filters * self.factor, (3, 3), strides, name="conv_2")(y)
            y = conv(out, (1, 1), name="conv_3")(nn.relu(norm("norm_2")(wide)))
            y = norm("norm_3", zeros)(y)
        else:
            out = self.filters
            y = nn.relu(norm("norm_1")(conv(out, (3, 3), strides, name="conv_1")(x)))
            y = norm("norm_2", zeros)(conv(out, (3, 3), name="conv_2")(y))
        if x.shape != y.shape:
            x = norm("norm_skip")(conv(out, (1, 1), strides, name="conv_skip")(x))
        return nn.relu(x + y)


def _norm(
    train: bool, momentum: float, dtype: Any, name: str, scale: Any = nn.initializers.ones
) -> Any:
    return per_slice(
        nn.BatchNorm(
            use_running_average=not train,
            momentum=momentum,
            epsilon=_EPSILON,
            dtype=dtype,
            scale_init=scale,
            name=name,
        )
    )


class ResNet(nn.Module):
    """A classifier of pictures; each block is one pipeline layer."""

    options: ResNetOptions
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Map float [batch, height, width, channels] to logits, `dtype` [batch, num_classes]."""
        options = self.options
        width, depth = options.width, options.depth
        is_large = options.image_size >= _LARGE
        x = nn.Conv(
            width,
            (7, 7) if is_large else (3, 3),
            (2, 2) if is_large else (1, 1),
            use_bias=False,
            dtype=self.dtype,
            name="conv_first",
        )(images)
        x = nn.relu(_norm(train, options.momentum, self.dtype, "norm_first")(x))
        if is_large:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        factor = options.width_factor if options.has_bottlenecks else 0
        index = 0
        for group, count in enumerate(BLOCKS[depth]):
            for k in range(count):
                if index > 0:
                    mark_pipeline_boundary()
                x = Block(
                    width * 2**group,
                    2 if group and k == 0 else 1,
                    factor,
                    options.momentum,
                    train,
                    self.dtype,
                    name=f"layers_{index}",
                )(x)
                index += 1
        x = x.mean((1, 2))
        return nn.Dense(options.num_classes, dtype=self.dtype, name="output_layer")(x)


def build(options: ResNetOptions, precision: str) -> Model:
    """Return a ResNet; its loss is the mean cross-entropy of the pictures' classes.

    A batch holds `image`, float32 [batch, image_size, image_size, channels], and `label`, int32
    [batch].

    Args:
        options: the settings, all of them set.
        precision: "fp32" or "bf16".
    """
    net = ResNet(options, dtype_of(precision))
    size, channels = options.image_size, options.channels

    def init(key: jax.Array) -> tuple[Any, Any]:
        made = dict(net.init(key, jnp.zeros((1, size, size, channels)), train=False))
        return made.pop("params"), made

    def loss(
        params: Any, state: Any, batch: Any, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Metrics, Any]]:
        out: Any = net.apply(
            {"params": params, **state}, batch["image"], key is not None, mutable=list(state)
        )
        value, metrics = classification(out[0], batch["label"])
        return value, (metrics, out[1])

    return Model(init, loss, has_state=True)
