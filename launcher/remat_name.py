"""Words for rematerialisation: a policy, and how many layers it takes together, or at all.

`full` computes every layer again by itself, `full/2` every two layers together, and `full:2` the
first two layers of each stage (the uniform and the block method of Megatron-LM).
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

WORDS = (
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
_NUMBERED = re.compile(r"(?P<policy>\w+)(?P<sign>[/:])(?P<number>\d+)", re.ASCII)


@dataclass(frozen=True)
class RematName:
    """What a word says.

    Attributes:
        policy: one of `WORDS`.
        every: how many consecutive layers are computed again together.
        first: how many of a stage's layers are computed again, from its first; None: all.
    """

    policy: str
    every: int = 1
    first: int | None = None

    @property
    def layers(self) -> int:
        """The layers that a stage needs for the word to mean what it says."""
        return self.first or self.every


@functools.cache
def parse_remat(name: str) -> RematName:
    """Return what a word says.

    Raises:
        ValueError: it is none; the message is a clause about it.
    """
    if name in WORDS:
        return RematName(name)
    found = _NUMBERED.fullmatch(name)
    policy = found["policy"] if found else name
    if found is None or policy not in WORDS:
        near = difflib.get_close_matches(re.split("[/:]", name)[0], WORDS, 1)
        raise ValueError(
            f"{name} is not one of {', '.join(WORDS)}, nor one of these with a number: full/2 "
            f"(every 2 layers together), full:2 (the first 2 layers of each stage)"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    number = int(found["number"])
    if policy == "none":
        raise ValueError(f"{name} recomputes nothing; give none, or full{name[4:]}")
    if found["sign"] == ":":
        if number < 1:
            raise ValueError(f"{name} recomputes no layer; give none, or {policy}:1 and more")
        return RematName(policy, first=number)
    if number < 2:
        raise ValueError(
            f"{name} groups no layers; give {policy} (each by itself), or {policy}/2 and more"
        )
    return RematName(policy, every=number)
