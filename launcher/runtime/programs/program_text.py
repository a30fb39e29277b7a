"""Collectives in a compiled program's text, and the operations that wait for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.runtime.programs.collectives import GRADIENT_SUM

_MODULE = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COLLECTIVE = re.compile(
    r"\b(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start|-done)?\("
)
_NAME = re.compile(r"%([\w.\-]+)")
_BUCKET = re.compile(rf'op_name="[^"]*\b{GRADIENT_SUM}_(\d+)/')


@dataclass(frozen=True)
class CollectiveOperation:
    """A collective of a compiled program.

    Attributes:
        kind: "all-reduce", "reduce-scatter" and so on.
        bucket: the number of the bucket of gradients that it sums, or None.
    """

    kind: str
    bucket: int | None


@dataclass(frozen=True)
class ProgramText:
    """What the text of a compiled program says.

    Attributes:
        module: the program's name.
        collectives: its collectives, by the name of the operation.
        after_sums: the operations that wait for a sum of gradients, such as those that unpack it.
    """

    module: str
    collectives: dict[str, CollectiveOperation]
    after_sums: frozenset[str]


def read_program(text: str) -> ProgramText:
    """Read the text of a compiled program, whose operations stand after their operands."""
    collectives: dict[str, CollectiveOperation] = {}
    after: set[str] = set()
    sums: set[str] = set()
    for line in text.splitlines():
        if (match := _OPERATION.match(line)) is None:
            continue
        name, rest = match.groups()
        if not sums.union(after).isdisjoint(_NAME.findall(rest)):
            after.add(name)
        if found := _COLLECTIVE.search(rest):
            bucket = _BUCKET.search(rest)
            kind = found.group(1)
            collectives[name] = CollectiveOperation(kind, int(bucket.group(1)) if bucket else None)
            if bucket:
                sums.add(name)
    module = _MODULE.search(text)
    return ProgramText(module.group(1) if module else "", collectives, frozenset(after - sums))
