"""A program as text, the same in every process: what fingerprints and likenesses are made of. Pure.

The text of a type or a number takes longer to make than to find again, and a step has few that
differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from launcher.trace.ir.jaxpr import Atom, Aval, Jaxpr, Literal, Var, is_jaxpr, is_var, read_jaxpr

_NOISE = re.compile(r"0x[0-9a-f]+|Var\(id=\d+\)")


def structure_text(jaxpr: Jaxpr, extra: Mapping[str, Any] | None = None) -> str:
    """Return the program as text, the same in every process: no addresses, no source lines.

    JAX's own text takes many times as long.
    """
    text = "\n".join(_lines(jaxpr, {}))
    return _NOISE.sub("", f"{text}{sorted((extra or {}).items())}")


def _lines(jaxpr: Jaxpr, known: dict[object, str]) -> Iterator[str]:
    """Yield the lines of a program; `known` holds the texts of types and numbers so far."""
    names: dict[Var, str] = {}

    def defined(v: Var) -> str:
        names[v] = f"v{len(names)}"
        return f"{names[v]}:{_type(v.aval, known)}"

    def read(atom: Atom) -> str:
        return names[atom] if is_var(atom) else _number(atom, known)

    yield " ".join(map(defined, (*jaxpr.constvars, *jaxpr.invars)))
    for eqn in jaxpr.eqns:
        params = ",".join(f"{key}={_value(eqn.params[key], known)}" for key in sorted(eqn.params))
        operands, results = " ".join(map(read, eqn.invars)), " ".join(map(defined, eqn.outvars))
        yield f"{results}={eqn.primitive.name}[{params}] {operands}"
    yield " ".join(map(read, jaxpr.outvars))


def _type(aval: Aval, known: dict[object, str]) -> str:
    text = known.get(aval)
    if text is None:
        text = known[aval] = str(aval)
    return text


def _number(atom: Literal, known: dict[object, str]) -> str:
    """Return a literal as text."""
    try:
        key = type(atom.val), atom.aval, np.asarray(atom.val).tobytes()
    except TypeError:  # no number, such as a random key
        return f"{atom.val!r}:{atom.aval}"
    if key not in known:
        known[key] = f"{atom.val!r}:{_type(atom.aval, known)}"
    return known[key]


def _value(value: Any, known: dict[object, str]) -> str:
    if is_jaxpr(value):
        jaxpr = read_jaxpr(value)
        consts = [getattr(x, "aval", x) for x in jaxpr.consts]
        return "{" + ";".join(_lines(jaxpr, known)) + f"}}{consts}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_value(each, known) for each in value) + ")"
    return str(value)
