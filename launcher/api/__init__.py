"""The Python door: `parallelize`, `init`, arrays that stay on the workers; both ends of its wire.

`parallelize` plans a step and makes it a function that runs in this process or, after `init`, on
workers; `step_worker` is what runs there. `launcher` offers the public names.
"""
