"""What models of pictures share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax


def classification(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean cross-entropy of classes, and the accuracy as a metric.

    A picture counts as right if its class is the likeliest, of equals the first.

    Args:
        logits: float [batch, classes].
        labels: int32 [batch].
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    right = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    return jnp.mean(losses), {"accuracy": jnp.mean(right)}
