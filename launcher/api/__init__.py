"""The Python interface: `parallelize`, `init`, and arrays that stay on the workers.

`parallelize` plans a step and makes it a function that runs in this process or, after `init`, on
workers; `step_worker` is the part that runs there. The public names are those of `launcher`.
"""
