"""A worker's side of a run: program, state, data and checkpoints.

`worker` runs it in a process of its own, directed by `launcher.driver`.
"""
