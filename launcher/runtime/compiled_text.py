"""Collectives in the text of a compiled program: kinds, groups, bytes, and what runs beside them.

The text is XLA's HLO after scheduling. What is asynchronous there begins at a `-start` and ends at
a `-done`; what stands in between runs beside it. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from launcher.plan import CompiledCollectives

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z\d\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")  # its type, the type's bits, its shape
_COLLECTIVE = re.compile(
    r"(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start)?"
)
_SCATTER = "reduce-scatter"  # its result is a share of what it reduces
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"(?:to_apply|_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_NUMBERED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}"
)
_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")  # an axis, the size before its part, the part's
# What takes no time on a device, or is itself a transfer.
_IDLE = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|partition-id|replica-id"
    r"|.*-(?:start|done)"
)


class _Operation(NamedTuple):
    """An operation: its name, the text of its type, its opcode and all behind the name."""

    name: str
    type: str
    opcode: str
    text: str


def collectives_in(text: str, mesh: Sequence[int]) -> tuple[CompiledCollectives, ...]:
    """Return the collectives of a compiled program, those of a kind and axis together.

    Args:
        text: the program's text.
        mesh: the sizes of its mesh's axes: data, rows (which are of the data axis, too), model.
    """
    found: dict[tuple[str, str, int], list[int]] = {}
    for times, operations in _run(text):
        for i, one in enumerate(operations):
            match = _COLLECTIVE.fullmatch(one.opcode)
            group = _first_group(one.text, math.prod(mesh)) if match else []
            if match is None or len(group) == 1:
                continue
            end = _end(operations, i) if match[2] else i
            size = _bytes(operations[end].type) * (len(group) if match[1] == _SCATTER else 1)
            hidden = '"is_sync":true' not in one.text and any(map(_works, operations[i + 1 : end]))
            sums = found.setdefault((match[1], _axis(group, mesh), len(group)), [0, 0, 0])
            for k, more in enumerate((1, size, 0 if hidden else size)):
                sums[k] += times * more
    return tuple(CompiledCollectives(*key, *sums) for key, sums in found.items())


def _run(text: str) -> Iterator[tuple[int, list[_Operation]]]:
    """Yield the computations that a program runs one operation after the other, and how often."""
    found: dict[str, list[_Operation]] = {}
    entry, operations = "", list[_Operation]()
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            operations = found[header[2]] = []
            entry = header[2] if header[1] else entry
        elif (match := _OPERATION.match(line)) and (opcode := _OPCODE.search(match[2])):
            kind = match[2][: opcode.start()]
            operations.append(_Operation(match[1], kind, opcode[1], match[2]))
    waiting = [(1, entry)]
    while waiting:
        times, name = waiting.pop()
        yield times, found.get(name, [])
        for one in found.get(name, []):
            if one.opcode == "while" and (body := _BODY.search(one.text)):
                trips = _TRIPS.search(one.text)
                waiting.append((times * int(trips[1]) if trips else times, body[1]))
            elif one.opcode in ("call", "conditional"):
                names = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(one.text)))
                waiting += [(times, called) for called in names]


def _end(operations: Sequence[_Operation], start: int) -> int:
    """Return where what begins at `start` is done."""
    done = operations[start].opcode.replace("-start", "-done")
    ends = re.compile(rf"{done}\([^)]*%?{re.escape(operations[start].name)}\b(?![.\-\w])")
    return next(i for i in range(start, len(operations)) if ends.search(operations[i].text))


def _works(one: _Operation) -> bool:
    """Return whether an operation computes more than a number."""
    return not _IDLE.fullmatch(one.opcode) and any(
        shape for _, _, shape in _ARRAY.findall(one.type)
    )


def _bytes(kind: str) -> int:
    """Return the bytes of the arrays of a type."""
    arrays = _ARRAY.findall(kind)
    return sum(math.prod(_numbers(x)) * max(8, int(bits or 8)) // 8 for _, bits, x in arrays)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _first_group(text: str, count: int) -> list[int]:
    """Return the devices of a collective's first group, by their positions in the program's mesh.

    XLA writes the groups as lists, as a reshaped and transposed count, or by the axes of a mesh,
    each of which may be split: `'x':(2)4` is the part of 4 behind one of 2.
    """
    if match := _NUMBERED.search(text):
        return _numbers(match[1])
    if match := _IOTA.search(text):
        groups, *_ = _counted(match[2], match[3]).reshape(_numbers(match[1]))
        return [int(one) for one in groups]
    if match := _MESH.search(text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        parts = _PART.findall(match[4])
        chosen = {name: (int(before or 1), int(own or 0)) for name, before, own in parts}
        shape, index = list[int](), list[int | slice]()
        for name, size in ((name, int(size)) for name, size in sizes.items()):
            before, own = chosen.get(name, (size, 1))
            own = own or size
            shape += [before, own, size // (before * own)]
            index += [0, slice(None), 0]
        devices = _counted(match[2] or str(math.prod(shape)), match[3]).reshape(shape)
        return [int(one) for one in devices[tuple(index)].ravel()]
    return list(range(count))


def _counted(shape: str, turned: str | None) -> np.ndarray:
    """Return the positions counted through an array of this shape, in the order of its axes."""
    sizes = _numbers(shape)
    count = np.arange(math.prod(sizes)).reshape(sizes)
    return count.transpose(_numbers(turned)).ravel() if turned else count.ravel()


def _axis(group: Sequence[int], mesh: Sequence[int]) -> str:
    """Return the axes of the logical mesh along which the devices of a group differ."""
    places = np.stack(np.unravel_index(list(group), tuple(mesh)))
    names = (
        name
        for name, place in zip(("data", "data", "model"), places, strict=True)
        if len(set(place.tolist())) > 1
    )
    return " and ".join(dict.fromkeys(names))
