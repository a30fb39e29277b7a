"""Made-up pictures: sample i is a pure function of i."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.recipes.data.masking import Gather

if TYPE_CHECKING:
    from launcher.recipes import Batch

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
