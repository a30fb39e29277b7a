"""How many small mistakes the tests find: `python tests/mutation/score.py --mutants 200 --seed 0`.

A mutant is this tree with one mistake in one function: a comparison turned round, `+` for `-`, a
constant one off, `and` for `or`, a condition negated, a statement left out. It is killed where a
test fails. The tests of a mutant are the fast ones of `tests/<package>`: first the files that name
its module, then the others, as many as the time allows (`--seconds`). A timeout is one for which
not even the first two files ended in that time.

Mutants are drawn by a hash of the seed, the package, the function's qualified name, the operator
and its place among those of the function. Neither paths nor lines count, so that one seed draws
mostly the same mutants after modules have moved. Nothing is imported from the tree: a copy of it,
one a job, is mutated, in a temporary folder.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import hashlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = tuple(
    f"launcher/{name}" for name in ("trace", "partition", "schedule", "plan", "runtime")
)
SKIPPED = ".*", "__pycache__", "outputs", "multirun", "*.egg-info"
COMPARISONS = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
VERDICTS = "killed", "survived", "timeout", "unsure"
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DROPPED = ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Continue, ast.Break


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        package: the last name of the package.
        path: the module, in the tree.
        function: the qualified name of the function that has it.
        operator: what is wrong.
        number: its place among those of the operator in the function.
        node: its place in `ast.walk` of the module.
        line: its line.
        source: the statement or expression as it was.
    """

    package: str
    path: str
    function: str
    operator: str
    number: int
    node: int
    line: int
    source: str

    def __str__(self) -> str:
        about = f"{self.operator} {self.number} in {self.function}"
        return f"{self.package}: {about} ({self.path}:{self.line}): {self.source}"


def operators(node: ast.AST) -> Iterator[str]:
    """Yield what can be done wrong at a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison"
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        if not any(_is_text(x) for x in ast.walk(node)):
            yield "arithmetic"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from ("one more", "one less")
    elif isinstance(node, ast.BoolOp):
        yield "and/or"
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "negation"
    if isinstance(node, DROPPED) and not (isinstance(node, ast.Expr) and _is_text(node.value)):
        yield "dropped"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def mutated(tree: ast.Module, number: int, operator: str) -> ast.Module:
    """Return a module with a mistake at the node of this number in `ast.walk`."""
    tree = copy.deepcopy(tree)
    node = next(node for n, node in enumerate(ast.walk(tree)) if n == number)
    if operator == "comparison":
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif operator == "arithmetic":
        node.op = ARITHMETIC[type(node.op)]()
    elif operator in ("one more", "one less"):
        node.value += 1 if operator == "one more" else -1
    elif operator == "and/or":
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif operator == "negation":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        _replace(tree, node, ast.Pass())
    return ast.fix_missing_locations(tree)


def _replace(tree: ast.Module, old: ast.stmt, new: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for _, body in ast.iter_fields(parent):
            if isinstance(body, list) and any(one is old for one in body):
                body[next(n for n, one in enumerate(body) if one is old)] = new
                return


def all_mutants(root: Path, packages: Sequence[str]) -> list[Mutant]:
    """Return every mutant of the packages, functions in the order of their names."""
    found = [
        mutant
        for package in packages
        for path in sorted((root / package).rglob("*.py"))
        for mutant in _mutants(path, str(path.relative_to(root)), package)
    ]
    return sorted(found, key=lambda m: (m.package, m.function, m.operator, m.number, m.path))


def _mutants(module: Path, path: str, package: str) -> Iterator[Mutant]:
    text = module.read_text(encoding="utf-8")
    tree = ast.parse(text)
    numbers = {id(node): n for n, node in enumerate(ast.walk(tree))}
    seen: dict[tuple[str, str], int] = {}
    for function, node in _inside(tree, ""):
        for operator in operators(node):
            count = seen[function, operator] = seen.get((function, operator), -1) + 1
            source = " ".join((ast.get_source_segment(text, node) or "").split())[:80]
            at = numbers[id(node)], getattr(node, "lineno", 0), source
            yield Mutant(Path(package).name, path, function, operator, count, *at)


def _inside(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of functions' bodies, in the order of the text, with the function's name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            inner = f"{name}.{child.name}" if name else child.name
            for statement in child.body:
                if isinstance(child, FUNCTIONS):
                    if not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                        yield inner, statement
                        yield from _inside(statement, inner)
                    else:
                        yield from _inside(ast.Module([statement], []), inner)
                elif isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                    yield from _inside(ast.Module([statement], []), inner)
        elif name:
            yield name, child
            yield from _inside(child, name)
        else:
            yield from _inside(child, name)


def drawn(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return so many mutants, in the order of a hash: evenly over the packages' functions."""

    def place(mutant: Mutant) -> bytes:
        names = mutant.package, mutant.function, mutant.operator, str(mutant.number)
        return hashlib.sha256("\n".join((str(seed), *names)).encode()).digest()

    return sorted(mutants, key=place)[:count]


