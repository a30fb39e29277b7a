"""Kernels of a program as XLA's compiler for GPUs writes it: what they do, what waits for sums."""

import math
import re
from collections import Counter

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][a-z\d\-]*)\(")
_CALLED = re.compile(r"(?:calls|body|to_apply|called_computations)=\{?%?([\w.\-]+)")
# What moves numbers without computing any; a kernel of these alone could be a part of another.
MOVING = "slice", "transpose", "convert", "concatenate", "copy"
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "broadcast"}
_FREE |= {"iota", "dynamic-slice", "dynamic-update-slice"}
_NONE = _FREE | {"after-all", "partition-id", "replica-id", "while", "call", "optimization-barrier"}


def kernels(text):
    """Return how many kernels a program launches, by kind; a loop's body counts once."""
    bodies, entry, now = {}, "", []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            now = bodies[head[1]] = []
            entry = head[1] if line.startswith("ENTRY") else entry
        elif made := _OPERATION.match(line):
            called = _CALLED.search(line)
            now.append((made[1], called[1] if called else None))
    found, waiting = Counter(), [entry]
    while waiting:
        for opcode, called in bodies[waiting.pop()]:
            if opcode in ("while", "call", "async-start"):
                waiting.append(called)
            found[_kind(opcode, bodies.get(called, ()))] += 1
    del found[""]
    return dict(found, all=sum(found.values()))


def _kind(opcode, body):
    if opcode in _NONE or opcode.endswith(("-done", "-start", "-update")):
        return ""
    if opcode in MOVING or opcode != "fusion":
        return opcode
    inside = {own for own, _ in body} - _FREE
    return next((one for one in MOVING if inside <= set(MOVING) and one in inside), "fusion")


_MADE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][a-z\d\-]*)\(([^)]*)\)")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]+)\]")
_NAME = re.compile(r"%([\w.\-]+)")


def waits_for_sums(text):
    """Return for how many seconds one of 8 H100 that runs a schedule waits for all-reduces.

    They run one after another, at the rate of XLA's tables. A kernel is priced by its product, at
    65 % of the peak, or by what it reads and writes, at 80 % of it.
    """
    clock = link = waited = 0.0
    counts, sizes, ends = {}, {}, {}
    for line in text[text.index("\nENTRY") :].splitlines():
        if not (made := _MADE.match(line)):
            continue
        name, kind, opcode, operands = made.groups()
        arrays = [
            (int(bits), [*map(int, shape.split(","))]) for bits, shape in _ARRAY.findall(kind)
        ]
        sizes[name] = sum(bits // 8 * math.prod(shape) for bits, shape in arrays)
        counts[name] = math.prod(arrays[0][1]) if arrays else 0
        reads = _NAME.findall(operands)
        if opcode == "all-reduce-start":
            ends[name] = link = max(link, clock) + 60e-6 + 1.75 * sizes[name] / 350e9
        elif opcode == "all-reduce-done":
            waited += max(ends[reads[0]] - clock, 0.0)
            clock = max(ends[reads[0]], clock)
        elif "__cublas" in line:
            terms = math.prod(counts[one] for one in (*reads[:2], name)) ** 0.5
            clock += 2 * terms / (0.65 * 989e12)
        elif opcode not in _NONE:
            clock += sum(sizes[one] for one in {name, *reads}) / (0.8 * 3350e9)
    return waited
