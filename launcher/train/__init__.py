"""A worker's side of a run: program, state, data and checkpoints.

`worker` runs it in a process of its own, directed by `launcher.driver`.
"""

from launcher.config.families import load_recipes

load_recipes()  # ours, before a user's folder of that name is found
