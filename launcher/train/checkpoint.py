"""A run's state on disk, in Orbax's own format: `checkpoints/<step>/`.

Any JAX program reads it with stock Orbax, on any number of devices and without our code:
`orbax.checkpoint.CheckpointManager(folder).restore(step)` gives a dict of `step`, `params`,
`opt_state` and `key` as NumPy arrays. What belongs to a checkpoint but is no array (the settings,
the plan, the next batch) is JSON in the same folder. `worker` writes and reads states, `folder`
and `run` read the rest.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from launcher.train.step import TrainState

FIELDS = ("step", "params", "opt_state", "key")


def copied(state: TrainState) -> TrainState:
    """The state as host arrays of its own: those of devices are overwritten by the next step, and
    would tie a checkpoint to this run's number and kind of devices."""
    return jax.tree.map(lambda x: np.array(x, copy=True), jax.device_get(state))


def save(
    folder: Path,
    step: int,
    state: TrainState,
    metadata: dict[str, Any],
    keep: int | None = None,
    keep_every: int = 0,
) -> None:
    """Write `folder/<step>`, whole or not at all, and wait for it; then delete all but the newest
    `keep` and the multiples of `keep_every`.

    `metadata` must be JSON-able. Raises OSError where the disk does not take it.
    """
    tree = {name: getattr(state, name) for name in FIELDS}
    with _manager(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(tree), custom_metadata=metadata)
        steps = sorted(manager.all_steps())
        for old in steps[:-keep] if keep else []:
            if not keep_every or old % keep_every:
                manager.delete(old)


def restore(folder: Path, step: int, like: TrainState) -> TrainState:
    """Read `folder/<step>`.

    `like` holds a `jax.ShapeDtypeStruct` a leaf; each array goes straight to the sharding that it
    names. Raises FileNotFoundError for a step that is not there and ValueError for other shapes.
    """
    tree = {name: getattr(like, name) for name in FIELDS}
    with _manager(folder) as manager:
        return TrainState(**manager.restore(step, args=ocp.args.StandardRestore(tree)))


def latest_step(folder: Path) -> int | None:
    """The newest step that was saved whole; None where there is none, or no folder."""
    if not folder.is_dir():
        return None
    with _manager(folder) as manager:
        return manager.latest_step()


def read_metadata(folder: Path, step: int) -> dict[str, Any]:
    """The `metadata` that `folder/<step>` was saved with."""
    with _manager(folder) as manager:
        return manager.metadata(step).custom_metadata


def _manager(folder: Path) -> AbstractContextManager[ocp.CheckpointManager]:
    # Among several processes, only the one that asks takes part.
    me = jax.process_index() if jax.process_count() > 1 else None
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me or 0,
        active_processes=None if me is None else {me},
        barrier_sync_key_prefix=None if me is None else f"process_{me}",
    )
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False,
        create=me is None,
        multiprocessing_options=alone,
    )
    if me is not None:
        folder.mkdir(parents=True, exist_ok=True)
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handler)
