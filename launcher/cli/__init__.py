"""Command line: `python -m launcher`, `launcher runs`, `launcher new`."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from launcher.config.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Parser that raises a ConfigError for wrong arguments.

    Args:
        problem: how the error begins.
        remedy: what to do about it.
        options: as of `ArgumentParser`.
    """

    def __init__(self, problem: str, remedy: str, **options: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **options)
        self._problem, self._remedy = problem, remedy

    def error(self, message: str) -> NoReturn:
        """Raise the error for wrong arguments."""
        raise ConfigError(f"{self._problem}: {message}", self._remedy, code="command_line")
