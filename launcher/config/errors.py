"""`ConfigError`, the error for wrong settings, and suggestions for misspelt names.

The command line prints it as one line and exits with 2. Standard library only.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

# A change of settings that may mend an error: by key, the value as a word of the command line has
# it; None: the value that was given to a name that does not exist.
Fix: TypeAlias = Mapping[str, str | None]

# A dotted name in prose: not a value, which follows = or a quote, nor a path.
_NAMED = re.compile(r"(?<![\w.'\"/=-])[a-z_]\w*(?:\.[a-z_]\w*)+")
# A setting with its value in prose: quoted for a shell, or plain up to the sentence's next mark.
_SAID = re.compile(
    r"'([a-z_][\w./]*)=([^']*)'"
    r"|(?<![\w.'\"/=-])([a-z_][\w./]*)=(\[[^\]\s]*\]|[^\s,;()'\"\[]*[^\s,;().'\"?:\[])"
)
_PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|…|\$")  # VALUE, multirun/ID, […]
_SHOWN = 100  # characters of a wrong value that a message repeats


class ConfigError(Exception):
    """A wrong setting: the problem, the place of the setting, and the remedy.

    Args:
        problem: what is wrong, naming the setting; a sentence without its full stop.
        remedy: what to do about it; whole sentences.
        keys: the dotted names of the settings at fault, whose places `compose` adds; by default
            those that the problem names.
        where: their places, such as "on the command line".
        code: the kind of error, a word for programs.
        fixes: changes that may mend it, each by itself, the best first; by default those that the
            remedy names.
    """

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        keys: Sequence[str] | None = None,
        where: str = "",
        *,
        code: str = "contradiction",
        fixes: Sequence[Fix] | None = None,
    ) -> None:
        if keys is None:
            keys = list(dict.fromkeys(_NAMED.findall(problem)))
        super().__init__(problem, remedy, tuple(keys), where)
        self.problem = problem.rstrip(".")
        self.remedy = remedy
        self.keys = tuple(keys)
        self.where = where
        self.code = "missing_package" if "pip install" in remedy else code
        self.fixes = fixes_in(remedy, self.keys[0] if keys else "") if fixes is None else fixes

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.problem}{where}.{remedy}"

    def located(self, where: str) -> ConfigError:
        """Return the same error with the place of its settings, unless it has one."""
        error = copy.copy(self)
        error.where = self.where or where
        return error

    def labelled(self, label: str) -> ConfigError:
        """Return the same error of one of several runs."""
        error = copy.copy(self)
        error.problem = f"{label}: {self.problem}"
        return error


def keys_in(text: str) -> tuple[str, ...]:
    """Return the settings that a message names, with a value or with a dotted name."""
    return tuple(dict.fromkeys([*(key for key, _ in said_in(text)), *_NAMED.findall(text)]))


def said_in(text: str) -> list[tuple[str, str]]:
    """Return the settings that a message names with a value, as it has it."""
    found = [(m[1] or m[3], m[2] if m[1] else m[4]) for m in _SAID.finditer(text)]
    return [(k, value) for k, value in found if k != "key" and not _PLACEHOLDER.search(value)]


def fixes_in(text: str, key: str) -> list[Fix]:
    """Return the changes that the text of a remedy advises.

    Args:
        text: the remedy: alternatives with "or" between them, a nearest word, or a bound.
        key: the setting that a nearest word or a bound is for; "" for none.
    """
    near = re.findall(r"Did you mean ([^\s,?]+)\?", text)
    bound = re.findall(r"at (?:least|most) (\d+)", text)
    clauses = (dict(said_in(clause)) for clause in re.split(r"[;,.]? or |;|\. ", text))
    return [*({key: word} for word in [*near, *bound] if key), *(said for said in clauses if said)]


def closest(word: str, options: Iterable[str]) -> str | None:
    """Return the option that `word` was most likely meant to be; None if nothing is near."""
    folded = {option.casefold(): option for option in options}
    text = word.casefold()
    swapped = {f"{text[:i]}{text[i + 1 : i + 2]}{text[i]}{text[i + 2 :]}" for i in range(len(text))}
    matches = [*swapped & folded.keys()] or difflib.get_close_matches(text, folded, n=1)
    return folded[matches[0]] if matches else None


def advice(word: str, options: Sequence[str], label: str = "") -> str:
    """Return "Did you mean …?" if an option is near, otherwise all of them after `label`."""
    match = closest(word, options)
    if match is not None:
        return f"Did you mean {match}?"
    return f"{label or 'Choose one of'}: {', '.join(options)}."


def listed(words: Sequence[str]) -> str:
    """Return the words as a list in prose: "a, b or c"."""
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def shown(value: object) -> str:
    """Return `value` as its author wrote it: YAML's null, true and false, and text in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
