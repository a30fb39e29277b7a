"""Parts of models: embeddings, dense layers, an encoder's block, equal blocks in a row.

Blocks in a row, each a pipeline layer, are traced once for all of them: a model has dozens that
differ in nothing but their parameters, and tracing one takes as long as all of its Python. JAX
keeps the program of a jitted function, so that a loss of 96 blocks is traced in about the time of
one, as a scan over stacked parameters is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from launcher.recipes.models.hugging_face import padded
from launcher.trace import mark_pipeline_boundary


def dtype_of(precision: str) -> Any:
    """Return the type of activations and products, "fp32" or "bf16"."""
    return jnp.bfloat16 if precision == "bf16" else jnp.float32


INIT_SCALE = 0.02  # the deviation of initial kernels and embeddings


def output_scale(num_layers: int) -> float:
    """Return the initial scale of the 2 * num_layers branches that are added to hidden values.

    It keeps their variance (Radford et al., 2019, section 2.3).
    """
    return float(INIT_SCALE / (2 * num_layers) ** 0.5)


def applied(module: nn.Module, params: Any, *inputs: Any, **how: Any) -> Any:
    """Return what a module makes of its inputs, with these parameters."""
    return module.apply({"params": params}, *inputs, **how)


def word_embeddings(options: Any, dtype: Any) -> nn.Embed:
    """Return a language model's embedding, a submodule as in `dense`, by its settings."""
    rows, hidden = padded(options.vocab_size), options.hidden_size
    initial = _then_zeros(0, options.vocab_size)
    return nn.Embed(rows, hidden, embedding_init=initial, dtype=dtype, name="word_embeddings")


def output_layer(module: Any, x: jax.Array) -> None:
    """Make the kernel of an output layer of its own; the loss multiplies by it."""
    if not module.options.tie_embeddings and module.is_initializing():
        size = module.options.vocab_size
        initial = _then_zeros(1, size)
        nn.Dense(padded(size), False, kernel_init=initial, name="output_layer")(x)


def _then_zeros(axis: int, count: int) -> Callable[..., jax.Array]:
    """Return what draws initial values, and zeros after the first `count` along an axis."""
    normal = nn.initializers.normal(INIT_SCALE)

    def initial(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        drawn = normal(key, shape, dtype)
        if shape[axis] == count:
            return drawn
        # Not drawn apart and padded: devices divide the whole alone.
        is_used = jax.lax.broadcasted_iota(jnp.int32, shape, axis) < count
        return jnp.where(is_used, drawn, 0)

    return initial


def dense(
    x: jax.Array,
    size: int | tuple[int, ...],
    name: str,
    dtype: Any,
    scale: float = INIT_SCALE,
    bias: bool = True,
) -> jax.Array:
    """Apply a dense layer, a submodule of the module in whose compact method this is called.

    Args:
        x: float [..., inputs].
        size: the sizes of the axes that replace the last one.
        name: the submodule's.
        dtype: the type of the product.
        scale: the deviation of the initial kernel.
        bias: whether there is one.
    """
    kind: Any = nn.Dense if isinstance(size, int) else nn.DenseGeneral
    initial = nn.initializers.normal(scale)
    out: jax.Array = kind(size, use_bias=bias, kernel_init=initial, dtype=dtype, name=name)(x)
    return out


def heads_joined(
    x: jax.Array, size: int, dtype: Any, scale: float = INIT_SCALE, bias: bool = True
) -> jax.Array:
    """Map what attention's heads return, float [..., heads, head_size], to float [..., size]."""
    initial = nn.initializers.normal(scale)
    joined = nn.DenseGeneral(
        size, (-2, -1), use_bias=bias, kernel_init=initial, dtype=dtype, name="linear_proj"
    )
    return joined(x)


def blocks_in_a_row(
    parent: nn.Module,
    make: Callable[..., nn.Module],
    count: int,
    x: jax.Array,
    *arrays: Any,
    call: Callable[..., Any] = lambda module, *given: module(*given),
    draws: bool = False,
    scanned: bool = False,
) -> Any:
    """Apply `count` blocks, the submodules `layers_0` … of `parent`, with a mark between any two.

    Scanned, they are one submodule `layers`, whose parameters have an axis of blocks in front.

    Args:
        parent: the module in whose compact method this is called.
        make: returns a block, given `name` or `parent`.
        count: the number of blocks.
        x: what the first block is given; each other one is given the result of that before.
        arrays: what each of them is given besides, pytrees of arrays.
        call: called with a block, its input and `arrays`; returns its result. By default it is
            called as it is.
        draws: whether blocks draw random numbers, which each draws of its own.
        scanned: whether the blocks are one `nn.scan`.
    """
    if scanned:
        scan = nn.scan(
            lambda module, x: (call(module, x, *arrays), None),
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True, "dropout": True},
            length=count,
        )
        return scan(make(name="layers"), x)[0]
    begins = parent.is_initializing()
    begin, apply = jax.jit(_first_function(make, call)), jax.jit(_function(make, call))
    # While intermediate values or a cache are written, each block is itself.
    writes = any(map(parent.is_mutable_collection, ("intermediates", "cache")))
    shared = begins or not (draws or writes)
    for index in range(count):
        if index > 0:
            mark_pipeline_boundary()
        name = f"layers_{index}"
        if not shared:
            x = call(make(name=name), x, *arrays)
            continue
        with jax.named_scope(name):
            if begins:
                x, made = begin(parent.make_rng("params"), x, *arrays)
                parent.param(name, lambda key, made=made: made)
            else:
                x = apply(parent.variables["params"][name], x, *arrays)
    return x


