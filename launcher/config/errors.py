"""`ConfigError`, the error for wrong settings, and suggestions for misspelt names.

The command line prints it as one line and exits with 2. Standard library only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

# A dotted name in prose: not a value, which follows = or a quote, nor a path.
_NAMED = re.compile(r"(?<![\w.'\"/=-])[a-z_]\w*(?:\.[a-z_]\w*)+")
_SHOWN = 100  # characters of a wrong value that a message repeats


class ConfigError(Exception):
    """A wrong setting: the problem, the place of the setting, and the remedy.

    Args:
        problem: what is wrong, naming the setting; a sentence without its full stop.
        remedy: what to do about it; whole sentences.
        keys: the dotted names of the settings at fault, whose places `compose` adds; by default
            those that the problem names.
        where: their places, such as "on the command line".
    """

    def __init__(
        self, problem: str, remedy: str = "", keys: Sequence[str] | None = None, where: str = ""
    ) -> None:
        if keys is None:
            keys = list(dict.fromkeys(_NAMED.findall(problem)))
        super().__init__(problem, remedy, tuple(keys), where)
        self.problem = problem.rstrip(".")
        self.remedy = remedy
        self.keys = tuple(keys)
        self.where = where

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.problem}{where}.{remedy}"

    def located(self, where: str) -> ConfigError:
        """Return the same error with the place of its settings, unless it has one."""
        return ConfigError(self.problem, self.remedy, self.keys, self.where or where)


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
