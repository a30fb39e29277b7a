"""What happens each step: state, data, loop, checkpoints, and the run's folder around them.

`run.run` is the door, and the rest follows from there: `prepare` plans, `training` runs in the run
folder, `loop` directs, `worker` does the work in a process of its own. The command line imports it.
"""
