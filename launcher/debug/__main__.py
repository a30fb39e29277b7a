"""`python -m launcher.debug`."""

import sys

from launcher.debug import main

if __name__ == "__main__":
    sys.exit(main())
