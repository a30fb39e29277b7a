"""Handwritten digits that scikit-learn ships: pictures to try a model on, without a download."""

from __future__ import annotations

from typing import Any

import numpy as np

from launcher.base import lacking
from launcher.recipes import Batch, Dataset, InputError
from launcher.recipes.data.batches import batches, held_out
from launcher.recipes.datasets.digits import CLASSES, SIDE, Digits

_COUNT = 1797


def check(options: Digits, model_options: Any, validation: bool) -> None:
    """Refuse a model of other sizes, and a machine without scikit-learn.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        validation: whether the run evaluates.

    Raises:
        InputError: the digits do not fit the model, or scikit-learn is not there.
    """
    if command := lacking("sklearn"):
        raise InputError(f"dataset=digits needs scikit-learn; {command}")
    if hasattr(model_options, "image_size"):
        if model_options.image_size % SIDE:
            raise InputError(
                f"model.image_size={model_options.image_size} is not a multiple of {SIDE}, the "
                f"digits' own; set model.image_size={SIDE} or {4 * SIDE}"
            )
        wanted = {"num_classes": CLASSES}
    else:
        wanted = {"input_size": SIDE * SIDE, "output_size": CLASSES}
    for name, size in wanted.items():
        own = getattr(model_options, name, None)
        if own != size and not (name == "num_classes" and isinstance(own, int) and own > size):
            raise InputError(
                f"model.name={model_options.name} does not take digits: they need "
                f"model.{name}={size}"
            )
    if validation and not int(options.validation_fraction * _COUNT):
        raise InputError(
            f"dataset.validation_fraction={options.validation_fraction} holds out no digit to "
            "evaluate on; raise it, or set train.eval_every=0"
        )


def build(options: Digits, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return batches of digits.

    For a model of pictures: `image`, float32 [rows, image_size, image_size, channels] from 0 to 1,
    each point repeated, and `label`, int32 [rows]. For one of vectors: `x`, float32 [rows, 64], and
    `y`, float32 [rows, 10], 1 at the digit.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        global_batch_size: the samples of a batch.
        seed: picks the order of the training data.
    """
    from sklearn.datasets import load_digits  # here: checking settings must not load it

    found = load_digits()
    # Its digits come in the order of their writers: which are held out is drawn, always alike.
    order = np.random.default_rng(0).permutation(_COUNT)
    pictures = (found.images[order] / 16).astype(np.float32)
    labels = found.target[order].astype(np.int32)
    held = int(options.validation_fraction * _COUNT)

    def gather(which: np.ndarray) -> Batch:
        points, digits = pictures[which], labels[which]
        if not hasattr(model_options, "image_size"):
            return {
                "x": points.reshape(len(which), -1),
                "y": np.eye(CLASSES, dtype=np.float32)[digits],
            }
        times = model_options.image_size // SIDE
        points = points.repeat(times, axis=1).repeat(times, axis=2)[..., None]
        return {"image": points.repeat(model_options.channels, axis=3), "label": digits}

    count = _COUNT - held
    return Dataset(
        train=batches(count, global_batch_size, seed, gather),
        validation=held_out(held, global_batch_size, lambda which: gather(which + count)),
        describe=f"scikit-learn's digits: {_COUNT:,} pictures, {held:,} held out for validation",
    )
