"""The arguments and results of a step, or of a part of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.trace.ir.jaxpr import Atom, Aval, Var


@dataclass(frozen=True, eq=False)
class Interface:
    """What goes into a program and what comes out of it.

    Attributes:
        in_tree, out_tree, in_avals: the arguments and results, whole batch shapes.
        invars: one variable an argument leaf. outvars: one atom a result leaf.
        donated, batch: per argument leaf.
        aliases: result leaf -> the donated argument leaf whose place it takes.
    """

    in_tree: Any
    out_tree: Any
    in_avals: tuple[Aval, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    donated: tuple[bool, ...]
    batch: tuple[bool, ...]
    aliases: dict[int, int]
