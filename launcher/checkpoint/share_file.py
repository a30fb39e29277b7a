"""Files of a snapshot: a buffer with pieces of a state, and the header that describes it.

The header holds the moment, the place of each piece and a digest (xxh3_128, which finds accidents,
not forgery). It is there only while the buffer is whole. What several files hold of one moment is
put together to a state, under whatever plan.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash

from launcher.arrays.stacked_array import StackedArray
from launcher.base import parse_json, read_bytes
from launcher.checkpoint.pieces import Holding, Moment, Piece, within
from launcher.checkpoint.shards import Index, OwnedShards
from launcher.checkpoint.train_state import TrainState, flat_name
from launcher.checkpoint.write import stored_parts
from launcher.partition import Box, intersect

HEADER = ".json"
_ALIGNMENT = 64  # bytes


class ShardPlace(NamedTuple):
    """A shard's place in a buffer: its first byte, its shape, and the name of its type."""

    start: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * int(jax.numpy.dtype(self.dtype).itemsize)

    def bytes_of(self, buffer: np.ndarray) -> np.ndarray:
        """Return its bytes, a view of the buffer uint8 [bytes]."""
        return buffer[self.start : self.start + self.size]

    def of(self, buffer: np.ndarray) -> np.ndarray:
        """Return the shard, a view of the buffer uint8 [bytes]."""
        contents = self.bytes_of(buffer)
        return contents.view(jax.numpy.dtype(self.dtype)).reshape(self.shape)


class ShareLayout(NamedTuple):
    """The layout of a share in a buffer.

    Attributes:
        outline: the share's parts, trees of `OwnedShards` with a `ShardPlace` for each value.
        shapes: the shape of each array of the state, by its name.
        places: the piece and the place of each value, in the order of `copy_to`.
    """

    outline: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    places: list[tuple[Piece, ShardPlace]]

    @property
    def size(self) -> int:
        """The bytes of the buffer."""
        return max([1, *(place.start + place.size for _, place in self.places)])

    def header(self, moment: Moment, digest: str) -> bytes:
        """Return the content of the header of a buffer, given the digest of its values."""
        shards = [[*piece, *place] for piece, place in self.places]
        whole = {"moment": moment, "digest": digest, "arrays": self.shapes, "shards": shards}
        text = json.dumps(whole).encode()
        return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text