def tests_of(root: Path, mutant: Mutant) -> list[str]:
    """Return the test files of a mutant: first that named after its module, then those that name
    it, then the rest of its package's folder; small ones first."""
    folder, stem = root / "tests" / mutant.package, Path(mutant.path).stem
    files = sorted(folder.rglob("test_*.py"), key=lambda path: (path.stat().st_size, path.name))
    if not files:  # a package without a folder of its own
        files = sorted((root / "tests").rglob("test_*.py"))

    def rank(path: Path) -> int:
        if path.stem == f"test_{stem}":
            return 0
        text = path.read_text(encoding="utf-8")
        function = mutant.function.split(".")[0]
        return 1 if f".{stem} import" in text or function in text else 2 if stem in text else 3

    return [str(path.relative_to(root)) for path in sorted(files, key=rank)]


def run_tests(root: Path, files: Sequence[str], seconds: float) -> tuple[str, int, str]:
    """Run tests until one fails, or the time is over.

    Returns:
        "killed", "survived" or "timeout"; how many files have passed; and the test that failed.
    """
    deadline = time.monotonic() + seconds
    passed = 0
    for some in _portions(files):
        code, failed = _pytest(root, some, deadline - time.monotonic())
        if code is None:
            return "survived" if passed else "timeout", passed, ""
        if code not in (0, 5):  # 5: all were deselected
            return "killed", passed, failed
        passed += len(some)
    return "survived", passed, ""


def _pytest(root: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run tests until one fails; return the exit code, None if the time is over, and which."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    how = "-q", "-x", "-n", "0", "--tb=no", "-rfE", "-p", "no:cacheprovider"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *how, *tests],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=max(0, seconds))
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said.read(), re.MULTILINE)
    return code, failed.group(1) if failed else ""


def _portions(files: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the first two files, which mostly decide, and then ever more at once."""
    size, start = 2, 0
    while start < len(files):
        yield files[start : start + size]
        start, size = start + size, 2 * size


def tried(mutant: Mutant, root: Path, seconds: float) -> tuple[str, str]:
    """Run the tests of a mutant in a copy of the tree, and undo the mistake.

    Returns:
        the verdict, and by which test or how many files of tests have passed. A test that
        fails without the mistake, too, kills nothing: the mutant is "unsure".
    """
    path = root / mutant.path
    text = path.read_text(encoding="utf-8")
    tree = mutated(ast.parse(text), mutant.node, mutant.operator)
    files = tests_of(root, mutant)
    try:
        path.write_text(ast.unparse(tree) + "\n", encoding="utf-8")
        verdict, passed, failed = run_tests(root, files, seconds)
    finally:
        path.write_text(text, encoding="utf-8")
    if failed:
        fails = _pytest(root, [failed], seconds)[0] != 0
        return "unsure" if fails else verdict, failed
    return verdict, f"{passed} of {len(files)} files passed"


def score(
    root: Path, chosen: Sequence[Mutant], jobs: int, seconds: float
) -> dict[Mutant, tuple[str, str]]:
    """Return each mutant's verdict, as `tried` does; progress goes to standard error."""
    found: dict[Mutant, tuple[str, str]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for n in range(jobs):
            tree = Path(folder) / str(n)
            shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
            trees.put(tree)

        def one(mutant: Mutant) -> tuple[Mutant, tuple[str, str], float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return mutant, tried(mutant, tree, seconds), time.monotonic() - start
            finally:
                trees.put(tree)

        for done in concurrent.futures.as_completed([pool.submit(one, m) for m in chosen]):
            mutant, verdict, took = done.result()
            found[mutant] = verdict
            print(
                f"{len(found)}/{len(chosen)} {verdict[0]}, {verdict[1]}, in {took:.0f} s: {mutant}",
                file=sys.stderr,
            )
    return {mutant: found[mutant] for mutant in chosen}


def main(words: Sequence[str] | None = None) -> int:
    """Print how many mutants are killed, and those that are not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=90, help="for the tests of one mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="folders in the root")
    asked = parser.parse_args(words)
    known = all_mutants(asked.root, asked.packages)
    chosen = drawn(known, asked.mutants, asked.seed)
    if asked.list:
        print(*chosen, sep="\n")
        return 0
    found = score(asked.root, chosen, asked.jobs, asked.seconds)
    verdicts = [verdict for verdict, _ in found.values()]
    told = ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS)
    print(f"{len(chosen)} of {len(known)} mutants, seed {asked.seed}: {told}")
    for verdict in VERDICTS[1:]:
        left = [f"{m} ({files})" for m, (became, files) in found.items() if became == verdict]
        print(*(f"  {verdict}: {one}" for one in sorted(left)), sep="\n", end="\n" * bool(left))
    return 0


if __name__ == "__main__":
    sys.exit(main())
