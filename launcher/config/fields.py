"""Fields of settings, and the values that they accept.

A field's `metadata` may hold `choices` (the words it accepts), `minimum`/`maximum` (inclusive),
`auto` (the word `auto`, or null, stands for the field's default), `off` (the word `off`, or false,
stands for this value), `parse` (a function that raises
ValueError for anything but a form of one of `choices`), `one_or_several` (a list, of which a
text alone is one entry), `lines` (text may have several) and `variants` (a section of several
kinds: its `Variants`) and `hub` ("model" or "data": it may name a repository of the Hugging Face
hub, for a folder of such files). A field that is `internal` is no setting.

A `Switch` lists settings that have no effect without another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple

LARGEST = 2**31 - 1  # of any whole number: JAX counts and indexes in 32 bits

# Where a setting is in the tree; and, of what in the tree comes from the environment, the text that
# asks for it and the value that it had.
Place = tuple[str | int, ...]
FromEnvironment = Mapping[Place, tuple[str, Any]]


@dataclass(frozen=True)
class Variants:
    """The kinds of a section.

    Attributes:
        key: the setting of the section that names the kind, such as `name`.
        classes: the class of each kind, by its name.
    """

    key: str
    classes: Mapping[str, type]


class Switch(NamedTuple):
    """Settings that have an effect only while another one, the switch, is on.

    Attributes:
        keys: the settings, or sections of them, that need the switch.
        by: the settings that turn it on or off.
        is_on: takes the whole `Config` and returns whether it is on.
        off: why the settings have no effect while it is off, as a clause.
        remedy: how to turn it on.
    """

    keys: tuple[str, ...]
    by: tuple[str, ...]
    is_on: Callable[[Any], bool]
    off: str
    remedy: str


def settings_of(cls: Any) -> list[Field[Any]]:
    """Return the fields of a section that are settings."""
    return [found for found in fields(cls) if "internal" not in found.metadata]


def key_of(found: Field[Any]) -> str:
    """Return the name of a setting: its field's, without the `_` after a word of Python's."""
    return found.name.rstrip("_")


def variants(key: str, classes: Mapping[str, type]) -> Mapping[str, Any]:
    """Return the metadata of a section of several kinds, which its setting `key` names."""
    return {"variants": Variants(key, classes)}


def choice(default: str, *choices: str) -> Any:
    """Make a text field that accepts only `choices`."""
    off = {name: name for name in choices if name == "off"}
    return field(default=default, metadata={"choices": choices, **off})


def number(default: Any, minimum: float | None = None, maximum: float | None = None) -> Any:
    """Make a number field with inclusive bounds; `None` leaves a side open."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def automatic(default: float | None = None, minimum: float = 1) -> Any:
    """Make a number field that `auto`, or null, leaves at its default."""
    return field(default=default, metadata={"minimum": minimum, "maximum": None, "auto": True})


def off_or_automatic() -> Any:
    """Make a field of a number from 1, of None for `auto`, and of 0 for `off`."""
    metadata = {"minimum": 0, "maximum": None, "auto": True, "off": 0}
    return field(default=None, metadata=metadata)


def automatic_choice(
    default: str, *choices: str, parse: Callable[[str], object] | None = None
) -> Any:
    """Make a text field that accepts only `choices`, and `auto` or null for its default.

    It also accepts what `parse` does, if given.
    """
    metadata = {"choices": ("auto", *choices), "auto": True, "parse": parse}
    return field(default=default, metadata=metadata)
