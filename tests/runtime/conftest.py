"""Modules that these tests share are found by their names, by workers too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
