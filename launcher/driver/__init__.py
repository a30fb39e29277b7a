"""The driver's side of a run: from checked settings to an exit code.

`run.run` is the entry point. `planning` makes a plan of the settings, `folder` is the run's folder,
`training` trains in it and restarts after a failure, `loop` drives the steps, `workers` calls all
workers as one, and `record` writes down what they answer. `tasks` are those that are not a
training. The workers' own side of a step is `launcher.train`. A `Callback` observes a run.
"""

from launcher.driver.callback import Callback

__all__ = ["Callback"]
