"""The table of capabilities names tests that exist, and its longest example is short."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "capabilities.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_test_in_the_table_exists():
    named = NAMED.findall(TABLE.read_text())
    assert len(named) > 60
    missing = []
    for path, name in dict.fromkeys(named):
        file = ROOT / path
        tree = ast.parse(file.read_text()) if file.exists() else None
        tests = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)} if tree else ()
        if tree is None or (name and name not in tests):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_row_names_a_test():
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    heads = {"| capability | test |", "| there | here | test |"}
    assert [row for row in rows if row not in heads and not NAMED.search(row)] == []


def test_the_cycle_by_hand_is_short():
    page = (ROOT / "launcher" / "api" / "README.md").read_text()
    example = re.search(r"^## By hand\n.*?^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert example is not None
    assert example[1].count("\n") <= 40
    used = ("gradients(", "apply(", "warmup(", "foreach_worker(", "foreach_replica(", "on_first(")
    assert [name for name in used if name not in example[1]] == []
