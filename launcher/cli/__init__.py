"""Projects: a folder with a model, a dataset and settings to begin from."""

from launcher.cli.new import main, write_project

__all__ = ["main", "write_project"]
