"""Collectives in the text of compiled programs."""

import math
import re

_CALL = re.compile(r"= (\(?[^=]*?) (all-[\w-]+|reduce-scatter|collective-\w+)\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\[([\d,]*)\]")


def collectives(text):
    """The kind and the bytes of each array; XLA combines several of them into one operation."""
    return [
        (kind, int(bits) // 8 * math.prod(map(int, filter(None, lengths.split(",")))))
        for shapes, kind in _CALL.findall(re.sub(r"/\*.*?\*/", "", text))
        for bits, lengths in _ARRAY.findall(shapes)
    ]
