"""What a method or a kind of cluster is, its class says: nobody compares its name."""

import ast
from pathlib import Path

import launcher
from launcher.config.cluster import CLUSTERS
from launcher.config.parallel import METHODS

SOURCES = Path(launcher.__file__).parent
WORDS = ("kind", "method")  # what such a name is compared with


def compared(tree):
    """The comparisons with a name, as they are written."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            constants = [x for side in sides for x in ast.walk(side) if isinstance(x, ast.Constant)]
            named = any(x.value in (*CLUSTERS, *METHODS) for x in constants)
            others = [ast.unparse(side) for side in sides if not isinstance(side, ast.Constant)]
            # The last word of `config.cluster.kind`, or of `tree.get("method")`.
            last = [side.rpartition(".")[2] for side in others]
            if named and any(word in side for word in WORDS for side in last):
                found.append(ast.unparse(node))
    return found


def test_what_is_looked_for_is_found():
    for text in (
        'config.cluster.kind == "slurm"',
        'config.parallel.method in ("data", "zero2")',
        'tree.get("kind") != "local"',
    ):
        assert compared(ast.parse(text)) == [ast.unparse(ast.parse(text))]
    assert compared(ast.parse('schedule == "auto"')) == []


def test_no_kind_or_method_is_compared_by_its_name():
    faults = [
        f"{path.relative_to(SOURCES)}: {text}"
        for path in sorted(SOURCES.rglob("*.py"))
        for text in compared(ast.parse(path.read_text()))
    ]
    assert faults == []
