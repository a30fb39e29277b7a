"""A run's state on disk, in Orbax's own format: `checkpoints/<step>/`.

Any JAX program reads it with stock Orbax, on any number of devices and without our code:
`orbax.checkpoint.CheckpointManager(folder).restore(step)` gives a dict of `step`, `params`,
`opt_state` and `key` as NumPy arrays. What belongs to a checkpoint but is no array (the settings,
the plan, the next batch) is JSON in the same folder, and `checksums.json` there holds a checksum of
every file: whoever goes on from a checkpoint knows that it is whole.

`pieces` is a state as a process holds it, `write` and `read` move it, `background` writes without
holding up training, `integrity` tells whole from damaged, and `choose` picks the one to go on from.
`worker` writes and reads states, `folder` and `prepare` the rest.
"""

from launcher.train.checkpoint.background import Background
from launcher.train.checkpoint.choose import Choice, InitError, newest, resolve, set_aside
from launcher.train.checkpoint.integrity import damage
from launcher.train.checkpoint.layout import clear_partial, read_metadata
from launcher.train.checkpoint.pieces import copied
from launcher.train.checkpoint.read import Mismatch, check_params, restore, restore_params
from launcher.train.checkpoint.write import SaveError, Writers, save

__all__ = [
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
    "set_aside",
]
