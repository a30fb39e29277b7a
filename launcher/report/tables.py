"""Tables wider than the terminal: columns that do not fit continue in a further table below.

No column is dropped, and no header is folded that has room beside the first column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from launcher.report.console import plain_table

_BETWEEN = 2  # blanks between columns
_LONGEST_CELL = 40  # longer ones are folded


class Column(NamedTuple):
    """The header and the cells of a column, a cell a row."""

    header: str
    cells: Sequence[Text]
    justify: Literal["left", "right"] = "right"

    def width(self, most: int) -> int:
        """Return the column's width, with cells of at most `most`."""
        longest = max((cell_len(cell.plain) for cell in self.cells), default=0)
        return max(cell_len(self.header), min(longest, most))


def side_by_side(columns: Sequence[Column], width: int) -> Iterator[Table]:
    """Yield the columns in as few tables no wider than `width` as possible.

    Each table begins with the first column, which names the rows.
    """
    longest = min(_LONGEST_CELL, width // 2)
    widths = [column.width(longest) for column in columns]
    room = width - _BETWEEN - max(widths[1:], default=0)  # beside the widest of the others
    widths[0] = max(cell_len(columns[0].header), min(widths[0], room))
    first, *others = zip(columns, widths, strict=True)
    while True:
        shown, left = [first], width - first[1]
        while others and (len(shown) == 1 or others[0][1] + _BETWEEN <= left):
            shown.append(others.pop(0))
            left -= shown[-1][1] + _BETWEEN
        yield _table(shown)
        if not others:
            return


def _table(columns: Sequence[tuple[Column, int]]) -> Table:
    table = plain_table()
    for column, width in columns:
        table.add_column(column.header, justify=column.justify, overflow="fold", width=width)
    for row in zip(*(column.cells for column, _ in columns), strict=True):
        table.add_row(*row)
    return table
