"""What did a run do? Trackers, the plan as a table, the closing summary, plots and sweeps.

Reports read plans and settings and write files and text. They start nothing and import neither JAX
nor Ray.

To record runs elsewhere, write a `Tracker` and register it by `@register`, in any module of yours
that is imported before the run starts.
"""

from launcher.report.registry import TRACKERS, TrackedRun, register
from launcher.report.tracker import Metrics, Tracker
from launcher.report.wandb_tracker import open_wandb

register("wandb")(open_wandb)

__all__ = ["TRACKERS", "Metrics", "TrackedRun", "Tracker", "open_wandb", "register"]
