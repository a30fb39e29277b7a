"""A worker's side of a run: program, state, data and checkpoints.

`worker` runs it in a process of its own, directed by `launcher.driver`.
"""

from launcher.train.spikes import LAG as LAG
from launcher.train.spikes import LIMIT as LIMIT
from launcher.train.spikes import batch_index as batch_index
