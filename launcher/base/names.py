"""Names that others define: transports, rematerialisation policies, variables of other programs.

A remat string is a policy, and how many layers it takes together, or at all: `full` recomputes
every layer by itself, `full/2` every two layers together, and `full:2` the first two layers of each
stage (the uniform and the block method of Megatron-LM). `full:2+selective` applies `selective` to
the other layers.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

# The path of each class, by `cluster.transport`; `auto` takes the first that suits the devices.
TRANSPORTS = {
    "pull": "launcher.runtime.transport.pull:PullTransport",
    "collective": "launcher.runtime.transport.permute:PermuteTransport",
}
# Variables of the environment that Slurm's commands read, and those of a job, which what is called
# in one inherits.
OF_SLURM = re.compile(r"_?(SLURMD?|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SCONTROL)_")
# The same, and those by which another launcher tells a process of its own which one it is.
OF_ANOTHER = re.compile(
    f"{OF_SLURM.pattern}|OMPI_COMM_|OMPI_MCA_(orte|ess)_|PMIX?_"
    "|JAX_(COORDINATOR_|LOCAL_DEVICE_IDS|NUM_PROCESSES|PROCESS_ID|(PARTITION|SLICE)_INDEX)"
)
REMAT_NAMES = (
    "none",
    "full",
    "selective",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
)
_NUMBERED = re.compile(
    r"(?P<policy>\w+)(?:/(?P<every>\d+)|:(?P<first>\d+)(?:\+(?P<rest>\w+))?)", re.ASCII
)


@dataclass(frozen=True)
class RematName:
    """What a word says.

    Attributes:
        policy: one of `REMAT_NAMES`.
        every: how many consecutive layers are recomputed together.
        first: how many of a stage's layers are recomputed so, from its first; None: all.
        rest: the policy of the others.
    """

    policy: str
    every: int = 1
    first: int | None = None
    rest: str = "none"

    @property
    def layers(self) -> int:
        """The layers that a stage needs for the word to mean what it says."""
        return (self.first or self.every) + (self.rest != "none")

    def policy_of(self, layer: int) -> str:
        """Return the policy of a stage's layer, by its number in the stage."""
        return self.policy if self.first is None or layer < self.first else self.rest


@functools.cache
def parse_remat(name: str) -> RematName:
    """Return what a word says.

    Raises:
        ValueError: it is none; the message is a clause about it.
    """
    if name in REMAT_NAMES:
        return RematName(name)
    found = _NUMBERED.fullmatch(name)
    policy = found["policy"] if found else name
    rest = (found and found["rest"]) or "none"
    if found is None or policy not in REMAT_NAMES or rest not in REMAT_NAMES:
        near = difflib.get_close_matches(re.split("[/:]", name)[0], REMAT_NAMES, 1)
        raise ValueError(
            f"{name} is not one of {', '.join(REMAT_NAMES)}, nor one of these with a number: "
            "full/2 (every 2 layers together), full:2 (the first 2 layers of each stage), "
            "full:2+selective (the others selectively)"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    if policy == "none":
        raise ValueError(f"{name} recomputes nothing; give none, or full{name[4:]}")
    if found["first"]:
        first = int(found["first"])
        if first < 1:
            raise ValueError(f"{name} recomputes no layer; give {rest}, or {policy}:1 and more")
        return RematName(policy, first=first, rest=rest)
    number = int(found["every"])
    if number < 2:
        raise ValueError(
            f"{name} groups no layers; give {policy} (each by itself), or {policy}/2 and more"
        )
    return RematName(policy, every=number)
