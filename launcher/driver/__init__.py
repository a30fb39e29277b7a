"""The driver's side of a run: from checked settings to an exit code.

`run.run` is the entry point. `prepare` plans, `training` trains in the run's folder and restarts
after a failure, `loop` drives the steps, and `workers` calls all workers as one. The workers' own
side of a step is `launcher.train`.
"""

import launcher.train  # noqa: F401  (our recipes, before a user's folder of that name is found)
