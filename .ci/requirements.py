"""Print what pyproject.toml requires, for pip; with `--lowest`, the lowest versions of it."""

import re
import sys
import tomllib
from pathlib import Path

BOUND = re.compile(r"(?P<name>[\w.-]+)(?:\[.*?\])?>=(?P<version>[\w.]+)")


def main() -> None:
    """Print a line a dependency."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        bound = BOUND.match(requirement)
        lowest = "--lowest" in sys.argv and bound
        print(f"{bound['name']}=={bound['version']}" if lowest else requirement)


if __name__ == "__main__":
    main()
