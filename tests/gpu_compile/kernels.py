"""Count the kernels of a compiled program by what they do, as XLA's compiler for GPUs writes it."""

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
