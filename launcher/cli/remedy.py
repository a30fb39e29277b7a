"""Remedies in words of the command line, proposed by the kind of an error and then tried.

A proposal is what the error advises, a number that divides, or leaving a word out. It is given only
where the command line that it makes passes `task=check`. None loosens what protects a run.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.cli import command
from launcher.config import errors, reader
from launcher.stop import Stop

# No remedy adds or takes away a word of these, or a file with one: leave to run code, the state
# that a run begins with, and memory. None names a run, either; a wrong name may be left out.
_PROTECTED = re.compile("allow_|resume|fork|init_from|memory")
_PLACE = re.compile(r"run\.(id|dir)\b")
_STILL = ("check", "plan")
_TASKS = tuple(f"task={name}" for name in _STILL)  # that a remedy may ask for: they train nothing
_FOLDER = ("-cd", "--config-dir")
_NAMING = ("--frozen", *_FOLDER)  # a file or a folder, the next word
_FLAGS = ("-m", "--multirun", *_NAMING)
_LIST = re.compile(r"([^=]+=\[?)(.+?)(\]?)")
_ZEROS = re.compile(r"^([+-]?)0[0_]*(?=[0-9])")
_MOST_TRIES = 24
_DEEPEST = 4  # faults of one command line
# Kinds of errors that no word mends, and those that a check does not find: their advice is taken.
_HOPELESS = ("missing_package", "missing_value", "internal", "failed", "cluster", "system")
_LATER = ("memory", "plan", "program")


@dataclass(frozen=True)
class Edit:
    """Words to take out of a command line, and words to put at its end."""

    remove: tuple[str, ...] = ()
    add: tuple[str, ...] = ()

    def of(self, words: Sequence[str]) -> list[str]:
        """Return a command line with the edit made."""
        return [*(word for word in words if word not in self.remove), *self.add]

    @property
    def is_safe(self) -> bool:
        """Whether it leaves alone what protects a run, and trains nothing that was only checked."""
        keys = [_key(word) for word in (*self.remove, *self.add)]
        if any(map(_PROTECTED.search, keys)) or any(_PLACE.match(_key(word)) for word in self.add):
            return False
        return "task" not in keys or any(word in _TASKS for word in self.add)

    def gives_up(self, word: str) -> bool:
        """Whether it takes away a flag for nothing, which may have asked for no training."""
        name = word.lstrip("-").partition("=")[0]
        instead = [_key(added).lstrip("-").rpartition(".")[2] for added in self.add]
        is_flag = word.startswith("-") and word in self.remove
        return is_flag and errors.closest(name, instead) is None

    def then(self, later: Edit) -> Edit:
        """Return both edits as one."""
        added = [word for word in self.add if word not in later.remove]
        taken = [word for word in later.remove if word not in self.add]
        return Edit((*self.remove, *taken), (*added, *later.add))


def find_remedy(words: Sequence[str], error: Exception, kind: str) -> Edit | None:
    """Return the edit by which a command line passes `task=check`; None if none is found.

    Where it has several faults, the edit is for all of them or, if one cannot be mended, for the
    first where that was advised.

    Args:
        words: the command line, without `--json`.
        error: its error.
        kind: the kind of the error, `ConfigError.code` or another.
    """
    if kind in _HOPELESS or words[:1] in (["runs"], ["new"], ["schema"]):
        return None
    tries = iter(range(_MOST_TRIES))
    edit = _mended(words, error, kind in _LATER, tries, _DEEPEST)
    if edit and any(map(edit.gives_up, words)) and not any(word in _TASKS for word in words):
        return None
    return edit


def _mended(
    words: Sequence[str], error: Exception, is_later: bool, tries: Iterator[int], depth: int
) -> Edit | None:
    partial: Edit | None = None
    advised = [edit for fix in _advised(words, error) for edit in _edits(words, fix, error)]
    ways: list[Iterable[Edit]] = [advised]
    if not is_later:
        others = itertools.chain(_divided(words, error), _without(words, error))
        ways += [_rewritten(words, error), others]
    for way in ways:
        changed: list[tuple[Edit, Exception]] = []
        for edit in dict.fromkeys(way):
            if not edit.is_safe or edit.of(words) == list(words):
                continue
            if next(tries, None) is None:
                return partial
            left = _tried(edit.of(words))
            if left is None:
                return edit
            kind = getattr(left, "code", "")
            is_ours = kind == "unknown_setting" and {*_keys(left)} & {*map(_key, edit.add)}
            if str(left) != str(error) and kind not in _HOPELESS and not is_ours:
                changed.append((edit, left))
        for edit, left in changed if depth > 1 else ():
            if further := _mended(edit.of(words), left, False, tries, depth - 1):
                return edit.then(further)
            touched = {*_keys(error), *map(_key, edit.add)}
            if way is advised and not partial and touched.isdisjoint(_keys(left)):
                partial = edit
    return partial


def _tried(words: Sequence[str]) -> Exception | None:
    """Return the error of a command line's settings and of its checks; None for none."""
    quiet = io.StringIO()
    try:
        with redirect_stdout(quiet), redirect_stderr(quiet):
            arguments = command.parser().parse_intermixed_args(words)
            if arguments.multirun:
                command.carry_out([*words, "task=check"], Stop())
                return None
            config = command.settings_said(arguments)
            command.notes_on(config)
    except Exception as error:  # of any kind: the words are no remedy
        return error
    return None


