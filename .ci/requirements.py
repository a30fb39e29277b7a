"""Print what pyproject.toml requires, for pip; with `--lowest`, the lowest versions of it and of
what the extras bring that the named options are, such as `data`."""

import re
import sys
import tomllib
from pathlib import Path

BOUND = re.compile(r"(?P<name>[\w.-]+)(?:\[.*?\])?>=(?P<version>[\w.]+)")


def main() -> None:
    """Print a line a dependency."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [one for extra in sys.argv[2:] for one in extras[extra]]
    for requirement in [*project["dependencies"], *asked]:
        bound = BOUND.match(requirement)
        lowest = "--lowest" in sys.argv and bound
        print(f"{bound['name']}=={bound['version']}" if lowest else requirement)


if __name__ == "__main__":
    main()
