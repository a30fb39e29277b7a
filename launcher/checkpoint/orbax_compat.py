"""Everything that checkpoints take from Orbax, and from TensorStore beneath it.

Each name is given with the reason for its use, and with the version it was seen in where Orbax
does not document it. All others are public in Orbax 0.12.8 and TensorStore 0.1.86.

These are the handlers below Orbax's front doors. `CheckpointManager` and `StandardCheckpointer`
take arrays of a JAX process group, whose processes wait for one another at JAX's barriers. Here
each process writes and reads alone, and the process that writes belongs to no group.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from launcher.arrays.stacked_array import StackedArray
from launcher.checkpoint.layout import ARRAYS
from launcher.checkpoint.shards import OwnedShards

# Stands for an array that is not read.
PLACEHOLDER = ocp.PLACEHOLDER
_CHUNK_BYTES = 2**24  # at most; a reader that needs a part of an array reads whole chunks


def write_shards(arrays: Path, tree: Any, process: int) -> None:
    """Write the shards of one process into the folder `arrays`, and wait for it.

    Args:
        arrays: the folder of the arrays, which all processes write to.
        tree: a tree of `OwnedShards`.
        process: the index of this process among those that write; the first one, 0, writes what
            describes the tree.
    """
    args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    _writer(process).save(arrays, args=ocp.args.PyTreeSave(tree, args))


def process_folder(arrays: Path, process: int) -> Path:
    """Return the folder in `arrays` that `write_shards` writes to for one process.

    Orbax has no function for its name, `ocdbt.process_<index>` (seen in 0.12.8).
    """
    return arrays / f"ocdbt.process_{process}"


def merge_shards(arrays: Path) -> None:
    """Merge what all processes have written into one checkpoint; for the first process alone."""
    _writer(0).finalize(arrays)


def step_metadata(custom: dict[str, Any], began: int, ended: int) -> dict[str, Any]:
    """Return what `ocp.CheckpointManager` writes beside the arrays and looks for (seen in 0.12.8).

    Args:
        custom: our own metadata, JSON-able.
        began: when the save began, in nanoseconds since the epoch.
        ended: when it ended, in the same unit.
    """
    return {
        "item_handlers": {ARRAYS: ocp.StandardCheckpointHandler.typestr()},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": began,
        "commit_timestamp_nsecs": ended,
        "custom_metadata": custom,
    }


def read_tree(arrays: Path, like: Any) -> Any:
    """Read arrays, each straight to its sharding; this process alone, with no synchronisation.

    Args:
        arrays: the folder of the arrays.
        like: the stored tree with a `jax.ShapeDtypeStruct` for each array to read; one that has no
            sharding is read as a NumPy array. A `PLACEHOLDER` is not read, and a `StackedArray` of
            shapes only in the rows that have a part here.

    Returns:
        The tree of arrays, with each `PLACEHOLDER` left as it is.

    Raises:
        ValueError: a stored array has another shape.
    """
    # With `primary_host=None` no process waits for another.
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler(primary_host=None)),
        (StackedArray, _RowsHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=None),
        type_handler_registry=registry,
    )
    wanted = ocp.args.PyTreeRestore(like, restore_args=jax.tree.map(_restore_args, like))
    return handler.restore(arrays, args=wanted)


def stored_tree(arrays: Path) -> Any:
    """Return the stored tree with the metadata of each array, such as `shape`; read no array.

    Raises:
        Exception: of any type, where another program has written the files.
    """
    return ocp.PyTreeCheckpointHandler().metadata(arrays).tree


def os_error_code(message: str) -> int | None:
    """Return the code of the system's error in a message of TensorStore's; None where it has none.

    TensorStore has no exceptions of its own: it raises ValueError, whose text holds a part like
    `os_error_code='28'` (seen in 0.1.86).
    """
    found = re.search(r"os_error_code='(\d+)'", message)
    return int(found[1]) if found else None


def _restore_args(leaf: Any) -> Any:
    if isinstance(leaf, StackedArray):
        return _RowsArgs(restore_type=StackedArray, dtype=leaf.dtype, rows=leaf.rows)
    if leaf is PLACEHOLDER or leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        dtype=leaf.dtype,
        sharding=leaf.sharding,
        global_shape=leaf.shape,
        strict=True,  # another shape is an error: neither cut nor padded
    )


def _writer(process: int) -> ocp.PyTreeCheckpointHandler:
    """Return a handler that writes trees of `OwnedShards`."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (OwnedShards, _ShardsHandler(process))
    )
    # Orbax compares it with JAX's index of this process, which is 0 in the process of `background`.
    primary = ocp.options.MultiprocessingOptions(primary_host=jax.process_index() - process)
    # Weights hardly compress, and trying costs the processor that trains.
    return ocp.PyTreeCheckpointHandler(
        multiprocessing_options=primary,
        type_handler_registry=registry,
        use_compression=False,
    )


