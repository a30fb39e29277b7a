"""The house stays one that a stranger can draw: a name once, small modules, few parameters."""

import ast
import functools
import statistics
from collections import defaultdict
from pathlib import Path

import launcher
import launcher.recipes

ROOMS = [Path(launcher.__file__).parent, Path(launcher.recipes.__file__).parent]
# The doors of a recipe, a program, a registry and a room; a setting and what it stands for; what is
# done to a state and, from Python, to a tree.
SHARED_NAMES = {
    "Replay",
    "Run",
    "build",
    "check",
    "main",
    "prepare",
    "register",
    "restore",
    "run",
    "save",
}


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Every module, parsed when asked for: each process of tests imports this file."""
    return {
        str(path.relative_to(room.parent)): ast.parse(path.read_text())
        for room in ROOMS
        for path in sorted(room.rglob("*.py"))
    }


def public_names(tree: ast.Module) -> list[str]:
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]


def num_parameters(function: ast.FunctionDef) -> int:
    names = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in names)


def test_a_public_name_is_defined_once() -> None:
    homes = defaultdict(list)
    for path, tree in sources().items():
        for name in public_names(tree):
            homes[name].append(path)
    # Each family has the same parts by the same names: a block, its attention, its arrays.
    homes = {n: p for n, p in homes.items() if not all(one.startswith("recipes/") for one in p)}
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SHARED_NAMES} == {}
    assert set(twice) == SHARED_NAMES  # one that is no longer shared leaves the list


def test_modules_are_small() -> None:
    lines = {path: path.read_text().count("\n") for room in ROOMS for path in room.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > 600} == {}
    assert statistics.median(lines.values()) <= 130


def test_at_most_six_functions_take_more_than_seven_parameters() -> None:
    many = [
        f"{path}: {node.name}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and num_parameters(node) > 7
    ]
    assert len(many) <= 6, many


def test_a_module_says_what_it_is() -> None:
    silent = [path for path, tree in sources().items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []
