"""Reports of a run: trackers, the plan as a table, the closing summary, plots and sweeps.

Reports read plans and settings and write files and text. They start nothing but a process that
draws, and import no Ray; only what breaks a step down imports JAX.

To record runs elsewhere, write a `Tracker`. `report.trackers=[my_pkg.MyTracker]` opens it for one
run; if it is registered by `@register`, in a module of yours that is imported before the run
starts, it is opened for every run.
"""

from launcher.report.trackers.tracker import TRACKERS, Metrics, TrackedRun, Tracker, register
from launcher.report.trackers.wandb_tracker import open_wandb

__all__ = ["TRACKERS", "Metrics", "TrackedRun", "Tracker", "open_wandb", "register"]
