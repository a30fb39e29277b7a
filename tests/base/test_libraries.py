"""What is to be installed is named itself, or is this checkout.

No package index has this project: what one answers to `launcher` or `recipes` is other people's.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base import measurements
from launcher.base.libraries import _REQUIREMENTS, DISTRIBUTION, installing, lacking

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Named by pages, and not by pyproject.toml. Look at what the index has before you add a name.
OTHERS = {"lm-eval", "pip", "torch", "transformers"}

INSTALL = re.compile(
    r"\b(?:pip[\d.]*|pipx|conda|uv(?: tool)?)[\"']?[\s#]+(?:install|add)"
    r"((?: +(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"`;|)]+))+)"
)
WORD = re.compile(r"'([^']*)'|\"([^\"]*)\"|(\S+)")
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z][\w.-]*?)(?:\[[^\]]*\])?(?P<bounds>[<>=!~].*)?")


def requirement(text: str) -> re.Match[str]:
    found = REQUIREMENT.fullmatch(text)
    assert found, f"{text!r} is no requirement"
    return found


def bounds() -> dict[str, str]:
    """What pyproject.toml demands, by the library's name."""
    extras = PROJECT["optional-dependencies"].values()
    found = [requirement(one) for demands in (PROJECT["dependencies"], *extras) for one in demands]
    return {one["name"]: one["bounds"] or "" for one in found if one["name"] != PROJECT["name"]}


def texts() -> Iterator[tuple[str, str]]:
    """Every text of the project, by its file's name."""
    rooms = (".ci", ".github", "conf", "launcher", "recipes", "slurm", "tests")
    for path in [*ROOT.iterdir(), *(path for room in rooms for path in (ROOT / room).rglob("*"))]:
        if path.is_file() and path.suffix != ".pyc" and path != Path(__file__):
            yield path.name, path.read_text(errors="ignore")


def installed(text: str) -> Iterator[str]:
    """Whatever is installed by the commands in a text."""
    if "install" not in text and " add" not in text:
        return
    text = re.sub(r"""(["'])\n\s*[rbf]{0,2}\1""", "", text)  # a string that is continued
    text = re.sub(r"""["'],\s*[rbf]{0,2}["']""", " ", text)  # a command as a list of words
    text = re.sub(r" *\\\n\s*", " ", text).replace("\\n", "\n")  # a shell's continued line
    text = re.sub(r"\binstall\n[\s#]*", "install ", text)  # a page's, a comment's
    for command in INSTALL.finditer(text):
        for single, double, bare in WORD.findall(command[1]):
            word = single or double or bare.rstrip(".,:") or "."
            if not word.startswith("-"):
                yield word


def problem(word: str) -> str | None:
    """What is wrong with installing `word`: an index could answer with other code."""
    if word.startswith((".", "/", "$", "{ROOT}", ":", "<")):  # paths, and what options take
        return None
    found = REQUIREMENT.fullmatch(word)
    if found is None:
        return f"{word}: neither a library nor a path"
    if found["name"] in OTHERS:
        return None
    if found["name"] not in (known := bounds()):
        return f"{word}: not ours to give, and no library that this project knows"
    given, allowed = found["bounds"] or "", known[found["name"]]
    if given not in ("", allowed) and not given.startswith("==") and "{" not in given:
        return f"{word}: pyproject.toml has {found['name']}{allowed}"
    return None


def test_no_text_has_a_name_installed_that_others_may_answer_to() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for name, text in texts():
        found[name] += installed(text)
    wrong = {name: [p for p in map(problem, words) if p] for name, words in found.items()}
    assert {name: problems for name, problems in wrong.items() if problems} == {}
    # They were found at all.
    assert all(found[name] for name in ("README.md", "run", "mlflow.yaml", "CONTRIBUTING.md"))


@pytest.mark.parametrize(
    "planted",
    [
        "(pip install 'launcher[data]')",
        "python3.12 -m pip install --quiet --upgrade 'launcher[cuda]>=0.1'",
        "uv add launcher",
        "pipx install recipes",
        "!pip3 install pyarrow launcher\\n",
        "pip install \\\n    --upgrade \\\n    launcher",
        "# needs pip install\n# 'launcher[data]'",
        "# needs pip\n# install 'launcher[data]'",
        'f"pip install {name}"',
        'f"needs {module}; pip install "\n    f"\'launcher[{extra}]\'"',
        '[sys.executable, "-m", "pip", "install", "--quiet", f"launcher[{extras}]"]',
        "pip install jax-plan-launcher",
        "pip install 'pyarrow>=17'",
    ],
)
def test_a_planted_one_is_found(planted: str) -> None:
    assert [p for p in map(problem, installed(planted)) if p]


@pytest.mark.parametrize(
    "right",
    [
        "pip install -e '.[test]'",
        "pip install -e . torch transformers",
        "It needs pyarrow: pip install 'pyarrow>=18'. Of several splits",
        "uv pip install ./dist/one.whl",
    ],
)
def test_what_is_right_is_let_by(right: str) -> None:
    words = list(installed(right))
    assert words
    assert [p for p in map(problem, words) if p] == []


def test_what_is_advised_is_what_the_extras_bring() -> None:
    extras = {one for name in PROJECT["optional-dependencies"] for one in extra(name)}
    assert {re.sub(r"^(jax\[.*\]).*", r"\1", one) for one in extras} >= set(_REQUIREMENTS.values())
    optional = {
        one
        for name in ("data", "hub", "mlflow", "stores", "sweep", "tensorboard", "trackio")
        for one in extra(name)
    }
    assert optional <= set(_REQUIREMENTS.values())


def test_nothing_asks_for_the_version_of_what_others_call_so() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert DISTRIBUTION in measurements.versions()
    pattern = re.compile(
        r"""\b(?:version|distribution|metadata|requires|files)\(["'](?:launcher|recipes)"""
    )
    assert [name for name, text in texts() if pattern.search(text)] == []


def extra(name: str) -> list[str]:
    return PROJECT["optional-dependencies"][name]


def test_only_what_is_lacking_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"mlflow": True, "sqlalchemy": None, "alembic": None}
    monkeypatch.setattr("launcher.base.libraries.find_spec", here.get)
    assert lacking("mlflow", "sqlalchemy", "alembic") == (
        "pip install 'sqlalchemy>=2.0' 'alembic>=1.13'"
    )
    assert lacking("mlflow") is None
    assert installing("mlflow") == "pip install 'mlflow-skinny>=3.7,<4'"
