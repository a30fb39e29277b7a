"""The tool finds what tests find, and says what they do not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import score

SCORE = Path(__file__).parent / "score.py"
CODE = '''
"""A module."""

def checked(x):
    return [x]

def unchecked(x):
    return [x]
'''
TEST = "from toy.pkg import mod\n\ndef test_checked():\n    assert mod.checked(1) == [1]\n"


def ran(root: Path, *words: str) -> str:
    command = [sys.executable, str(SCORE), "--root", str(root), "--seed", "3", *words, "toy/pkg"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "toy/__init__.py": "",
        "toy/pkg/__init__.py": "",
        "toy/pkg/mod.py": CODE,
        "tests/pkg/test_mod.py": TEST,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_a_kill_and_a_survivor(root: Path) -> None:
    first, *others = ran(root, "--seconds", "60").splitlines()
    assert first == "2 of 2 mutants, seed 3: 1 killed, 1 survived, 0 timeout, 0 unsure"
    where = "pkg: dropped 0 in unchecked (toy/pkg/mod.py:8): return [x]"
    assert others == [f"  survived: {where} (1 of 1 files passed)"]
    assert (root / "toy/pkg/mod.py").read_text() == CODE


def test_the_mistakes(tmp_path: Path) -> None:
    text = (
        "class A:\n    def f(self, x):\n        while x < 3 and x:\n            x = x * 'y' + x\n"
    )
    (tmp_path / "m.py").write_text(text)
    made = {
        (m.operator, m.number): ast.unparse(score.mutated(ast.parse(text), m.node, m.operator))
        for m in score.all_mutants(tmp_path, ["."])
    }
    plain = ast.unparse(ast.parse(text))
    assert made == {
        ("and/or", 0): plain.replace("and", "or"),
        ("comparison", 0): plain.replace("<", ">="),
        ("dropped", 0): plain.replace("x = x * 'y' + x", "pass"),
        ("negation", 0): plain.replace("x < 3 and x:", "not (x < 3 and x):"),
        ("one less", 0): plain.replace("3", "2"),
        ("one more", 0): plain.replace("3", "4"),
    }


def test_a_seed_draws_the_same_where_modules_have_moved(root: Path) -> None:
    drawn = ran(root, "--mutants", "1", "--list")
    assert drawn == ran(root, "--mutants", "1", "--list")
    (root / "toy/pkg/inner").mkdir()
    (root / "toy/pkg/mod.py").rename(root / "toy/pkg/inner/other.py")
    moved = ran(root, "--mutants", "1", "--list")
    assert moved == drawn.replace("toy/pkg/mod.py", "toy/pkg/inner/other.py")