def _advised(words: Sequence[str], error: Exception) -> Iterator[errors.Fix]:
    """Yield the changes that an error advises, but for another option than one that was typed."""
    for fix in getattr(error, "fixes", errors.fixes_in(str(error), "")):
        is_option = getattr(error, "code", "") == "unknown_setting" and None not in fix.values()
        if not is_option or not any(_key(word) in fix for word in words):
            yield fix


def _keys(error: Exception) -> Sequence[str]:
    return getattr(error, "keys", ()) or errors.keys_in(str(getattr(error, "problem", error)))


def _key(word: str) -> str:
    return word.partition("=")[0].strip().lstrip("+~").strip()


def _of_key(words: Sequence[str], key: str) -> list[str]:
    """Return the words that set a setting, or one within it."""
    named = [word for word in words if "=" in word or word.startswith("~")]
    return [word for word in named if f"{_key(word)}.".startswith(f"{key}.")]


def _edits(words: Sequence[str], fix: errors.Fix, error: Exception) -> Iterator[Edit]:
    """Yield the edits that make a change of settings: of a list or sweep, each item in turn."""
    remove, add = list[str](), list[str]()
    for key, value in fix.items():
        if value is not None:  # an option keeps its settings' words
            remove += [word for word in _of_key(words, key) if "." in key or _key(word) == key]
            add.append(f"{key}={value}")
            continue
        for wrong in _keys(error):
            for word in _of_key(words, wrong):
                remove.append(word)
                add.append(f"{key}{_key(word)[len(wrong) :]}={word.partition('=')[2]}")
            last, better = wrong.rpartition(".")[2], key.rpartition(".")[2]
            for word in _tables(words, wrong):
                remove.append(word)
                add.append(re.sub(rf"\b{re.escape(last)}\b", better, word))
    items = _LIST.fullmatch(remove[0]) if len(remove) == len(fix) == 1 else None
    if items and getattr(error, "code", "") != "command_line":  # which is about the whole word
        opening, parts, closing = items[1], items[2].split(","), items[3]
        for at in range(len(parts)):
            inner = ",".join([*parts[:at], add[0].partition("=")[2], *parts[at + 1 :]])
            yield Edit((remove[0],), (f"{opening}{inner}{closing}",))
    yield Edit(tuple(dict.fromkeys(remove)), tuple(dict.fromkeys(add)))


def _divided(words: Sequence[str], error: Exception) -> Iterator[Edit]:
    """Yield edits by which the numbers that a contradiction names divide, or are equal.

    Words that were typed come first, then small changes.
    """
    if not isinstance(error, errors.ConfigError) or error.code != "contradiction":
        return
    said: dict[str, float] = {}
    for key, value in errors.said_in(error.problem):
        with suppress(ValueError):
            said[key] = float(value)
    whole = {key: int(number) for key, number in said.items() if number.is_integer()}
    bare = [int(number) for number in re.findall(r"(?<![\w=.])\d+(?![\w.])", error.problem)]
    found: list[tuple[bool, float, str, str]] = []
    for key, count in whole.items():
        others = [other for name, other in whole.items() if name != key] + bare
        others += [math.prod(others)] if len(others) > 1 else []
        for near in {one for other in others for one in _near(count, other)}:
            found.append((not _of_key(words, key), abs(math.log(near / count)), key, str(near)))
    for (key, _), (_, limit) in itertools.permutations(said.items(), 2):
        if limit > 0 and key not in whole:
            found.append((not _of_key(words, key), 0.0, key, f"{limit:g}"))
    for _, _, key, word in sorted(found)[:10]:
        yield Edit(tuple(_of_key(words, key)), (f"{key}={word}",))


def _near(value: int, other: int) -> set[int]:
    """Return the multiples of `other` next to `value`, and the divisors of `other` next to it."""
    if value <= 0 or other <= 0:
        return set()
    divisors = [d for d in range(1, min(other, 4096) + 1) if other % d == 0]
    smaller = [d for d in divisors if d <= value]
    larger = [d for d in divisors if d >= value]
    around = {value - value % other, value - value % other + other, other}
    return {near for near in (*around, *smaller[-1:], *larger[:1]) if near > 0 and near != value}


