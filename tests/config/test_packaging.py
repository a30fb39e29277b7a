"""pyproject.toml names every package by hand, because of conf/: it must name them all. And what is
installed from a checkout is found from everywhere."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_is_shipped():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    code = {file.parent.relative_to(ROOT) for file in (ROOT / "launcher").rglob("*.py")}
    templates = {f.parent.relative_to(ROOT) for f in (ROOT / "launcher").rglob("*.jinja")}
    linked = {
        Path("launcher") / file.parent.relative_to(ROOT)
        for pattern in ("conf/**/*.yaml", "recipes/**/*.py")
        for file in ROOT.glob(pattern)
    }
    assert sorted(named) == sorted(".".join(f.parts) for f in code | templates | linked)


def test_the_first_page_names_the_pythons_that_the_distribution_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = {text.rpartition(" ")[2] for text in project["classifiers"] if ":: Python :: 3." in text}
    page = (ROOT / "README.md").read_text()
    assert (
        set(re.findall(r"\b3\.\d\d\b", page.partition("## Start")[2].partition("```")[0])) == said
    )
    assert project["requires-python"] == f">={min(said)}"


@pytest.mark.devices
def test_an_editable_checkout_is_found_from_the_folder_above_it(tmp_path):
    """There the checkout's own folder, which has the package's name, must not be taken for it."""
    pytest.importorskip("setuptools", minversion="77")  # what [build-system] requires
    checkout, site = tmp_path / "launcher", tmp_path / "site"
    for name in ("launcher", "recipes", "conf"):
        unbuilt = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=unbuilt)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)

    # What `pip install -e .` does: the wheel of the build backend's editable hook, unpacked.
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    built = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(built, cwd=checkout, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)

    use = (
        "import sys, site; site.addsitedir(sys.argv[1]); sys.path.insert(0, '')\n"
        "import launcher, launcher.recipes; from launcher.config.folders import CONF\n"
        "print(launcher.__file__, launcher.recipes.__file__, CONF)"
    )
    alone = [sys.executable, "-I", "-S", "-c", use, str(site)]  # sees no other installation
    found = subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True, text=True)
    homes = ("launcher/__init__.py", "launcher/recipes/__init__.py", "conf")
    assert found.stdout.split() == [str(checkout / home) for home in homes]


@pytest.mark.devices
def test_a_checkout_on_a_disk_without_links_composes_settings(tmp_path):
    for name in ("launcher", "recipes", "conf"):
        unbuilt = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=unbuilt)
    for link in (tmp_path / "launcher" / "recipes", tmp_path / "launcher" / "conf"):
        link.unlink()
        link.write_text(f"../{link.name}")  # as git writes it there
    command = [sys.executable, "-m", "launcher", "--cfg", "job", "model=gpt", "dataset=stdlib_text"]
    home = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, env=home, check=True, capture_output=True)
