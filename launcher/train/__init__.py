"""A worker's side of a run: program, state, data and checkpoints.

`worker` runs it in a process of its own, directed by `launcher.driver`.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _load_our_recipes() -> None:
    """Import the package `recipes` beside this one.

    `python -m` searches the working folder first, and would find a folder `recipes` of the user's
    there.
    """
    home = Path(__file__).resolve().parents[2]
    loaded = sys.modules.get("recipes")
    spec = PathFinder.find_spec("recipes", [str(home)])
    assert spec is not None
    assert spec.loader is not None
    if loaded is None or loaded.__file__ != spec.origin:
        sys.modules["recipes"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["recipes"])


_load_our_recipes()
