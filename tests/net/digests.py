"""The net's digests: a file of a kind each, and how a fresh one is compared with what is kept.

A case of a kind is a flat dictionary. Figures that people read stand beside the `sha256` of each
part, so that a failure says which part became different and, mostly, by how much.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

REMAKE = "LAUNCHER_NET_REMAKE"  # set by `remake.py`: what is fresh is kept, not compared
KEPT = Path(__file__).parent / "kept"
_ATTRIBUTES = re.compile(
    r", (metadata|backend_config|frontend_attributes|origin)=\{(?:[^{}]|\{[^{}]*\})*\}"
)
DIGITS = 9  # of numbers, which other processors compute with other last bits


def made_with() -> dict[str, str]:
    """Return what a digest may rest on besides this package."""
    return {"jax": jax.__version__, "python": platform.python_version()}


def read(kind: str) -> dict[str, Any]:
    """Return the file of a kind: `made_with` and `cases`."""
    path = KEPT / f"{kind}.json"
    if not path.exists():
        return {"made_with": made_with(), "cases": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def hold(kind: str, case: str, fresh: dict[str, Any]) -> None:
    """Compare a case with the kept one, or keep it."""
    kept = read(kind)
    if os.environ.get(REMAKE):
        cases = dict(sorted({**kept["cases"], case: fresh}.items()))
        text = json.dumps({"made_with": made_with(), "cases": cases}, indent=1) + "\n"
        KEPT.mkdir(exist_ok=True)
        (KEPT / f"{kind}.json").write_text(text, encoding="utf-8")
        return
    assert case in kept["cases"], f"{case!r} is new: python tests/net/remake.py keeps it"
    old = kept["cases"][case]
    parts = [key for key in {**old, **fresh} if old.get(key) != fresh.get(key)]
    told = [f"{key}: kept {old.get(key)}, fresh {fresh.get(key)}" for key in parts]
    assert not told, "\n".join([f"{kind} of {case!r} became different", *told])


def sha(text: str) -> str:
    """Return a hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha_of(tree: Any) -> str:
    """Return a hash of what JSON can hold, its numbers rounded."""
    return sha(json.dumps(rounded(tree), sort_keys=True))


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """Return a tree with its fractions rounded to so many digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(one, digits) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one, digits) for one in value]
    return value


def plain_program(text: str) -> str:
    """Return the text of a compiled program without what says where it came from: metadata, the
    module's line, ids; names are numbered as they come."""
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match.group(), f"%{len(numbers)}")

    text = re.sub(r"\A(HloModule) [^\n]*", r"\1", text)
    # Tables of files and functions that newer texts have in front of the computations.
    text = re.sub(r"(?m)^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)
    text = _ATTRIBUTES.sub("", text)
    return re.sub(r"%[\w.\-]+", number, text)
