"""A finished model on the devices of a layout, sharded there, whatever its arrays come from.

One program runs on all devices (GSPMD; Xu et al., 2021), so each process calls the same methods
with the same arguments. No process holds more than its share of the model and a few arrays on the
way there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.arrays.stacked_array import StackedArray
from launcher.checkpoint import FinishedModel
from launcher.checkpoint.train_state import flat_name
from launcher.config.schema import Config
from launcher.inference.model_layout import ModelLayout
from launcher.recipes.models.decoding import Generator, Sampling, build_decoder
from launcher.runtime.programs.collectives import partition_spec

_AT_ONCE = 2**30  # bytes of arrays that are read together


class ModelPlaces:
    """Puts arrays where a layout says.

    Args:
        layout: where the model's arrays lie.
        devices: all devices, of which the first are used.
    """

    def __init__(self, layout: ModelLayout, devices: Sequence[jax.Device]) -> None:
        here = np.array(devices[: layout.num_devices])
        self._mesh = Mesh(here.reshape(tuple(layout.sizes.values())), tuple(layout.sizes))
        self._layout = layout

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what all devices have."""
        return self.at(())

    def at(self, spec: Any) -> NamedSharding:
        """Return the sharding of a spec of the layout."""
        return NamedSharding(self._mesh, partition_spec(spec))

    def cache(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array of a decoder's cache."""
        return self.at(self._layout.of_cache(shape))

    def of_model(self, name: str) -> NamedSharding:
        """Return the sharding of an array of the model, by its flat name."""
        return self.at(self._layout.specs[name])

    def load(self, model: FinishedModel) -> dict[str, Any]:
        """Return a checkpoint's model on the devices, by its parts, nested as the model has them.

        Raises:
            Mismatch: it cannot be read.
        """
        found: dict[str, Any] = {}
        for names in _some_at_once(model.shapes):
            for name, value in model.read(names).items():
                found[name] = put(value, self.of_model(name))
        return dict(
            jax.tree_util.tree_map_with_path(lambda path, _: found[flat_name(path)], model.tree)
        )

    def place(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        pieces: Iterable[tuple[int | None, np.ndarray]],
    ) -> jax.Array | None:
        """Return an array of the model on the devices; None in a process that has none of them.

        Args:
            name: its flat name.
            shape: its shape.
            dtype: its dtype.
            pieces: its rows with their numbers, or all of it with None. This process keeps only
                the shards of its own devices.
        """
        sharding = self.of_model(name)
        own: Any = sharding.addressable_devices_indices_map(shape)
        parts = {device: np.empty(sharding.shard_shape(shape), dtype) for device in own}
        for number, value in pieces:
            for device, part in parts.items():
                if number is None:
                    part[...] = value[own[device]]
                    continue
                of_rows, *rest = own[device]
                start, stop, _ = of_rows.indices(shape[0])
                if start <= number < stop:
                    part[number - start] = value[tuple(rest)]
        if not own:
            return None
        on_devices = [jax.device_put(part, device) for device, part in parts.items()]
        return jax.make_array_from_single_device_arrays(shape, sharding, on_devices)


def text_generator(settings: Config, places: ModelPlaces) -> Generator:
    """Return the generator of a run's model on these devices.

    Args:
        settings: the run's settings, whose section `generate` says how to draw.
        places: where the parameters lie.

    Raises:
        InputError: the model has no decoder.
    """
    asked = settings.generate
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
    decoder = build_decoder(settings.model, settings.train.precision)
    return Generator(decoder, sampling, places)


def put(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return an array that all processes have, sharded."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _some_at_once(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Yield the names of arrays, of about as many together as may be read at once."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        names.append(name)
        size += 4 * int(np.prod(shape))
        if size >= _AT_ONCE:
            yield names
            names, size = [], 0
    if names:
        yield names


def everywhere(leaf: Any) -> np.ndarray:
    """Return the value of an array, in every process; all of them call it together.

    The processes that hold none of it get it by a sum, in which each shard is given once.
    """
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
