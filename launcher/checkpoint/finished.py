"""Export a checkpoint's model for other programs, with adapters merged or parameters averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launcher.checkpoint.flat import Mismatch, names_of, sources, value_of
from launcher.checkpoint.hugging_face import Folder, write_hugging_face
from launcher.checkpoint.orbax_compat import PLACEHOLDER
from launcher.checkpoint.read import (
    first_of,
    leaf_shapes,
    leaves_of,
    restore_parts,
    stored_tree_of,
)
from launcher.checkpoint.train_state import (
    ADAPTERS,
    MODEL_PARTS,
    adapted_kernel,
    flat_name,
    without_adapters,
)
from launcher.config.optimizer import Lora


class FinishedModel:
    """A model in a checkpoint: adapters are added to what they are for as it is read.

    Args:
        path: the checkpoint.
        lora: the settings that its adapters were trained with.
        ema: whether to take the averages of the parameters.

    Attributes:
        tree: what describes the model's arrays, by part and then nested as the model has them.
        shapes: the shape of each array, by its flat name.

    Raises:
        Mismatch: it cannot be read, or holds no averages.
    """

    def __init__(self, path: Path, lora: Lora, ema: bool = False) -> None:
        self._path, self._lora = path, lora
        self._stored_tree = tree = stored_tree_of(path)
        if ema and "ema" not in tree:
            raise Mismatch("it holds no averages, as its run had no optimizer.ema")
        self._stored = leaves_of(tree)
        if without_adapters(tree["params"]) is not tree["params"] and not lora.rank:
            raise Mismatch("it holds adapters, but the settings of its run have no optimizer.lora")
        self._ema = ema
        self.tree = {name: tree[name] for name in MODEL_PARTS if name in tree}
        self.tree["params"] = without_adapters(self.tree["params"])
        self.shapes = leaf_shapes(leaves_of(self.tree))

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Read some arrays by their flat names, and no others."""
        wanted = list(names)
        kernels = {name: self._where(name) for name in wanted}
        adapters = {name: pair for name in wanted if (pair := self._adapter(name))}
        needed = {*kernels.values(), *(one for pair in adapters.values() for one in pair)}

        def spec(where: Any, leaf: Any) -> Any:
            is_needed = flat_name(where) in needed
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_needed else PLACEHOLDER

        specs = jax.tree_util.tree_map_with_path(spec, self._stored_tree)
        found = leaves_of(restore_parts(self._path, specs))
        arrays = {name: np.asarray(found[where]) for name, where in kernels.items()}
        for name, (a, b) in adapters.items():
            arrays[name] = adapted_kernel(arrays[name], found[a], found[b], self._lora)
        return arrays

    def whole(self) -> dict[str, Any]:
        """Read all of the model: its parts, nested as the model has them, of NumPy arrays."""
        found = self.read(self.shapes)
        return dict(
            jax.tree_util.tree_map_with_path(lambda where, _: found[flat_name(where)], self.tree)
        )

    def _where(self, name: str) -> str:
        """Return the name under which an array is stored."""
        part, _, rest = name.partition(".")
        average = f"ema.{rest}"
        return average if self._ema and part == "params" and average in self._stored else name

    def _adapter(self, name: str) -> tuple[str, str] | None:
        part, _, rest = name.partition(".")
        pair = tuple(f"params.{ADAPTERS}.{rest}.{one}" for one in "ab")
        if part != "params" or pair[0] not in self._stored:
            return None
        return self._where(pair[0]), self._where(pair[1])


def export_hugging_face(
    model: FinishedModel,
    target: Path,
    folder: Folder,
    *,
    dtype: str,
    private: bool,
) -> int:
    """Write a model's arrays to the folder `target`, as `write_hugging_face` does.

    Raises:
        Mismatch: the checkpoint lacks an array.
        OSError: the folder cannot be written.
    """
    shapes = {f"params.{tensor.ours}": tensor.shape_here for tensor in folder.tensors}
    found = sources(shapes, model.shapes)
    if missing := sorted(shapes.keys() - found.keys()):
        raise Mismatch(f"it has no {first_of(missing)} of the shape that the settings give")

    def arrays(names: Sequence[str]) -> Mapping[str, np.ndarray]:
        read = model.read({one for name in names for one in names_of(found[name])})
        return {name: value_of(read.__getitem__, found[name]) for name in names}

    return write_hugging_face(target, folder, arrays, dtype, private)
