"""Numbers and paths as text for people: losses, durations, counts, bytes. Plain ASCII."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def loss_text(value: float | None) -> str:
    """Format a loss or another small number: `2.4133`, `1.250e-05`, `nan`, `-` where unknown."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e4 or not math.isfinite(value):
        return f"{value:.4f}"
    return f"{value:.3e}"


def seconds_text(seconds: float | None) -> str:
    """Format a duration to three digits: `85.2 ms`, `1.23 s`, `2:05` from two minutes on."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_three_digits(seconds)} s"
    return clock_text(seconds)


def clock_text(seconds: float) -> str:
    """Format a duration as a clock does: `0:35`, `2:05`, `3:00:10`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def days_text(seconds: float) -> str:
    """Format a long duration: `12.3 days`, and a shorter one than two days as `seconds_text`."""
    days = seconds / 86400
    return seconds_text(seconds) if days < 2 else f"{days:,.1f} days"


def count_text(count: float | None) -> str:
    """Format a count: `512`, `105 K`, `1.21 M`, `7.00 B`."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T"))


def bytes_text(count: float | None) -> str:
    """Format a number of bytes in binary units: `512 B`, `1.50 MiB`, `79.6 GiB`."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def rate_text(per_second: float, unit: str) -> str:
    """Format a throughput: `12,345 tokens/s`; slow ones keep two decimals."""
    return f"{per_second:,.0f} {unit}/s" if per_second >= 10 else f"{per_second:.2f} {unit}/s"


def percent_text(fraction: float | None) -> str:
    """Format a fraction of one as `12.5%`."""
    return "-" if fraction is None else f"{fraction * 100:.1f}%"


def ranges_text(numbers: Sequence[int]) -> str:
    """Format ascending integers with runs joined: `0-3`, `2`, `0-1, 4`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def shown_path(path: Path) -> str:
    """Return a path as the user would type it: relative where it is below the current folder."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _scaled(count: float | None, base: int, units: tuple[str, ...]) -> str:
    if count is None:
        return "-"
    power = 0
    # 999.5 would be written as 1000 of its unit: it belongs to the next one.
    while abs(count) >= base - 0.5 and power < len(units) - 1:
        count, power = count / base, power + 1
    digits = f"{count:.0f}" if power == 0 else _three_digits(count)
    return f"{digits} {units[power]}".rstrip()


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}"


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted keys: `{"a": {"b": 1}}` as `{"a.b": 1}`."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def setting_text(value: Any) -> str:
    """Format a setting as YAML does; `-` for null."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def result_text(value: Any, name: str) -> str:
    """Format a result in the unit that ends its name, as `step_seconds` or `memory_bytes`."""
    if value is None or isinstance(value, str):
        return value or "-"
    if name.endswith("per_second"):
        return f"{value:,.1f}"
    texts = {"loss": loss_text, "seconds": seconds_text, "bytes": bytes_text}
    texts |= {"fraction": percent_text, "parameters": count_text}
    return texts.get(name.removesuffix("_median").rpartition("_")[2], str)(value)


def label_text(name: str) -> str:
    """Return the name of a result in words, without its unit."""
    return name.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")
