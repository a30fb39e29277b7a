"""The installation: its own `conf/` and templates, and libraries that only some settings need.

The command that installs these names the libraries themselves. No package index has this project:
what it would answer to the name `launcher` is other people's code.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

DISTRIBUTION = "jax-plan-launcher"  # as pyproject.toml has it

# The same folder from a checkout, an editable install and a wheel: it is inside the package or,
# where that is a checkout, beside it, with a link inside.
_PACKAGE = Path(__file__).resolve().parents[1]
_INSIDE = _PACKAGE / "conf"
CONF = _INSIDE.resolve() if _INSIDE.is_dir() else _PACKAGE.parent / "conf"  # disks without links

# By the module that is imported; a test holds them against pyproject.toml's extras. A checkout that
# is not installed has no metadata to read them from.
_REQUIREMENTS = {
    "alembic": "alembic>=1.13",
    "boto3": "boto3>=1.36",
    "google.cloud.storage": "google-cloud-storage>=3.4,<4",
    "huggingface_hub": "huggingface-hub>=1,<3",
    "jax_cuda12_plugin": "jax[cuda12]",  # of the JAX that is here
    "mlflow": "mlflow-skinny>=3.7,<4",
    "optuna": "optuna>=5.0,<6",
    "PIL": "pillow>=11",
    "pyarrow": "pyarrow>=18",
    "sklearn": "scikit-learn>=1.5",
    "sqlalchemy": "sqlalchemy>=2.0",
    "tensorboardX": "tensorboardX>=2.6.2,<3",
    "tiktoken": "tiktoken>=0.9",
    "trackio": "trackio>=0.43,<1",
}


def from_template(package: str, template: str, /, **values: Any) -> str:
    """Return the text that a template in the folder of a package makes of values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: it is seldom needed

    loader = PackageLoader(package, "")
    templates = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    return templates.get_template(template).render(values)


def installing(*modules: str) -> str:
    """Return the command that installs the libraries of these modules."""
    wanted = (_REQUIREMENTS.get(module, module) for module in modules)
    return " ".join(["pip install", *(f"'{each}'" for each in wanted)])


def lacking(*modules: str) -> str | None:
    """Return the command that installs those of these modules that are not here; None for none."""
    # Its parents first: without one, a search raises.
    chains = {module: accumulate(module.split("."), "{}.{}".format) for module in modules}
    absent = [module for module, chain in chains.items() if not all(map(find_spec, chain))]
    return installing(*absent) if absent else None
