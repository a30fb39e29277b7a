"""The location of the project's own `conf/`.

The same folder is found from a checkout, an editable install and a wheel: it is inside the package
or, where that is a checkout, beside it, with a link inside.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSIDE = _PACKAGE / "conf"
CONF = _INSIDE.resolve() if _INSIDE.is_dir() else _PACKAGE.parent / "conf"  # disks without links
