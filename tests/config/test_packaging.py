"""pyproject.toml names every package by hand, because conf/ moves: it must name them all."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_is_shipped() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    code = {
        file.parent.relative_to(ROOT)
        for top in ("launcher", "recipes")
        for file in (ROOT / top).rglob("*.py")
    }
    conf = {
        Path("launcher") / file.parent.relative_to(ROOT) for file in ROOT.glob("conf/**/*.yaml")
    }
    assert sorted(named) == sorted(".".join(folder.parts) for folder in code | conf)
