"""Files with a model's arrays that are no checkpoints: an `.npz`, or a folder of Hugging Face's.

Both are read by flat names such as `params.layers_0.kernel`, whatever the files name them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import numpy as np

from launcher.arrays.npz import Header, read_arrays, read_headers
from launcher.checkpoint.hugging_face import HuggingFace
from launcher.checkpoint.train_state import MODEL_PARTS
from launcher.recipes.models.hugging_face import CONFIG

Arrays = Callable[[str], np.ndarray]  # an array by its flat name


class Weights(Protocol):
    """The model's arrays in files of another kind than ours.

    Its methods raise OSError where a file cannot be read, and DamagedError where it does not hold
    what it should.
    """

    def headers(self) -> dict[str, Header]:
        """Return the shape and type of each array, by its flat name; read no array."""

    def opened(self, names: Sequence[str]) -> AbstractContextManager[Arrays]:
        """Open the files of these arrays; each is read when it is asked for."""


def find_weights(path: Path) -> Weights | None:
    """Return the arrays that are at a path; None for a folder of checkpoints."""
    if not path.is_dir():
        return _Npz(path)
    return HuggingFace(path) if (path / CONFIG).exists() else None


class _Npz:
    """One `.npz` file; other arrays in it, such as a dataset's, are left alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def headers(self) -> dict[str, Header]:
        headers = read_headers(self._path)
        return {name: one for name, one in headers.items() if name.split(".")[0] in MODEL_PARTS}

    def opened(self, names: Sequence[str]) -> AbstractContextManager[Arrays]:
        return nullcontext(read_arrays(self._path, names).__getitem__)  # a file is unpacked whole