def lay_out(views: dict[str, Any]) -> ShareLayout:
    """Lay a share out: trees of `OwnedShards`, by the names that they are stored under."""
    places: list[tuple[Piece, ShardPlace]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    end = 0

    def placed(name: str, each: tuple[Index, np.ndarray], shape: tuple[int, ...]) -> Any:
        nonlocal end
        index, value = each
        place = ShardPlace(end, value.shape, value.dtype.name)
        places.append((piece_of(name, index, shape), place))
        end = aligned(end + place.size)
        return index, place

    def outlined(path: Any, leaf: OwnedShards) -> OwnedShards:
        name = flat_name(path)
        shapes[name] = leaf.shape
        shards = tuple(placed(name, each, leaf.shape) for each in leaf.shards)
        others = tuple(placed(name, each, leaf.shape) for each in leaf.others)
        return replace(leaf, shards=shards, others=others)

    outline = jax.tree_util.tree_map_with_path(outlined, views)
    return ShareLayout(outline, shapes, places)


def aligned(size: int) -> int:
    """Return the least multiple of the alignment that is no less."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def piece_of(name: str, index: Index, shape: Sequence[int]) -> Piece:
    """Return the piece that is at an index of an array of that name and shape."""
    ranges = (each.indices(n)[:2] for each, n in zip(index, shape, strict=True))
    return name, tuple(ranges)


# -- Reading --------------------------------------------------------------------------------------


@dataclass
class Found:
    """The contents of a host's intact files of one moment.

    Attributes:
        shapes: the shape of each array of the state, by its name.
        shards: the pieces by name and place, views of the files.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shards: dict[str, dict[Box, np.ndarray]] = field(default_factory=dict)

    @property
    def holding(self) -> Holding:
        """The same without the values."""
        pieces = [(name, place) for name, each in self.shards.items() for place in each]
        return Holding(self.shapes, pieces)

    def add(self, pieces: Mapping[Piece, np.ndarray]) -> None:
        """Add pieces of the same moment."""
        for (name, place), value in pieces.items():
            self.shards.setdefault(name, {})[place] = value

    def lacks(self, like: TrainState) -> list[Piece]:
        """Return the shards of a state on this process's devices that are no pieces here.

        Args:
            like: the state's shapes, a tree of `jax.ShapeDtypeStruct` with shardings.
        """
        return [
            (name, ranges)
            for (name, ranges), *_ in _wanted(like)
            if ranges not in self.shards.get(name, ())
        ]

    def copy_of(self, piece: Piece) -> np.ndarray:
        """Return a copy of a piece, of a part of one, or of parts of several together."""
        name, ranges = piece
        held = self.shards[name]
        if ranges in held:
            return np.array(held[ranges])
        whole = np.empty([end - start for start, end in ranges], next(iter(held.values())).dtype)
        for place, value in held.items():
            if (part := intersect(ranges, place)) is not None:
                whole[within(part, ranges)] = value[within(part, place)]
        return whole

    def restored(self, like: TrainState) -> TrainState:
        """Return a state all of which is here; the files may be written afterwards."""
        leaves, tree = jax.tree.flatten(stored_parts(like))
        wanted = _wanted(like)
        # JAX may take a NumPy array's memory for its own array, and the buffer is written again.
        values = [self.copy_of(piece).reshape(shape) for piece, shape, _ in wanted]
        on_devices = iter(jax.device_put(values, [device for *_, device in wanted]))
        arrays = [_assembled(leaf, on_devices) for leaf in leaves]
        return replace(like, **jax.tree.unflatten(tree, arrays))


def intact(folders: Iterable[Path]) -> dict[Moment, Found]:
    """Return the contents of the whole files of which no bit has changed, by the moment."""
    found: dict[Moment, Found] = {}
    for path in [path for folder in folders for path in folder.glob(f"*{HEADER}")]:
        with suppress(OSError, ValueError):  # another one takes its place; it is empty
            header = read_header(path)
            if header and (shards := _read(path.with_suffix(""), header)) is not None:
                shapes = {name: tuple(shape) for name, shape in header["arrays"].items()}
                found.setdefault(Moment(*header["moment"]), Found(shapes)).add(shards)
    return found


def _read(buffer: Path, header: dict[str, Any]) -> dict[Piece, np.ndarray] | None:
    """Return a buffer's pieces; None if they are not what was written. Raises OSError."""
    shards: dict[Piece, np.ndarray] = {}
    digest = xxhash.xxh3_128()
    with open(buffer, "r+b") as file:
        contents = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    for name, ranges, *about in header["shards"]:
        place = ShardPlace(*about)
        if place.start + place.size > contents.size:
            return None
        shards[name, tuple(map(tuple, ranges))] = place.of(contents)
        digest.update(place.bytes_of(contents).data)
    return shards if digest.hexdigest() == header["digest"] else None


def header_of(buffer: Path) -> Path:
    """Return the file that describes a buffer while it is whole."""
    return buffer.with_name(buffer.name + HEADER)


def read_header(path: Path) -> dict[str, Any] | None:
    """Return a header; None if it is not there, or not what was written."""
    try:
        own, _, text = read_bytes(path).partition(b"\n")
    except FileNotFoundError:
        return None
    if own != xxhash.xxh3_128_hexdigest(text).encode():
        return None
    header: dict[str, Any] = parse_json(text)
    return header


def _wanted(like: TrainState) -> list[tuple[Piece, tuple[int, ...], jax.Device]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(stored_parts(like))
    return [each for path, leaf in leaves for each in _shards_here(flat_name(path), leaf)]


def _shards_here(name: str, leaf: Any) -> list[tuple[Piece, tuple[int, ...], jax.Device]]:
    """Return for each device here the piece and the shape of its shard of an array."""
    if isinstance(leaf, StackedArray):
        found = []
        for i, row in enumerate(leaf.rows):
            for (_, ranges), shape, device in _shards_here(name, row):
                found.append(((name, ((i, i + 1), *ranges)), shape, device))
        return found
    shape = leaf.sharding.shard_shape(leaf.shape)
    where = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return [(piece_of(name, index, leaf.shape), shape, device) for device, index in where.items()]


def _assembled(leaf: Any, on_devices: Any) -> Any:
    if isinstance(leaf, StackedArray):
        return StackedArray([_assembled(row, on_devices) for row in leaf.rows])
    count = len(leaf.sharding.addressable_devices)
    own = [next(on_devices) for _ in range(count)]
    return jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, own, dtype=leaf.dtype
    )
