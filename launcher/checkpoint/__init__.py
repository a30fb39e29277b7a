"""A run's checkpoints, in Orbax's own format: `checkpoints/<step>/`.

Any JAX program reads them with stock Orbax, on any number of devices and without our code:
`orbax.checkpoint.CheckpointManager(folder).restore(step)` returns a dict of `step`, `params`,
`opt_state`, `key` and, of a model with state, `model_state` as NumPy arrays. The rest of a
checkpoint (settings, plan, next batch) is JSON in the same folder, and `checksums.json` there holds
a checksum of every file, so that a damaged checkpoint is recognised.

`shards` is a process's part of a state, `write` and `read` move it, `snapshot` keeps it in memory,
in files that `share_file` reads, of which hosts give one another `pieces`, `background` writes it
from there without holding up training, `layout` detects damage, `choose` picks the checkpoint to
resume from, `mirror` copies them to an object store, `mirroring` does so beside training, and
`finished` is the model for other programs; `flat` and `hugging_face` are the files
of these.
Modules that need JAX are imported on first use: settings and run folders are checked without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from launcher.checkpoint.choose import InitError as InitError
from launcher.checkpoint.choose import NewestIntact as NewestIntact
from launcher.checkpoint.choose import RunMetadata as RunMetadata
from launcher.checkpoint.choose import newest as newest
from launcher.checkpoint.choose import read_run_metadata as read_run_metadata
from launcher.checkpoint.choose import resolve as resolve
from launcher.checkpoint.layout import best_step as best_step
from launcher.checkpoint.layout import clear_partial_saves as clear_partial_saves
from launcher.checkpoint.layout import copy_checkpoint as copy_checkpoint
from launcher.checkpoint.layout import damage as damage
from launcher.checkpoint.layout import read_metadata as read_metadata
from launcher.checkpoint.layout import steps_in as steps_in
from launcher.checkpoint.layout import write_best as write_best
from launcher.checkpoint.mirror import Mirror as Mirror
from launcher.checkpoint.mirror import MirrorCopy as MirrorCopy
from launcher.checkpoint.mirror import note_roll_back as note_roll_back
from launcher.checkpoint.mirroring import Mirroring as Mirroring

if TYPE_CHECKING:
    from launcher.checkpoint.background import Background as Background
    from launcher.checkpoint.background import Saver as Saver
    from launcher.checkpoint.finished import FinishedModel as FinishedModel
    from launcher.checkpoint.finished import export_hugging_face as export_hugging_face
    from launcher.checkpoint.flat import Mismatch as Mismatch
    from launcher.checkpoint.flat import write_flat as write_flat
    from launcher.checkpoint.orbax_compat import PLACEHOLDER as PLACEHOLDER
    from launcher.checkpoint.pieces import Holdings as Holdings
    from launcher.checkpoint.pieces import Moment as Moment
    from launcher.checkpoint.pieces import Piece as Piece
    from launcher.checkpoint.pieces import copies as copies
    from launcher.checkpoint.pieces import lends as lends
    from launcher.checkpoint.pieces import newest_of_all as newest_of_all
    from launcher.checkpoint.read import check_model as check_model
    from launcher.checkpoint.read import check_state as check_state
    from launcher.checkpoint.read import check_vocabulary as check_vocabulary
    from launcher.checkpoint.read import first_of as first_of
    from launcher.checkpoint.read import restore as restore
    from launcher.checkpoint.read import restore_model as restore_model
    from launcher.checkpoint.read import restore_parts as restore_parts
    from launcher.checkpoint.read import stored_shapes as stored_shapes
    from launcher.checkpoint.shards import copy_to_host as copy_to_host
    from launcher.checkpoint.share_file import Found as Found
    from launcher.checkpoint.share_file import intact as intact
    from launcher.checkpoint.snapshot import HostPlace as HostPlace
    from launcher.checkpoint.write import SaveError as SaveError
    from launcher.checkpoint.write import Writers as Writers
    from launcher.checkpoint.write import drop_after as drop_after
    from launcher.checkpoint.write import save as save
    from launcher.checkpoint.write import save_parts as save_parts

# Modules that need JAX, and their names that are imported from here.
_HOMES = {
    "background": ("Background", "Saver"),
    "finished": ("FinishedModel", "export_hugging_face"),
    "flat": ("Mismatch", "write_flat"),
    "orbax_compat": ("PLACEHOLDER",),
    "pieces": ("Holdings", "Moment", "Piece", "copies", "lends", "newest_of_all"),
    "read": (
        *("check_model", "check_state", "check_vocabulary", "first_of", "restore"),
        *("restore_model", "restore_parts", "stored_shapes"),
    ),
    "share_file": ("Found", "intact"),
    "shards": ("copy_to_host",),
    "snapshot": ("HostPlace",),
    "write": ("SaveError", "Writers", "drop_after", "save", "save_parts"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