class _ShardsHandler(ocp.type_handlers.NumpyHandler):
    """Writes the `OwnedShards` of one process; stock Orbax reads them as NumPy arrays.

    Orbax's `ArrayHandler` writes a `jax.Array`, which neither outlives the next step, as its memory
    is donated, nor can be handed to another process.
    """

    def __init__(self, process: int) -> None:
        super().__init__()
        self._process = process

    async def serialize(
        self,
        values: Sequence[OwnedShards],
        infos: Sequence[Any],
        args: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        """Write all of `values` before it returns; see `ocp.type_handlers.TypeHandler`."""
        args = args or [ocp.SaveArgs()] * len(values)
        jobs = zip(values, infos, args, strict=True)
        await _all(self._write(*job) for job in jobs if job[0].shards)
        return []

    async def _write(self, owned: OwnedShards, info: Any, arg: Any) -> None:
        # Orbax's handlers lay an array out on the disk by it (seen in 0.12.8).
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=True,
            global_shape=owned.shape,
            local_shape=owned.shard_shape,
            dtype=owned.dtype,
            process_index=self._process,
            arg=arg,
        )
        # The array's description is written once: the processes' stores become one.
        store = await ts.open(
            ts.Spec(spec),
            create=owned.is_first,
            open=True,
            assume_metadata=not owned.is_first,
            context=info.ts_context,
        )
        await _all(
            store[index].write(shard, can_reference_source_data_indefinitely=True)
            for index, shard in owned.shards
        )


@dataclass
class _RowsArgs(ocp.RestoreArgs):
    """Restore arguments of a `StackedArray`: the shape and sharding of every row."""

    rows: tuple[Any, ...] = ()


class _RowsHandler(ocp.type_handlers.NumpyHandler):
    """Reads the rows of arrays along their first axis, each straight to its sharding."""

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Read `args[i].rows` of each array; see `ocp.type_handlers.TypeHandler`."""
        assert args is not None
        return [await self._read(info, arg) for info, arg in zip(infos, args, strict=True)]

    async def _read(self, info: Any, arg: Any) -> StackedArray:
        # Where Orbax's handlers find an array on the disk (seen in 0.12.8).
        spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
        store = await ts.open(ts.Spec(spec), open=True, context=info.ts_context)
        wanted = (len(arg.rows), *arg.rows[0].shape)
        if store.shape != wanted:
            raise ValueError(f"{info.name} is of shape {store.shape}, not {wanted}")
        return StackedArray([await _row(store, i, row) for i, row in enumerate(arg.rows)])


async def _row(store: Any, i: int, row: Any) -> jax.Array:
    """Read the parts of a row that this process's devices have."""
    where = row.sharding.addressable_devices_indices_map(row.shape)
    keys = {device: str(index) for device, index in where.items()}
    parts = {keys[device]: store[(i, *index)] for device, index in where.items()}
    read = await asyncio.gather(*(part.read() for part in parts.values()))
    values = dict(zip(parts, read, strict=True))
    on_devices = [
        jax.device_put(np.asarray(values[key], row.dtype), device) for device, key in keys.items()
    ]
    return jax.make_array_from_single_device_arrays(
        row.shape, row.sharding, on_devices, dtype=row.dtype
    )


async def _all(jobs: Iterable[Awaitable[Any]]) -> None:
    """Wait for all jobs, even if one fails, since none may continue after that.

    Raises:
        BaseException: what the first failed job raised.
    """
    for outcome in await asyncio.gather(*jobs, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
