"""Strict conversion of plain data, from JSON or YAML, to dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from launcher.base.files import DamagedError, read_text

T = TypeVar("T")

_LARGEST = 2**63  # bound on whole numbers
_LARGEST_YAML = 2**18  # bytes; PyYAML reads as many in a second
_LARGEST_LISTS = 2**23  # bytes, with dataset.objects; libyaml reads as many in a second
TYPE_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    dict: "a table",
}


def read(kind: type[T], tree: Any, where: str = "") -> T:
    """Return an object of a dataclass, after checking every value against its field's type.

    Lists become tuples.

    Raises:
        DamagedError: a field is missing, unknown or of another type; the message names it.
    """
    return Reader().read(kind, tree, where)


class Reader:
    """Converts plain data to dataclasses by their type hints. This one is for JSON of our own.

    A subclass overrides how values of other origin are taken and refused.
    """

    def read(self, kind: type[T], tree: Any, where: str = "") -> T:
        """Return an object of the dataclass `kind`; `where` is the dotted name of `tree`."""
        if not isinstance(tree, Mapping):
            self.refuse_tree(kind, tree, where)
        hints = get_type_hints(kind)
        fields = self.fields(kind)
        for name in tree:
            if name not in fields:
                self.refuse_name(kind, name, tree[name], where)
        values = {}
        for name, field in fields.items():
            if self.is_given(name, field, tree, where):
                key = join_key(where, name)
                values[field.name] = self.field(field, hints[field.name], tree[name], key)
        return kind(**values)

    def value(self, hint: Any, value: Any, where: str) -> Any:
        """Return a value converted to its type hint."""
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if value is None and type(None) in options:
            return None
        for option in options:
            kind, inner = get_origin(option) or option, get_args(option)
            if kind is Any:
                return self.anything(value, where)
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                return self.read(kind, value, where)
            if kind is list and isinstance(value, list | tuple):
                return [self.value(inner[0], one, where) for one in value]
            if kind is tuple and isinstance(value, list | tuple):
                return self._items(inner, value, where)
            if kind is dict and isinstance(value, Mapping):
                return {
                    self.name(name, where): self.value(inner[1], one, f"{where}.{name}")
                    for name, one in value.items()
                }
            try:
                return self.scalar(kind, value, where)
            except ValueError as error:
                if isinstance(error, DamagedError):
                    raise
        self.refuse_value([get_origin(option) or option for option in options], value, where)

    def _items(self, inner: tuple[Any, ...], values: Any, where: str) -> Any:
        if inner[-1] is Ellipsis:
            inner = inner[:1] * len(values)
        if len(values) != len(inner):
            raise DamagedError(f"{where} is {reprlib.repr(values)}, not a list of {len(inner)}")
        pairs = enumerate(zip(inner, values, strict=True))
        return tuple(self.value(hint, value, f"{where}[{i}]") for i, (hint, value) in pairs)

    def fields(self, kind: Any) -> Mapping[str, dataclasses.Field[Any]]:
        """Return the fields that a tree may set, by their names there."""
        return {field.name: field for field in dataclasses.fields(kind)}

    def is_given(
        self, name: str, field: dataclasses.Field[Any], tree: Mapping[str, Any], where: str
    ) -> bool:
        """Return whether the tree sets a field; raise if it does not and must."""
        if name not in tree and field.default is field.default_factory is dataclasses.MISSING:
            raise DamagedError(f"{join_key(where, name)} is missing")
        return name in tree

    def field(self, field: dataclasses.Field[Any], hint: Any, value: Any, where: str) -> Any:
        """Return the value of a field."""
        del field
        return self.value(hint, value, where)

    def name(self, name: Any, where: str) -> str:
        """Return a name in the table `where`."""
        del where
        return str(name)

    def anything(self, value: Any, where: str) -> Any:
        """Return a value of any type."""
        del where
        return value

    def scalar(self, kind: Any, value: Any, where: str) -> Any:
        """Return a value that is no list or table; raise ValueError if it is not of this kind."""
        del where
        if isinstance(value, bool):
            fits = kind is bool
        elif isinstance(value, int):
            fits = kind in (int, float) and abs(value) < _LARGEST
        else:
            fits = isinstance(value, kind)
        if not fits:
            raise ValueError
        return value

    def refuse_tree(self, kind: Any, tree: Any, where: str) -> NoReturn:
        """Raise the error for what should be a table and is none."""
        raise DamagedError(f"{where or 'it'} is not a table")

    def refuse_name(self, kind: Any, name: Any, value: Any, where: str) -> None:
        """Raise the error for a name that is no field's; return to pass it over."""
        raise DamagedError(f"{join_key(where, name)} is not known")

    def refuse_value(self, kinds: list[Any], value: Any, where: str) -> NoReturn:
        """Raise the error for a value of another type."""
        expected = " or ".join(TYPE_NAMES[kind] for kind in kinds)
        raise DamagedError(f"{where} is {reprlib.repr(value)}, not {expected}")


def join_key(section: str, name: Any) -> str:
    """Return the dotted name of a field of a section; "" is the whole tree."""
    return f"{section}.{name}" if section else str(name)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file as plain data.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is too large, or holds what no YAML stands for.
        yaml.YAMLError: it is not YAML.
    """
    try:
        text = read_text(path, _LARGEST_LISTS)
        loader = yaml.SafeLoader if len(text) <= _LARGEST_YAML else yaml.CSafeLoader
        return loader(text).get_single_data()
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    except ValueError as error:  # such as a date of no calendar
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"it is not YAML: {error}") from None


def read_table(path: Path) -> dict[Any, Any]:
    """Return the table that a YAML file holds; an empty one where none can be read."""
    try:
        tree = read_yaml(path)
    except (OSError, DamagedError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def yaml_node(path: Path) -> yaml.Node | None:
    """Return the content of a YAML file with line numbers; None for an empty one.

    Merge keys (`<<`) are followed: their names stand before a table's own, which win. Raises as
    `read_yaml`.
    """
    return _node(read_text(path, _LARGEST_YAML))


@functools.lru_cache  # a sweep composes the same files for each of its runs
def _node(text: str) -> yaml.Node | None:
    loader = yaml.SafeLoader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        _follow_merges(loader, node)
        return node
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    finally:
        loader.dispose()


def _follow_merges(loader: yaml.SafeLoader, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        for _, value in node.value:
            _follow_merges(loader, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _follow_merges(loader, item)
