"""Ways in which a small file gets damaged: by a disk, by an editor, by somebody who means it."""

import json
import os
import random

from launcher.checkpoint import layout

ODD_VALUES = (
    None, True, False, 0, -1, 1, 7, 10**30, -(10**30), 0.5, -1e300, "", " ", "x", "a\nb",
    "\x1b[31m", "../../etc", "é", "0", "999999999", [], [[]], [None], {}, {"a": {}},
    [1] * 50, "y" * 5000,
)  # fmt: skip
ODD_TEXTS = (
    "", "\n", "null", "{}", "[]", "7", '"x"', "NaN", "[1e999]", '{"a": "\\ud800"}',
    '{"a\\u0000": 1}',
    "[" * 100_000, '{"a":' * 5000, "[" * 150 + "]" * 150, "\ufeff{}", "{'a': 1}", "9" * 10_000,
    "a: &a [*a]", "&a [" + "*a," * 9 + "]", "- " * 3000, "? : ? :", "%YAML 9.9\n---\n{}",
    "---\n---\n",
    "!!python/object:os.system {}", "a: 2026-02-31", "\t", "a: b: c", "{a: 1, a: 2}",
)  # fmt: skip


def mutate(path, draw: random.Random) -> str:
    """Damage a file somehow; says how."""
    data = path.read_bytes()
    how = draw.choice(list(_WAYS)) if data else "text"
    try:
        changed = _WAYS[how](data, draw)
    except ValueError:  # it is no JSON
        how, changed = "flip", _flip(data, draw)
    if changed is None:
        path.unlink()
        _REPLACED[how](path)
    else:
        path.write_bytes(changed)
    return how


def _flip(data, draw):
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 20])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(data, draw):
    return data[: draw.randrange(len(data))]


def _remove(data, draw):
    start = draw.randrange(len(data))
    return data[:start] + data[start + draw.randrange(1, 60) :]


def _repeat(data, draw):
    start = draw.randrange(len(data))
    return data[:start] + data[start : start + draw.randrange(1, 200)] * 2 + data[start:]


def _insert(data, draw):
    start = draw.randrange(len(data) + 1)
    return data[:start] + draw.randbytes(draw.randrange(1, 40)) + data[start:]


def _zeros(data, draw):
    start = draw.randrange(len(data))
    return data[:start] + bytes(len(data) - start)


def _text(data, draw):
    return draw.choice(ODD_TEXTS).encode()


def _value(data, draw):
    """JSON with another value, key or table somewhere; of lines of JSON one is changed."""
    lines = data.splitlines(keepends=True)
    which = draw.randrange(len(lines))
    try:
        tree = json.loads(data)
        lines, which = [data], 0
    except ValueError:
        tree = json.loads(lines[which])
    places = list(_places(tree))
    if not places:
        raise ValueError
    for table, key in draw.sample(places, min(len(places), draw.choice([1, 1, 1, 3]))):
        if isinstance(table, dict) and draw.random() < 0.2:
            table.pop(key, None)
        elif isinstance(table, dict) and draw.random() < 0.1:
            table[f"{key}x"] = 1
        elif not isinstance(table, list) or key < len(table):
            table[key] = draw.choice(ODD_VALUES)
    lines[which] = json.dumps(tree).encode() + b"\n"
    return b"".join(lines)


def _places(tree):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items if isinstance(tree, dict | list) else ():
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


_REPLACED = {
    "fifo": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "gone": lambda path: None,
}
_WAYS = {
    "flip": _flip,
    "cut": _cut,
    "remove": _remove,
    "repeat": _repeat,
    "insert": _insert,
    "zeros": _zeros,
    "text": _text,
    **{f"value {n}": _value for n in range(6)},
    **{name: lambda data, draw: None for name in _REPLACED},
}


def seal(root, step):
    """Make a checkpoint's checksums those of what it holds."""
    files = [path for path in layout.files_below(root) if path.name != layout.CHECKSUMS]
    if (root / layout.CHECKSUMS).is_file():
        layout.write_checksums(root, step, layout.checksums(root, files))
