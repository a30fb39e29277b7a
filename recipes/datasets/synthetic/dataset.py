"""Made-up samples that can be learned, the same on every machine.

Sample i is a pure function of i and is made on demand, so any number of samples takes no
memory. The seed of the run only changes their order. Validation uses the next numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from launcher.config.families import taken_by
from launcher.recipes import Batch, Dataset, InputError
from launcher.recipes.data.batches import batches, held_out, next_token_batch
from launcher.recipes.data.masking import Gather, as_the_model_takes
from launcher.recipes.datasets.synthetic import Synthetic

_NOISE = 0.3  # of pictures, beside patterns of deviation 1


def pictures(model: Any) -> Gather:
    """Return pictures: a pattern for each class, and noise; with labels, if the model has classes.

    A pattern has a wave's phase and direction of its own in each channel.
    """
    size, channels = model.image_size, model.channels
    classes = getattr(model, "num_classes", None)
    y, x = np.mgrid[:size, :size][..., None] / size

    def pattern(kind: int) -> np.ndarray:
        rng = np.random.default_rng([3, kind])
        turns = rng.integers(-2, 3, (2, channels))
        phase = rng.uniform(0, 2 * np.pi, channels)
        wave = np.sin(2 * np.pi * (turns[0] * x + turns[1] * y) + phase)
        return np.asarray(2**0.5 * wave)

    def gather(which: np.ndarray) -> Batch:
        images = np.empty((len(which), size, size, channels), np.float32)
        labels = np.empty(len(which), np.int32)
        for row, sample in enumerate(which):
            rng = np.random.default_rng([1, sample])
            labels[row] = rng.integers(classes or 10)
            noise = _NOISE * rng.standard_normal((size, size, channels))
            images[row] = pattern(int(labels[row])) + noise
        return {"image": images, "label": labels} if classes else {"image": images}

    return gather


# From inputs [rows, input_size] and normal noise [rows, output_size] to targets, like the noise.
Targets = Callable[[np.ndarray, np.ndarray], np.ndarray]

_SUCCESSORS = 4  # tokens that may follow a token: the loss can fall to ln 4 = 1.386
_TEACHER_SIZE = 64
_LARGEST_TABLE = 2**32  # bytes, of what samples are made from


def check(options: Synthetic, model_options: Any, validation: bool) -> None:
    """Refuse a model that no samples can be made for.

    Args:
        options: the dataset's settings.
        model_options: the model's settings, which give the shapes.
        validation: whether the run evaluates.

    Raises:
        InputError: the model takes neither tokens nor vectors, or too many of them.
    """
    kind = _kind(model_options)
    if kind == "pictures":
        return
    is_text = kind == "text"
    name, table = ("vocab_size", _SUCCESSORS) if is_text else ("input_size", _TEACHER_SIZE)
    if not is_text and options.targets == "linear":
        table = model_options.output_size
    number = getattr(model_options, name)
    if number * table * 8 > _LARGEST_TABLE:
        raise InputError(
            f"model.{name}={number} is too large for dataset.name=synthetic, which would need "
            f"{number * table * 8 / 2**30:,.0f} GiB to make samples; choose a smaller one"
        )


def build(options: Synthetic, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return batches in the model's shapes.

    For a model of tokens: `tokens` and `targets`, int32 [global_batch_size, sequence_length], from
    a random Markov chain. For one of vectors: `x`, float32 [global_batch_size, input_size], and
    `y`, float32 [global_batch_size, output_size]: from a random network with one hidden layer,
    `W x + b` with noise, or noise alone, as `options.targets` says. For one of masked tokens
    (`mask_every`) also `weights`: see `masking`. For one of pictures (`image_size`, `channels`)
    `image`, float32 [global_batch_size, image_size, image_size, channels], and `label`: see
    `pictures`.

    Args:
        options: the dataset's settings.
        model_options: the model's settings, which give the shapes.
        global_batch_size: the samples of a batch.
        seed: picks the order of the samples.
    """
    gather, num_samples = _gatherer(options, model_options), options.num_samples
    return Dataset(
        train=batches(num_samples, global_batch_size, seed, gather),
        validation=held_out(
            num_samples, global_batch_size, lambda which: gather(which + num_samples)
        ),
        describe=f"{num_samples:,} made-up samples, and as many others for validation",
    )


def _gatherer(options: Synthetic, model_options: Any) -> Callable[[np.ndarray], Batch]:
    kind = _kind(model_options)
    if kind == "text":
        return as_the_model_takes(model_options, _markov_chain(model_options))
    if kind == "pictures":
        return pictures(model_options)
    return _vectors(model_options, _TARGETS[options.targets](model_options))


def _kind(model_options: Any) -> str:
    """Return what a model takes by its options; raises InputError where they do not say."""
    if kind := taken_by(model_options):
        return kind
    raise InputError(
        f"dataset.name=synthetic makes no samples for model.name={model_options.name}; "
        "choose another dataset"
    )


def _markov_chain(model: Any) -> Callable[[np.ndarray], Batch]:
    successors = np.random.default_rng(0).integers(
        model.vocab_size, size=(model.vocab_size, _SUCCESSORS)
    )

    def gather(which: np.ndarray) -> Batch:
        sequences = np.empty((len(which), model.sequence_length + 1), np.int64)
        draws = np.empty((len(which), model.sequence_length), np.int64)
        for row, sample in enumerate(which):
            rng = np.random.default_rng([1, sample])
            sequences[row, 0] = rng.integers(model.vocab_size)
            draws[row] = rng.integers(_SUCCESSORS, size=model.sequence_length)
        for step in range(model.sequence_length):
            sequences[:, step + 1] = successors[sequences[:, step], draws[:, step]]
        return next_token_batch(sequences)

    return gather


def _vectors(model: Any, targets: Targets) -> Callable[[np.ndarray], Batch]:
    def gather(which: np.ndarray) -> Batch:
        x = np.empty((len(which), model.input_size))
        noise = np.empty((len(which), model.output_size))
        for row, sample in enumerate(which):
            rng = np.random.default_rng([1, sample])
            x[row] = rng.standard_normal(model.input_size)
            noise[row] = rng.standard_normal(model.output_size)
        return {"x": x.astype(np.float32), "y": targets(x, noise).astype(np.float32)}

    return gather


def _network(model: Any) -> Targets:
    """Return targets of a random network with one hidden layer, without noise."""
    rng = np.random.default_rng(0)
    first = rng.standard_normal((model.input_size, _TEACHER_SIZE)) / model.input_size**0.5
    second = rng.standard_normal((_TEACHER_SIZE, model.output_size)) / _TEACHER_SIZE**0.5
    return lambda x, noise: np.tanh(x @ first) @ second


def _linear(model: Any) -> Targets:
    """Return `W x + b` and noise of a tenth, all of them normal."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((model.input_size, model.output_size), np.float32)
    bias = rng.standard_normal(model.output_size, np.float32)
    return lambda x, noise: x.astype(np.float32) @ weights + bias + 0.1 * noise


_TARGETS: dict[str, Callable[[Any], Targets]] = {
    "network": _network,
    "linear": _linear,
    "noise": lambda model: lambda x, noise: noise,  # independent of the inputs
}
