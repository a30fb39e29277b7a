"""A run's life in the driver, the process that directs: from settings to an exit code.

`run.run` is the door: `prepare` plans, `training` runs in the run's folder and starts again after a
failure, `loop` directs the steps, `workers` are all workers as one. What the workers themselves do
each step is `launcher.train`.
"""

import launcher.train  # noqa: F401  (our recipes, before a user's folder of that name is found)
