"""The cross-entropy of tokens from the last hidden values, a chunk of the positions at a time."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax


def output_matrix(params: Any) -> jax.Array:
    """Return what maps hidden values to logits: the output layer, or the embedding, transposed."""
    if "output_layer" in params:
        return cast(jax.Array, params["output_layer"]["kernel"])
    return cast(jax.Array, params["word_embeddings"]["embedding"].T)


def token_losses(
    hidden: jax.Array, matrix: jax.Array, targets: jax.Array, dtype: Any, chunks: int = 1
) -> jax.Array:
    """Return the cross-entropy of each token, float32 [batch, length].

    With several chunks the logits of one are held at a time: the backward pass computes them again,
    and adds up the matrix' gradient in its own type.

    Args:
        hidden: float [batch, length, hidden_size].
        matrix: from hidden values to logits, float32 [hidden_size, vocab_size].
        targets: int32 [batch, length].
        dtype: the type of the product.
        chunks: into how many parts the positions are cut, a divisor of length.
    """

    def of_chunk(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = jnp.dot(hidden.astype(dtype), matrix.astype(dtype))
        return cast(
            jax.Array,
            optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets),
        )

    if chunks == 1:
        return of_chunk(hidden, targets)

    def in_chunks(x: jax.Array) -> jax.Array:
        cut = x.reshape(x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:])
        return jnp.moveaxis(cut, 1, 0)

    again = jax.checkpoint(of_chunk)
    _, losses = jax.lax.scan(
        lambda carry, chunk: (carry, again(*chunk)), None, (in_chunks(hidden), in_chunks(targets))
    )
    return jnp.moveaxis(losses, 0, 1).reshape(targets.shape)
