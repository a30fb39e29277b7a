"""A run's checkpoints, in Orbax's own format: `checkpoints/<step>/`.

Any JAX program reads them with stock Orbax, on any number of devices and without our code:
`orbax.checkpoint.CheckpointManager(folder).restore(step)` returns a dict of `step`, `params`,
`opt_state`, `key` and, of a model with state, `model_state` as NumPy arrays. The rest of a
checkpoint (settings, plan, next batch) is JSON in the same folder, and `checksums.json` there holds
a checksum of every file, so that a damaged checkpoint is recognised.

`shards` is a process's part of a state, `write` and `read` move it, `background` writes it without
holding up training, `integrity` detects damage, `choose` picks the checkpoint to resume from, and
`finished` is the model for other programs, `flat` one by flat names, `weights` and `hugging_face`
the files of other programs.
Modules that need JAX are imported on first use: settings and run folders are checked without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from launcher.checkpoint.account import Account
from launcher.checkpoint.choose import InitError, NewestIntact, newest, resolve
from launcher.checkpoint.integrity import damage
from launcher.checkpoint.layout import best_step, clear_partial_saves, read_metadata, write_best

if TYPE_CHECKING:
    from launcher.checkpoint.background import Background
    from launcher.checkpoint.finished import FinishedModel, export_hugging_face, export_model
    from launcher.checkpoint.orbax_compat import PLACEHOLDER
    from launcher.checkpoint.read import (
        Mismatch,
        check_model,
        restore,
        restore_model,
        restore_parts,
        stored_shapes,
    )
    from launcher.checkpoint.shards import copy_to_host
    from launcher.checkpoint.write import SaveError, Writers, save, save_parts

__all__ = [
    "PLACEHOLDER",
    "Account",
    "Background",
    "FinishedModel",
    "InitError",
    "Mismatch",
    "NewestIntact",
    "SaveError",
    "Writers",
    "best_step",
    "check_model",
    "clear_partial_saves",
    "copy_to_host",
    "damage",
    "export_hugging_face",
    "export_model",
    "newest",
    "read_metadata",
    "resolve",
    "restore",
    "restore_model",
    "restore_parts",
    "save",
    "save_parts",
    "stored_shapes",
    "write_best",
]

_HOMES = {
    "PLACEHOLDER": "orbax_compat",
    "Background": "background",
    "Mismatch": "read",
    "SaveError": "write",
    "Writers": "write",
    "check_model": "read",
    "copy_to_host": "shards",
    "FinishedModel": "finished",
    "export_hugging_face": "finished",
    "export_model": "finished",
    "restore": "read",
    "restore_model": "read",
    "restore_parts": "read",
    "save": "write",
    "save_parts": "write",
    "stored_shapes": "read",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