def _function(make: Callable[..., nn.Module], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block as a function of its parameters, its input and the other arrays."""

    def block(params: Any, *given: Any) -> Any:
        return nn.apply(call, make(parent=None))({"params": params}, *given)

    return block


def _first_function(
    make: Callable[..., nn.Module], call: Callable[..., Any]
) -> Callable[..., tuple[Any, Any]]:
    """Return a function of a random key and a block's input: its result, and its parameters."""

    def block(key: jax.Array, *given: Any) -> tuple[Any, Any]:
        out, made = nn.init_with_output(call, make(parent=None))({"params": key}, *given)
        return out, made["params"]

    return block


def gelu(x: jax.Array) -> jax.Array:
    """Map by GELU itself, as BERT's and ViT's published weights mean it, not its approximation."""
    return nn.gelu(x, approximate=False)


class EncoderBlock(nn.Module):
    """Attention and an MLP with GELU.

    Attributes:
        num_heads: of attention.
        mlp_size: the width of the MLP.
        epsilon: of the norms.
        norm_first: whether a norm stands before each branch (ViT) or after its sum (BERT).
        attention: "xla" or "cudnn".
        dtype: the type of activations and products.
    """

    num_heads: int
    mlp_size: int
    epsilon: float
    norm_first: bool
    attention: str
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float [batch, length, hidden] to the same."""
        norms = [
            nn.LayerNorm(epsilon=self.epsilon, dtype=self.dtype, name=name)
            for name in ("attention_layernorm", "mlp_layernorm")
        ]
        for branch, norm in zip((self._attend, self._feed), norms, strict=True):
            x = x + branch(norm(x)) if self.norm_first else norm(x + branch(x))
        return x

    def _attend(self, x: jax.Array) -> jax.Array:
        hidden = x.shape[-1]
        shape = 3, self.num_heads, hidden // self.num_heads
        qkv = dense(x, shape, "linear_qkv", self.dtype)
        mixed = jax.nn.dot_product_attention(
            *(qkv[..., part, :, :] for part in range(3)),
            implementation="cudnn" if self.attention == "cudnn" else "xla",
        )
        return heads_joined(mixed, hidden, self.dtype)

    def _feed(self, x: jax.Array) -> jax.Array:
        inner = gelu(dense(x, self.mlp_size, "linear_fc1", self.dtype))
        return dense(inner, x.shape[-1], "linear_fc2", self.dtype)


def encoded(parent: Any, x: jax.Array, epsilon: float, norm_first: bool) -> jax.Array:
    """Apply an encoder's blocks, each a pipeline layer, in its compact method.

    Args:
        parent: the encoder, by whose `options` and `dtype` the blocks are made.
        x: float [batch, length, hidden_size].
        epsilon: of the norms.
        norm_first: as in `EncoderBlock`.
    """
    options, dtype = parent.options, parent.dtype
    heads, width = options.num_heads, options.mlp_ratio * options.hidden_size
    shared = heads, width, epsilon, norm_first, options.attention, dtype
    block = functools.partial(EncoderBlock, *shared)
    return blocks_in_a_row(parent, block, options.num_layers, x, scanned=options.scan_layers)
