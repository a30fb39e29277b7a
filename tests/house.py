"""Count the figures of the code base that `budget.toml` limits.

`python tests/house.py` prints each figure beside its limit; `python tests/house.py FOLDER` lists
the banned phrases found in this folder.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["launcher", "recipes", "conf", "slurm", "tests", ".github", "README.md"]
BUDGET = ROOT / "tests" / "budget.toml"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_COMMENT = re.compile(r"(?:^|  ) *# (.*)")  # as Ruff formats them
_QUESTIONS = {"What", "Which", "Where", "Whether", "How", "Of"}

# Translated phrases, and what to write instead. A space also matches a line break.
BANNED = {
    r"\b(?:a|the) (?:Ray|run|folder|file) that (?:is|was) there\b": "existing",
    r"\b(?:go|goes|going|went) on\b": "resume, continue",
    r"\b(?:is|are|was|were|be) said\b": "is logged, reported",
    r"\btold\b": "is notified, given",
    r"\b[Ww]hat lies\b": "the contents",
    r"\bof each [\w ]{1,40}\bthat\b": "for each ..., the ... that",
    r"\b[Ww]hat is \w+ of\b": "name the thing",
    r"(?:^|[.;:] )Of (?:a|an|the|each|all|what)\b": "start with the subject",
    r"\b[Ww]hat (?:becomes of|stands for|comes of|befalls)\b": "name the result",
    r"\b(?:computed|computes|compute) again\b": "recompute",
    r"\bas (?:few|little) [\w ]{0,20}as can be\b": "the fewest, the least",
    r"\bas ever\b": "as usual",
    r"\bis (?:made|let) to go\b": "is resumed",
    r"\bfalls? out\b": "is dropped",
    r"\bof ours\b": "our",
    r"\bof (?:one's|the user's) own\b": "custom, own",
    r"\bno more than that\b": "only that",
    r"\bis known of\b": "known about",
    r"\bmay be looked at\b": "can be inspected",
    r"\bby what\b": "by the ... that",
    r"\bof which none\b": "none of which",
    r"\b(?:a|the) stranger\b": "another user",
    r"\bis taken for\b": "is treated as",
    r"\bso many (?:times|of)\b": "n times",
    r"\bthe words? for\b": "the string, the spelling",
    r"\bhas (?:an end|come up)\b": "ended, started",
    r"\bwhatever (?:it|that) (?:is|was)\b": "any",
    r"\blie(?:s)? (?:where|there)\b": "is stored",
}


@dataclass(frozen=True)
class Module:
    """A module of the program: `name` as imported, `path` from the checkout's root."""

    name: str
    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The folder of `launcher/` that holds it, `launcher` for its root, or `recipes`."""
        parts = self.path.split("/")
        return parts[1] if parts[0] == "launcher" and len(parts) > 2 else parts[0]

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def is_face(self) -> bool:
        """Whether this is the `__init__` of a package."""
        return self.path.endswith("__init__.py")

    @property
    def num_lines(self) -> int:
        """All lines, blank ones included."""
        return self.text.count("\n")


@functools.cache
def modules() -> dict[str, Module]:
    """Parse every module of `launcher/` and `recipes/`, by the name under which it is imported."""
    parsed = {}
    for folder in ("launcher", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            parts = relative.with_suffix("").parts
            dotted = ".".join(part for part in parts if part != "__init__")
            name = f"launcher.{dotted}" if folder == "recipes" else dotted
            text = path.read_text(encoding="utf-8")
            parsed[name] = Module(name, str(relative), text, ast.parse(text))
    return parsed


def _docstring(node: ast.AST) -> ast.Expr | None:
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        return node.body[0]  # type: ignore[return-value]
    return None


def _num_code_lines(module: Module) -> int:
    """Count lines that hold code: no blank ones, comments or docstrings."""
    lines = enumerate(module.text.splitlines(), start=1)
    held = {number for number, line in lines if line.strip() and line.lstrip()[0] != "#"}
    docstrings: set[int] = set()
    for node in module.nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr)):  # which may hold blank lines
            held.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif (docstring := _docstring(node)) is not None:
            docstrings.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(held - docstrings)


def _from_imports(module: Module) -> Iterator[str]:
    """Yield the module of every `from ... import ...`, wherever it stands."""
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target = inner if inner in modules() else node.module
                if target in modules() and target != module.name:
                    yield target


def circular(graph: dict[str, set[str]]) -> set[str]:
    """Return the nodes from which a path leads back to themselves."""

    def reachable(node: str) -> set[str]:
        seen: set[str] = set()
        ahead = [node]
        while ahead:
            new = graph.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        return seen

    return {node for node in graph if node in reachable(node)}


def imports_of_files() -> dict[str, set[str]]:
    """Map each module to those it imports, also for type checkers only or inside a function."""
    return {
        name: {
            *_from_imports(module),
            *(
                alias.name
                for node in module.nodes
                if isinstance(node, ast.Import)
                for alias in node.names
                if alias.name in modules() and alias.name != name
            ),
        }
        for name, module in modules().items()
    }


def imports_of_packages() -> dict[str, set[str]]:
    """Map each folder of `launcher/` to the others that it imports; the root is no package."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, targets in imports_of_files().items():
        package = modules()[name].package
        graph[package].update({modules()[target].package for target in targets} - {package})
    return {name: targets - {"launcher"} for name, targets in graph.items() if name != "launcher"}


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's parameters without `self`, `cls`, `*args` and `**kwargs`."""
    names = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in names)


def homes_of_public_names() -> dict[str, list[str]]:
    """Map each public class and function to the modules that define it.

    Recipes are left out: each family has the same parts under the same names.
    """
    homes = defaultdict(list)
    for module in modules().values():
        if module.package != "recipes":
            for node in module.tree.body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != "_":
                    homes[node.name].append(module.path)
    return dict(homes)


