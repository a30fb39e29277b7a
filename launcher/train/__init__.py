"""A worker's half of a run, what happens each step: program, state, data, checkpoints.

`worker` does it in a process of its own, as `launcher.driver` says.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _load_our_recipes() -> None:
    """`python -m` searches the working folder first, and a folder `recipes` of the user's there
    would be taken for the package beside this one."""
    home = Path(__file__).resolve().parents[2]
    loaded = sys.modules.get("recipes")
    spec = PathFinder.find_spec("recipes", [str(home)])
    assert spec is not None
    assert spec.loader is not None
    if loaded is None or loaded.__file__ != spec.origin:
        sys.modules["recipes"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["recipes"])


_load_our_recipes()
