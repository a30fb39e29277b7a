"""Hold the code base to its budget, and its imports and names to what a reader can keep in mind."""

import tomllib

import house
import pytest

BUDGET = tomllib.loads(house.BUDGET.read_text())
SHARED_NAMES = set(BUDGET["shared_names"]["names"])


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return house.figures()


def test_each_figure_has_a_limit(figures: dict[str, float]) -> None:
    assert set(BUDGET["limits"]) == set(figures)


@pytest.mark.parametrize("name", BUDGET["limits"])
def test_a_figure_is_within_its_limit(name: str, figures: dict[str, float]) -> None:
    assert figures[name] <= BUDGET["limits"][name]


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert house.circular(graph) == {"a", "b", "c"}


def test_a_public_name_is_defined_once() -> None:
    homes = house.homes_of_public_names()
    assert {n: h for n, h in homes.items() if len(h) > 1 and n not in SHARED_NAMES} == {}


@pytest.mark.parametrize(
    "text",
    [
        "the workers of a Ray that is there",
        "a run that\ngoes on",
        "of each stage what\nthat",
        "is said",
    ],
)
def test_a_banned_phrase_is_found_across_lines(text: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "README.md").write_text(f"First.\n{text}\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "modules", dict)
    (hit,) = house.banned_phrases(["README.md"])
    assert hit.path == "README.md"
    assert hit.phrase in " ".join(text.split())