@dataclass(frozen=True)
class Hit:
    """A banned phrase, where it stands, and what to write instead."""

    path: str
    line: int
    phrase: str
    instead: str


def _python_prose(module: Module) -> Iterator[tuple[int, str]]:
    """Yield comments, docstrings and other strings, each with its first line."""
    comments = (_COMMENT.search(line) for line in module.text.splitlines())
    yield 1, "\n".join(comment[1] if comment else "" for comment in comments)
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _files(folders: Iterable[str], *suffixes: str) -> Iterator[Path]:
    """Yield the files below these folders, and those that are named themselves."""
    for folder in folders:
        within = ROOT / folder
        for path in [within] if within.is_file() else sorted(within.rglob("*")):
            if path.suffix in suffixes and not path.parent.is_symlink():
                yield path


def _num_lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def _prose(folders: list[str]) -> Iterator[tuple[str, int, str]]:
    """Yield the path, first line and text of all prose below these folders."""
    for module in modules().values():
        if any(Path(module.path).is_relative_to(folder) for folder in folders):
            yield from ((module.path, line, text) for line, text in _python_prose(module))
    for path in _files(folders, ".md", ".yaml"):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if path.suffix == ".yaml":
            text = "\n".join(line.partition("#")[2].strip() for line in text.splitlines())
        yield name, 1, text


def banned_phrases(folders: list[str] | None = None) -> list[Hit]:
    """Find the banned phrases in the prose of these folders, by default of the whole project."""
    patterns = [
        (re.compile(pattern.replace(" ", r"(?: +|\n *)"), re.MULTILINE), instead)
        for pattern, instead in BANNED.items()
    ]
    return [
        Hit(path, line + text.count("\n", 0, match.start()), match[0].replace("\n", " "), instead)
        for path, line, text in _prose(folders or [*FOLDERS, "CHANGELOG.md"])
        for pattern, instead in patterns
        for match in pattern.finditer(text)
    ]


def _slivers() -> int:
    """Count modules of at most 60 lines with exactly one importer."""
    importers = defaultdict(set)
    for module in modules().values():
        for target in _from_imports(module):
            importers[target].add(module.name)
    small = (m for m in modules().values() if m.num_lines <= 60 and not m.is_face)
    return sum(len(importers[module.name]) == 1 for module in small)


def _deep() -> int:
    """Count names imported from another package's inner module, past its face."""
    return sum(
        modules()[target].package != module.package and not modules()[target].is_face
        for module in modules().values()
        for target in _from_imports(module)
    )


def _private() -> int:
    """Count reads of another object's `_member`."""
    reads = (
        node
        for module in modules().values()
        for node in module.nodes
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr)
    )
    owners = (node.value for node in reads if isinstance(node.value, (ast.Name, ast.Attribute)))
    names = (owner.id if isinstance(owner, ast.Name) else owner.attr for owner in owners)
    return sum(name not in ("self", "cls") for name in names)


def _config_fields() -> int:
    """Count the annotated fields of the dataclasses in `launcher/config/`."""
    return sum(
        isinstance(statement, ast.AnnAssign)
        for module in modules().values()
        if module.package == "config"
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for statement in node.body
    )


def figures() -> dict[str, float]:
    """Count every figure that `budget.toml` limits."""
    own = list(modules().values())
    functions = [n for m in own for n in m.nodes if isinstance(n, _FUNCTIONS)]
    spans = sorted((n.end_lineno or 0) - n.lineno + 1 for n in functions)
    public = [
        node
        for module in own
        for node in module.tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
    ]
    titles = [(ast.get_docstring(m.tree) or "").split(" ")[0].rstrip(",:") for m in own]
    folders = Counter(str(Path(module.path).parent) for module in own)
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    pages = [path for path in _files(FOLDERS, ".md") if path.name == "README.md"]
    return {
        "code": sum(map(_num_code_lines, own)),
        "modules": len(own),
        "largest": max(module.num_lines for module in own),
        "function_p95": spans[int(0.95 * len(spans))],
        "crowded": sum(count > 20 for count in folders.values()),
        "root": folders["launcher"],
        "slivers": _slivers(),
        "deep": _deep(),
        "private": _private(),
        "circular_files": len(circular(imports_of_files())),
        "circular_packages": len(circular(imports_of_packages())),
        "config_fields": _config_fields(),
        "undocumented": sum(ast.get_docstring(node) is None for node in public),
        "untitled": sum(bool(m.tree.body) and not ast.get_docstring(m.tree) for m in own),
        "wh_titles": sum(title in _QUESTIONS for title in titles),
        "many_parameters": sum(num_parameters(node) > 7 for node in functions),
        "banned_phrases": len(banned_phrases()),
        "tests": _num_lines(_files(["tests"], ".py")),
        "readme_lines": len(readme),
        "readme_longest": max(map(len, readme)),
        "pages": _num_lines(pages),
    }


def limits() -> dict[str, float]:
    """Read the limits of `budget.toml`."""
    read = tomllib.loads(BUDGET.read_text(encoding="utf-8"))["limits"]
    assert isinstance(read, dict)
    return read


def main(folders: list[str]) -> None:
    """Print the figures beside their limits, or the banned phrases in these folders."""
    if folders:
        for hit in banned_phrases([folder.rstrip("/") for folder in folders]):
            print(f"{hit.path}:{hit.line}: {hit.phrase!r}: {hit.instead}")
        return
    for name, figure in figures().items():
        print(f"{name:16}{figure:>8,}  of {limits().get(name, 'no limit'):>8,}")


if __name__ == "__main__":
    main(sys.argv[1:])
