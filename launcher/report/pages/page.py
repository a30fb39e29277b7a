"""Renders a page from its template: styles and script are in it, and nothing may be loaded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from launcher.report import text


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("launcher.report", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("loss_text", "seconds_text", "clock_text", "count_text", "bytes_text"):
        environment.filters[name.removesuffix("_text")] = getattr(text, name)
    environment.filters["percent"] = text.percent_text
    return environment


def page_from(template: str, content: Mapping[str, Any]) -> str:
    """Return the page that a template of this folder makes of its content."""
    return _environment().get_template(template).render(**content)
