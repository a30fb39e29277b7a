"""Losses of model families: cross-entropies of tokens and of classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Metrics = dict[str, jax.Array]
Scores = dict[str, jax.Array]  # of each token, float32 [batch, length]


def next_token_loss(
    hidden: jax.Array, params: Any, batch: Any, options: Any, dtype: Any, evaluates: bool
) -> tuple[jax.Array, Metrics]:
    """Return the mean loss of a language model, and the metrics beside it.

    Columns of the output matrix beyond the vocabulary are padding: they take no probability.

    Args:
        hidden: the last hidden values, float [batch, length, hidden_size].
        params: the model's; their output layer or embedding maps them to logits.
        batch: as `mean_of` takes it, with `targets`, int32 [batch, length].
        options: the model's settings.
        dtype: the type of the product with the output layer.
        evaluates: whether the accuracy is a metric.
    """
    matrix, targets, bias = output_matrix(params), batch["targets"], params.get("head_bias")
    if matrix.shape[-1] > options.vocab_size:
        # Added, not chosen: a choice would be kept for the backward pass, a byte a logit.
        is_token = jnp.arange(matrix.shape[-1]) < options.vocab_size
        padding = jnp.where(is_token, 0.0, -jnp.inf)
        bias = padding if bias is None else bias + padding
    chunks = options.loss_chunks
    return mean_of(scores_in_chunks(hidden, matrix, targets, dtype, chunks, evaluates, bias), batch)


def output_matrix(params: Any) -> jax.Array:
    """Return what maps hidden values to logits: the output layer, or the embedding, transposed."""
    if "output_layer" in params:
        matrix: jax.Array = params["output_layer"]["kernel"]
    else:
        matrix = params["word_embeddings"]["embedding"].T
    return matrix


def mean_of(scores: Scores, batch: Any) -> tuple[jax.Array, Metrics]:
    """Return the mean of the tokens' losses, and the metrics beside it.

    Args:
        scores: `loss`, and what else is to be a metric.
        batch: holds `weights`, float32 [batch, length], where some tokens count less: a mean is
            then over all weights, and their sum is the metric `weight`.
    """
    if "weights" not in batch:
        means = {name: jnp.mean(each) for name, each in scores.items()}
    else:
        weights = batch["weights"]
        weight = jnp.sum(weights)
        means = {
            name: jnp.sum(each * weights) / jnp.maximum(weight, 1.0)
            for name, each in scores.items()
        }
        means["weight"] = weight
    return means.pop("loss"), means


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of each label, float32 [...].

    The label's logit is picked by a comparison, not looked up: a look-up's gradient is a scatter,
    for which the gradients of all logits would be stored in 32 bits.

    Args:
        logits: float32 [..., classes].
        labels: int32 [...].
    """
    is_label = labels[..., None] == jnp.arange(logits.shape[-1])
    return jax.nn.logsumexp(logits, -1) - jnp.where(is_label, logits, 0.0).sum(-1)


def scores_of(logits: jax.Array, targets: jax.Array, evaluates: bool) -> Scores:
    """Return each token's cross-entropy, and whether its target is the likeliest.

    Among equally likely tokens the first counts, as for argmax.

    Args:
        logits: float [batch, length, vocab_size].
        targets: int32 [batch, length].
        evaluates: False: leave the second out, `accuracy`, 0 or 1.
    """
    logits = logits.astype(jnp.float32)
    scores = {"loss": cross_entropy(logits, targets)}
    if evaluates:  # by the largest logit, which the loss needs, too; of equals the first
        largest, count = logits.max(-1, keepdims=True), logits.shape[-1]
        likeliest = jnp.where(logits == largest, jnp.arange(count), count).min(-1)
        scores["accuracy"] = (likeliest == targets).astype(jnp.float32)
    return scores


def scores_in_chunks(
    hidden: jax.Array,
    matrix: jax.Array,
    targets: jax.Array,
    dtype: Any,
    chunks: int = 1,
    evaluates: bool = False,
    bias: jax.Array | None = None,
) -> Scores:
    """Return the scores of tokens by their last hidden values.

    With several chunks the logits of one are held at a time: the backward pass computes them again,
    and adds up the gradients of the matrix and the bias in their own type.

    Args:
        hidden: float [batch, length, hidden_size].
        matrix: from hidden values to logits, float32 [hidden_size, vocab_size].
        targets: int32 [batch, length].
        dtype: the type of the logits.
        chunks: into how many parts the positions are cut, a divisor of length.
        evaluates: as in `scores_of`.
        bias: added to the logits, float32 [vocab_size].
    """

    def of_chunk(hidden: jax.Array, targets: jax.Array) -> Scores:
        logits = jnp.dot(hidden.astype(dtype), matrix.astype(dtype))
        if bias is not None:
            logits = logits + bias.astype(dtype)
        return scores_of(logits, targets, evaluates)

    if chunks == 1:
        return of_chunk(hidden, targets)

    def in_chunks(x: jax.Array) -> jax.Array:
        cut = x.reshape(x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:])
        return jnp.moveaxis(cut, 1, 0)

    again = jax.checkpoint(of_chunk)
    _, scores = jax.lax.scan(
        lambda carry, chunk: (carry, again(*chunk)), None, (in_chunks(hidden), in_chunks(targets))
    )
    return {name: jnp.moveaxis(x, 0, 1).reshape(targets.shape) for name, x in scores.items()}


def classification(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Metrics]:
    """Return the mean cross-entropy of classes, and the accuracy as a metric.

    An example counts as right if its class is the likeliest, of equals the first.

    Args:
        logits: float [batch, classes].
        labels: int32 [batch].
    """
    losses = cross_entropy(logits.astype(jnp.float32), labels)
    right = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    return jnp.mean(losses), {"accuracy": jnp.mean(right)}