def _without(words: Sequence[str], error: Exception) -> Iterator[Edit]:
    """Yield edits that leave out words about the error's settings, the last typed first.

    A setting of a file is set to its default instead.
    """
    keys = _keys(error)
    typed = {word: None for key in keys for word in (*_of_key(words, key), *_tables(words, key))}
    if getattr(error, "code", "") != "wrong_value":  # a run of that name may be there
        typed = {word: None for word in typed if not _PLACE.match(_key(word))}
    if not any(word in _TASKS for word in words):  # it may have asked for no training
        typed = {w: None for w in typed if not errors.closest(w.partition("=")[2], _STILL)}
    ordered = sorted(typed, key=words.index, reverse=True)
    yield from (Edit((word,)) for word in ordered)
    for key in keys:
        if not _of_key(words, key) and (value := _default(key)) is not None:
            yield Edit(add=(f"{key}={value}",))
    folders = [Path(named) for flag, named in itertools.pairwise(words) if flag in _FOLDER]
    for word in words:  # a file of the user's that no word overrides may be left out
        name = word.partition("=")[2].removesuffix(".yaml") + ".yaml"
        files = [file for folder in folders if (file := folder / _key(word) / name).is_file()]
        text = "".join(file.read_text(errors="replace") for file in files)
        if files and not _PROTECTED.search(text) and "task" not in text:
            yield Edit((word,))
        yield from _chosen((word,), Path(name))


def _tables(words: Sequence[str], key: str) -> list[str]:
    """Return the words that set a section or table with a setting in it, or choose its kind."""
    is_kind = key.partition(".")[2] in ("name", "kind", "method")
    above = [word for word in words if "=" in word and key.startswith(f"{_key(word)}.")]
    return [word for word in above if "{" in word or (is_kind and "." not in _key(word))]


def _default(key: str) -> str | None:
    """Return the word of a setting's default; None where it has none that a word can say."""
    value = reader.default_of(key)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool | int | float) else None


def _rewritten(words: Sequence[str], error: Exception) -> Iterator[Edit]:
    """Yield edits of words that cannot be read: dashes, blanks, another sign than =, brackets."""
    if getattr(error, "code", "") != "command_line":
        return
    if str(error).startswith("--config-dir"):
        yield from _nearest_folder(words)
        return
    known = {*re.findall(r"--?[a-z][a-z-]*", command.parser().format_usage())}
    for at, word in enumerate(words):
        after = words[at + 1 : at + 2]
        key, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and word not in known:
            yield from [Edit((word,), (word.lstrip("-"),))] if equals else []
            if near := errors.closest(word, _FLAGS):
                its = after if near in _NAMING else ()
                yield Edit((word, *its), (near, *its))
            if after and not equals and re.fullmatch(r"[a-z_.]+", key):
                yield Edit((word, *after), (f"{key}={after[0]}",))
        elif not equals and after and re.fullmatch(r"[a-z_]+(\.\w+)*", word):
            yield Edit((word, *after), (f"{word}={after[0].removeprefix('=').strip()}",))
        elif not equals and (pair := re.fullmatch(r"([a-z_]\w*(?:\.\w+)*)\s*[:\s]\s*(\S+)", word)):
            yield Edit((word,), (f"{pair[1]}={pair[2]}",))
        if equals and not word.startswith("-"):
            yield from (Edit((word,), (tidy,)) for tidy in _tidied(key, value) if tidy != word)
    text = str(error)
    if several := re.match(r"(\S+=(\S+)) gives several values", text):
        yield Edit(add=("-m",))
        yield Edit((several[1],), (several[1].replace(several[2], f"[{several[2]}]"),))
    named = [w for w in words if w in text or repr(w)[1:-1] in text or _key(w) in text.split()]
    yield from (Edit((word,)) for word in named)


def _tidied(key: str, value: str) -> Iterator[str]:
    """Yield `key=value` with the slips of its grammar mended."""
    key = key.partition("@")[0].lstrip("+~").strip()
    value = value.strip().removeprefix("=").strip()
    value = _ZEROS.sub(r"\1", value)
    yield f"{key}={value}"
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) > value.count(closing):
            yield f"{key}={value}{closing}"
        elif value.count(opening) < value.count(closing):
            yield f"{key}={value.replace(closing, '')}"
    yield f"{key}={value.rstrip(',').strip()}"


def _nearest_folder(words: Sequence[str]) -> Iterator[Edit]:
    """Yield edits that name the folder nearest to a `--config-dir` that is none, or drop it."""
    two = [((flag, named), flag, named) for flag, named in itertools.pairwise(words)]
    one = [((word,), *word.partition("=")[::2]) for word in words]
    for said, flag, named in [*two, *one]:
        if flag not in _FOLDER or (path := Path(named)).is_dir():
            continue
        with suppress(OSError):
            beside = [one.name for one in path.parent.iterdir() if one.is_dir()]
            if near := errors.closest(path.name, beside):
                yield Edit(said, (flag, str(path.with_name(near))))
        yield from _chosen(said, path)
        yield Edit(said)


def _chosen(said: tuple[str, ...], path: Path) -> Iterator[Edit]:
    """Yield the edit that chooses a file as an option of a folder, where it is one."""
    if path.is_file():
        yield Edit(
            said, ("--config-dir", str(path.parent.parent), f"{path.parent.name}={path.stem}")
        )
