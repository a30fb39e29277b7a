"""A language model that goes on with texts on the devices of a plan, its parameters sharded there.

One program runs on all devices (GSPMD; Xu et al., 2021), so each process calls the same methods
with the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.config.schema import Config
from launcher.runtime.collectives import partition_spec
from launcher.stacked_array import StackedArray
from launcher.train.checkpoint import FinishedModel
from launcher.train.names import flat_name
from launcher.train.text_layout import TextLayout
from recipes.decoding import Generator, Sampling, TextPlaces, build_decoder

_AT_ONCE = 2**30  # bytes of arrays that are read together


class TextModel:
    """Goes on with texts; programs are compiled at first use and stay.

    Args:
        settings: the run's settings.
        layout: where the parameters lie.
        sampling: how tokens are drawn.
        devices: all devices, of which the first are used.

    Raises:
        InputError: the model has no decoder.
    """

    def __init__(
        self,
        settings: Config,
        layout: TextLayout,
        sampling: Sampling,
        devices: Sequence[jax.Device],
    ) -> None:
        decoder = build_decoder(settings.model, settings.train.precision)
        here = np.array(devices[: layout.num_devices])
        self._mesh = Mesh(here.reshape(tuple(layout.sizes.values())), tuple(layout.sizes))
        self._layout = layout
        whole = NamedSharding(self._mesh, PartitionSpec())
        places = TextPlaces(whole, lambda shape: self._at(layout.of_cache(shape)))
        self._generator = Generator(decoder, sampling, places)

    def load(self, model: FinishedModel) -> Any:
        """Return a checkpoint's parameters on the devices; the host holds few at a time.

        Raises:
            Mismatch: it cannot be read.
        """
        names = [name for name in model.shapes if name.startswith("params.")]
        found: dict[str, Any] = {}
        while names:
            now: list[str] = []
            size = 0
            while names and (not now or size < _AT_ONCE):
                now.append(names.pop())
                size += 4 * int(np.prod(model.shapes[now[-1]]))
            for name, value in model.read(now).items():
                found[name] = self._put(name, value)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: found[f"params.{flat_name(path)}"], model.tree["params"]
        )

    def place(self, params: Any) -> Any:
        """Return parameters of a training, without adapters, on the devices.

        All processes call it together, wherever the parameters lie.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._put(f"params.{flat_name(path)}", everywhere(leaf)), params
        )

    def generate(
        self, params: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0
    ) -> Iterator[np.ndarray]:
        """Yield the next token of each prompt; see `Generator`."""
        return self._generator(params, prompts, max_new_tokens, seed)

    def _at(self, spec: Any) -> NamedSharding:
        return NamedSharding(self._mesh, partition_spec(spec))

    def _put(self, name: str, value: np.ndarray) -> jax.Array:
        sharding = self._at(self._layout.specs[name])
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def everywhere(leaf: Any) -> np.ndarray:
    """Return the value of an array, in every process; all of them call it together.

    The processes that hold none of it get it by a sum, in which each shard is given once.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, StackedArray):
        return np.stack([everywhere(row) for row in leaf.rows])
    if leaf.is_fully_addressable and jax.process_count() == 1:
        return np.asarray(leaf)
    bits = np.dtype(f"u{leaf.dtype.itemsize}")  # a sum of bits, as that of -0.0 and 0 is 0
    own = np.zeros(leaf.shape, bits)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            own[shard.index] = np.asarray(shard.data).view(bits)
    mesh = Mesh(np.array(jax.devices()), ("device",))
    mine = jax.local_devices()
    rows = [jax.device_put(own[None] if i == 0 else np.zeros_like(own)[None], d)
            for i, d in enumerate(mine)]  # fmt: skip
    parts = jax.make_array_from_single_device_arrays(
        (len(mesh.devices), *leaf.shape), NamedSharding(mesh, PartitionSpec("device")), rows
    )
    whole = NamedSharding(mesh, PartitionSpec())
    summed = jax.jit(_sum, out_shardings=whole)(parts)
    return np.asarray(summed.addressable_shards[0].data).view(leaf.dtype)


def _sum(parts: jax.Array) -> jax.Array:
    """Sum over devices; a function of the module's own is compiled once for all equal shapes."""
    return parts.sum(0, dtype=parts.dtype)
