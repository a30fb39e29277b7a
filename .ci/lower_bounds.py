"""Print the lowest versions that pyproject.toml allows, as constraints for pip."""

import re
import tomllib
from pathlib import Path

BOUND = re.compile(r"(?P<name>[\w.-]+)(?:\[.*?\])?>=(?P<version>[\w.]+)")


def main() -> None:
    """Print a line a dependency that has a lower bound."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        if bound := BOUND.match(requirement):
            print(f"{bound['name']}=={bound['version']}")


if __name__ == "__main__":
    main()
