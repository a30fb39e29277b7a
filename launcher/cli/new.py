"""`launcher new my_project`: a folder with a model, a dataset, settings and the command.

The files are the templates beside this module. Nothing that is there is written over.
"""

from __future__ import annotations

import importlib.util
import keyword
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from launcher.base import LAUNCH, answer, from_template, to_type
from launcher.cli import Parser
from launcher.config.errors import ConfigError

HELP = """\
  launcher new my_project   write the folder my_project: a model, a dataset, settings and a README

The last part of the name is the package's, so it is a word that Python can import.
"""

_OURS = ("launcher", "recipes")


def main(argv: Sequence[str]) -> int:
    """Do what `launcher new <argv>` says; return the exit code.

    Raises:
        ConfigError: the words are wrong, or the folder cannot be made.
    """
    parser = Parser("launcher new", "Write launcher new my_project.")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("-h", "--help", action="store_true")
    words = parser.parse_args(argv)
    if words.help:
        return answer(HELP, end="")
    if words.folder is None:
        raise ConfigError(
            "launcher new does not say which folder", "Write launcher new my_project."
        )
    folder = Path(words.folder)
    files = write_project(folder)
    name = folder.absolute().name
    lines = [f"{folder}/ holds {name}:"]
    lines += [f"  {path}" for path in files]
    lines += ["", "to train it:", f"  {to_type('cd', str(folder))}", f"  {training_command(name)}"]
    return answer("\n".join(lines))


def training_command(name: str) -> str:
    """Return the command that trains a project, for its own folder."""
    return to_type(*LAUNCH, "--config-dir", "conf", ("recipe", name), ("allow_modules", [name]))


def write_project(folder: Path) -> list[str]:
    """Write a project into a new folder, whole or not at all; return its files.

    Args:
        folder: the folder, which is not there or empty. Its name is the package's.

    Raises:
        ConfigError: the name cannot be a package's, something is there, or it cannot be written.
    """
    folder = folder.absolute()
    _check_name(folder.name)
    files = project_files(folder.name)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        is_there = folder.exists()
        if is_there and (not folder.is_dir() or any(folder.iterdir())):
            what = "is not empty" if folder.is_dir() else "is a file"
            raise ConfigError(f"{folder} {what}", "Name a folder that is not there yet.")
        for path, content in files.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            (partial / path).write_text(content, encoding="utf-8")
        if is_there:  # it stays the same folder: somebody may stand in it
            for entry in partial.iterdir():
                entry.rename(folder / entry.name)
        else:
            partial.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}", "Name a folder that can be made."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return list(files)


def project_files(name: str) -> Mapping[str, str]:
    """Return the files of a project, by their paths in its folder.

    Args:
        name: the package's.
    """
    made = {
        "README.md": "README.md",
        f"conf/recipe/{name}.yaml": "recipe.yaml",
        f"{name}/__init__.py": "package.py",
        f"{name}/data.py": "data.py",
        f"{name}/model.py": "model.py",
    }
    return {
        path: from_template("launcher.cli", f"project/{template}.jinja", name=name)
        for path, template in made.items()
    }


def _check_name(name: str) -> None:
    """Raise ConfigError for a name by which Python or YAML would find something else."""
    problem = ""
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        problem = "is not a name that Python can import"
    elif name.startswith("_"):  # `_self_` is Hydra's
        problem = "does not begin with a letter"
    elif name in _OURS or name in sys.stdlib_module_names or _is_installed(name):
        problem = "is the name of an installed package"
    elif not _is_text(name):
        problem = "is a value in YAML, and no text"
    if problem:
        raise ConfigError(
            f"launcher new: {name!r} {problem}",
            "Choose another name of letters, digits and '_' that begins with a letter, such as "
            "my_project.",
        )


def _is_installed(name: str) -> bool:
    with suppress(ValueError):  # of a module that was made by hand
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None
    return True


def _is_text(name: str) -> bool:
    """Return whether `recipe=<name>` names a file, and is not null, true or a number."""
    with suppress(ValueError):
        return math.isfinite(float(name))  # nan, inf
    return isinstance(yaml.safe_load(name), str)
