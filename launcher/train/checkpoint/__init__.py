"""A run's state on disk, in Orbax's own format: `checkpoints/<step>/`.

Any JAX program reads it with stock Orbax, on any number of devices and without our code:
`orbax.checkpoint.CheckpointManager(folder).restore(step)` gives a dict of `step`, `params`,
`opt_state` and `key` as NumPy arrays. What belongs to a checkpoint but is no array (the settings,
the plan, the next batch) is JSON in the same folder, and `checksums.json` there holds a checksum of
every file: whoever goes on from a checkpoint knows that it is whole.

`pieces` is a state as a process holds it, `write` and `read` move it, `background` writes without
holding up training, `integrity` tells whole from damaged, and `choose` picks the one to go on from.
`worker` writes and reads states, `folder` and `prepare` the rest. What moves states is loaded on
first use: settings are checked, and a run's folder is looked at, without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from launcher.train.checkpoint.account import Account
from launcher.train.checkpoint.choose import Choice, InitError, newest, resolve
from launcher.train.checkpoint.integrity import damage
from launcher.train.checkpoint.layout import clear_partial, read_metadata

if TYPE_CHECKING:
    from launcher.train.checkpoint.background import Background
    from launcher.train.checkpoint.pieces import copied
    from launcher.train.checkpoint.read import Mismatch, check_params, restore, restore_params
    from launcher.train.checkpoint.write import SaveError, Writers, save

__all__ = [
    "Account",
    "Background",
    "Choice",
    "InitError",
    "Mismatch",
    "SaveError",
    "Writers",
    "check_params",
    "clear_partial",
    "copied",
    "damage",
    "newest",
    "read_metadata",
    "resolve",
    "restore",
    "restore_params",
    "save",
]

_HOMES = {
    "Background": "background",
    "Mismatch": "read",
    "SaveError": "write",
    "Writers": "write",
    "check_params": "read",
    "copied": "pieces",
    "restore": "read",
    "restore_params": "read",
    "save": "write",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
