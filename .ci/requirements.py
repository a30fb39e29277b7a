"""Print what pyproject.toml requires, for pip.

`--lowest [EXTRA...]` prints the lowest versions of that, and of what these extras bring.
"""

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
